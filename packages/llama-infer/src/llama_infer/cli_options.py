"""Flags that several commands share. No torch here: help and mistakes must answer at once."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from .embedded import embedded_model
from .loading_bar import loading_bar
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .llm import LLM


_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w./@-]*")


def model_path(model: str | None) -> Path:
    """Where --model lies, the embedded model for None; what may be a name on a hub is passed on as it is.

    Raises:
        ValueError: there is nothing, found out without the seconds that torch takes to import.
    """
    try:
        path = embedded_model() if model is None else Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that is closed to us, ~nobody
        raise ValueError(f"--model {model!r}: {getattr(error, 'strerror', None) or error}") from None
    if not exists and not _HUB_NAME.fullmatch(model or ""):
        raise ValueError(f"{path} does not exist; --model wants a model's folder, a .gguf file or a name on a hub")
    return path


def _budgets(given: tuple[str, ...]) -> dict[int | str, int | str] | None:
    """cpu=200MB → {"cpu": "200MB"}."""
    budgets: dict[int | str, int | str] = {}
    for text in given:
        place, equals, size = text.partition("=")
        if not equals or not size or not (place == "cpu" or place.isdecimal()):
            raise ValueError(f"--max-memory wants cpu=SIZE or GPU=SIZE, such as cpu=200MB or 0=20GiB, got {text!r}")
        budgets[int(place) if place.isdecimal() else place] = int(size) if size.isdecimal() else size
    return budgets or None


@dataclass(frozen=True)
class ModelOptions:
    model: str | None = None
    """A model's folder (Hugging Face's or Meta's format), a .gguf file, or a name on a hub. Default: the embedded
    SmolLM2-135M-Instruct."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. auto: float32 on a CPU, bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: a GPU if there is one."""
    max_model_len: int | None = None
    """The longest sequence, prompt and new tokens together. Default: the model's context."""
    max_num_seqs: int | None = None
    """The most sequences that run at once. Default: 256 on a GPU, 32 on a CPU."""
    gpu_memory_utilization: float = 0.9
    """The share of a GPU's memory to use, weights included."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: fast kernels where there is a GPU. plain: torch's own operations."""
    attention: Literal["auto", "sdpa", "flash", "triton", "plain"] = "auto"
    """auto: the paged Triton kernels on a GPU, torch's scaled_dot_product_attention elsewhere."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Round the weights of the layers to fewer bits."""
    tensor_parallel_size: int = 1
    """How many processes share the model: torchrun --nproc-per-node N -m llama_infer … --tensor-parallel-size N."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values in the cache. auto: that of the activations. fp8: half the memory of bfloat16."""
    device_map: Literal["auto"] | None = None
    """auto: spread a model that is too large over GPUs, main memory and disk (extra offload). Slow, but it runs."""
    max_memory: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """For --device-map: how much weights may take somewhere, such as cpu=200MB or 0=20GiB (GPU 0); may be given several
    times. Default: what is free."""
    offload_folder: str | None = None
    """For --device-map: where weights on disk go. Default: a temporary folder."""
    speculative_tokens: int = 0
    """The most tokens to guess ahead from the text itself. The result stays the same; texts that repeat come sooner."""
    draft: str | None = None
    """A smaller model with the same tokens that guesses ahead. Greedy results stay the same, drawn ones as likely."""
    num_speculative_tokens: int | None = None
    """How many tokens --draft guesses in each step. Default: 4."""
    generation_config: Literal["auto", "off"] = "auto"
    """auto: the model's generation_config.json gives the defaults of the sampling flags."""

    def load(self) -> LLM:
        """The model. Raises ValueError where there is none, without the seconds that torch takes to import."""
        path = model_path(self.model)
        draft = None if self.draft is None else model_path(self.draft)
        from .llm import LLM

        # Ranks after the first never come back from LLM(…), and have nothing to show.
        shown = self.tensor_parallel_size == 1 or os.environ.get("RANK", "0") == "0"
        with loading_bar("loading", shown) as tell:
            llm = LLM(
                path,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kernels=self.kernels,
                attention=self.attention,
                quantization=self.quantization,
                tensor_parallel_size=self.tensor_parallel_size,
                kv_cache_dtype=self.kv_cache_dtype,
                device_map=self.device_map,
                max_memory=_budgets(self.max_memory),
                offload_folder=self.offload_folder,
                speculative_tokens=self.speculative_tokens,
                draft=draft,
                num_speculative_tokens=self.num_speculative_tokens,
                generation_config=self.generation_config,
                progress=tell,
            )
        for remark in llm.remarks:
            print(f"llama-infer: {remark}", file=sys.stderr)
        return llm


@dataclass(frozen=True)
class SamplingOptions:
    max_tokens: int | None = None
    """The most tokens to produce. Default: the model's, or 512 (in a chat: to the end of the context)."""
    temperature: float | None = None
    """0 takes the most probable token each time; below 1 sharpens, above 1 flattens. Default: the model's, or 1."""
    top_k: int | None = None
    """Draw from the k most probable tokens only; 0 draws from all. Default: the model's, or 0."""
    top_p: float | None = None
    """Draw from the fewest most probable tokens that sum to this probability. Default: the model's, or 1."""
    min_p: float | None = None
    """Draw from tokens at least this probable relative to the most probable. Default: the model's, or 0."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of the prompt and the output less probable. Default: the model's, or 1."""
    presence_penalty: float | None = None
    """Taken off the logits of tokens in the output. Default 0."""
    frequency_penalty: float | None = None
    """Taken off the logits of tokens in the output, for each time. Default 0."""
    seed: int | None = None
    """Draw the same each time. Default: another draw each time."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End before this text; may be given several times."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    structured_outputs: str | None = None
    """The form that the output must have, as JSON: {"json": SCHEMA}, {"regex": "…"}, {"choice": ["…"]},
    {"grammar": "…"} or {"json_object": true}. Needs the extra `guided`."""

    def explicit(self) -> dict[str, Any]:
        """The settings given on the command line, by names of SamplingParams.

        Raises:
            ValueError: one outside its range.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingOptions)}
        # By identity: 0 is a setting, and equals False.
        given = {
            name: value for name, value in values.items() if value is not None and value is not False and value != ()
        }
        if "structured_outputs" in given:
            given["structured_outputs"] = _object("--structured-outputs", given["structured_outputs"])
        SamplingParams(**given)  # a mistake should not wait for the model to load
        return given


def _object(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} must be a JSON object: {error}") from None
