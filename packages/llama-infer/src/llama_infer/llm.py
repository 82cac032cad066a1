"""`LLM`: a model, its tokenizer and an engine behind one object."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal

import torch

from llama_core import Llama, Tokenizer, load_tokenizer
from llama_core.hub import local_path

from .defaults import ModelSampling, model_sampling
from .draft import guesses_of, load_draft
from .embedded import embedded_model
from .engine_build import EngineSettings, build_engine
from .loading import load_for_inference
from .offload import Spread
from .outputs import RequestOutput, StreamChunk
from .placement import resolve_device, resolve_dtype
from .progress import progress_bar
from .request import Message, Prompt, Request, Requests
from .rounding import QUANTIZATIONS
from .sampling_params import SamplingParams
from .tensor_parallel import lead_or_follow


class LLM:
    """Generates text with a Llama model.

    >>> llm = LLM()  # the embedded SmolLM2
    >>> llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32))[0].text

    Args:
        model: what `llama_core.load_model` takes: a folder in Hugging Face's or Meta's format, a .gguf file, a name on
            a hub. None for the embedded model. Or a `Llama` you hold, used as it stands (its dtype and device too).
        tokenizer: a tokenizer, or the path of one; by default the model's own. A `Llama` without one takes and gives
            token ids only.
        dtype: "auto" (float32 on a CPU, bfloat16 on a GPU), "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        max_model_len: the longest sequence, prompt and new tokens together; by default, and at most, the model's
            context, or what memory holds.
        max_num_seqs: the most sequences that run at once; by default 256 on a GPU and 32 on a CPU.
        max_num_batched_tokens: the most tokens in one pass of the model. Longer prompts go in parts.
        block_size: tokens in a block of the key/value cache.
        gpu_memory_utilization: the share of a GPU's memory to use, weights included.
        kv_cache_memory_bytes: of the key/value cache, in place of what is measured.
        kv_cache_dtype: "auto" (that of the activations) or "fp8", e4m3 with a scale for each head: half of bfloat16.
        enable_prefix_caching: whether a prompt's beginning is taken from the cache where it has been computed before.
        enforce_eager: no CUDA graphs.
        kernels: "auto" (llama_kernels' on a GPU) or "plain" (torch's, whose draws for a seed are a CPU's too).
        speculative_tokens: the most tokens to guess ahead from the text itself; the result stays the same, texts that
            repeat themselves come sooner (on a GPU most where few sequences run: steps in which they have different
            numbers of guesses are no CUDA graphs).
        draft: a smaller model with the same tokens, as `model` is given, that guesses ahead (`draft.py`). Greedy tokens
            stay the same; what is drawn has the same distribution, with other draws for a seed.
        num_speculative_tokens: how many tokens it guesses in each step, 4 by default.
        quantization: "int8", "int4" or "fp8" rounds the weights of the layers when they are loaded; None leaves them.
        tensor_parallel_size: how many processes share the model; torchrun starts them (`tensor_parallel.py`). On ranks
            after the first this does not return: it computes what rank 0 asks for, and ends the process (SystemExit)
            when rank 0's LLM is closed or its program ends. One LLM per program then.
        device_map, max_memory, offload_folder: "auto" spreads a model that is too large over GPUs, main memory and
            disk (extra `offload`); `max_memory` such as {0: "20GiB", "cpu": "200MB"}. See `llama_infer.offload.Spread`.
        attention: "auto", "sdpa", "flash", "triton" or "plain"; see `llama_infer.placement.attention_for`.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "off" doesn't.
        progress: called with the bytes of the model that are loaded, and all of them.

    Attributes:
        default_params: what `generate` uses where it is given none.
        model_sampling: the sampling defaults that came with the model.
        max_model_len: the longest sequence.
        kernels, attention: the choices, "auto" of the latter resolved.
        remarks: what the user should know about the engine.
        draft: the draft model, if there is one.
        engine, requests: what generates, and what makes requests for it.

    Raises:
        ValueError: nothing usable at a path (`llama_core.CheckpointError`), or an argument outside its range.
    """

    def __init__(
        self,
        model: str | Path | Llama | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        kernels: str = "auto",
        attention: str = "auto",
        speculative_tokens: int = 0,
        draft: str | Path | Llama | None = None,
        num_speculative_tokens: int | None = None,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        device_map: str | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        offload_folder: str | Path | None = None,
        generation_config: Literal["auto", "off"] = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        guesses = guesses_of(draft, num_speculative_tokens, speculative_tokens, tensor_parallel_size)
        eager = enforce_eager or device_map is not None  # weights that come and go are no part of a graph
        settings = EngineSettings(
            max_model_len, max_num_seqs, max_num_batched_tokens, block_size, gpu_memory_utilization,
            kv_cache_memory_bytes, enable_prefix_caching, eager, kernels, attention, speculative_tokens,
            guesses, kv_cache_dtype,
        )  # fmt: skip
        if generation_config not in ("auto", "off"):
            raise ValueError(f"generation_config must be 'auto' or 'off', got {generation_config!r}")
        self.model_sampling = ModelSampling()
        if quantization is not None and (quantization not in QUANTIZATIONS or isinstance(model, Llama)):
            held = "; a Llama that you hold, round with quantize_model" if isinstance(model, Llama) else ""
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}{held}, got {quantization!r}")
        self._spread = spread = Spread.of(device_map, max_memory, offload_folder, isinstance(model, Llama))
        ranks = None
        if tensor_parallel_size != 1:
            from .ranks import join_ranks  # torch.distributed's meshes take a second to import

            ranks = join_ranks(tensor_parallel_size, device, isinstance(model, Llama))
        if isinstance(model, Llama):
            self.model = model
        else:
            path = embedded_model() if model is None else local_path(Path(model).expanduser())
            if tokenizer is None:
                with warnings.catch_warnings():  # a broken generation_config.json: `model_sampling` says it
                    warnings.simplefilter("ignore")
                    tokenizer = load_tokenizer(path)
            where = resolve_device(device) if ranks is None else ranks.device
            load = load_for_inference if spread is None else spread.load
            kind = {"kernels": kernels, "quantization": quantization, "ranks": ranks, "progress": progress}
            self.model = load(path, resolve_dtype(dtype, where), where, **kind)  # type: ignore[arg-type]
            if generation_config == "auto":
                self.model_sampling = model_sampling(path)
        self.draft = load_draft(draft, self.model, kernels, progress) if isinstance(draft, str | Path) else draft
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self.default_params = self.sampling_params()
        self.kernels, self._settings, self._ranks = kernels, settings, ranks
        self._build()
        self._farewell = None if ranks is None else lead_or_follow(self, self.engine.runner, ranks)

    def close(self) -> None:
        """Let the other ranks end, where several share the model. Also done when the program ends."""
        if self._farewell is not None:
            self._farewell()

    def _build(self) -> None:
        built = build_engine(self.model, self.tokenizer, self._settings, self._ranks, self.draft)
        self.engine, self.max_model_len, self.remarks = built.engine, built.max_model_len, built.remarks
        self.attention = built.attention
        if self._spread is not None:
            self.remarks = (self._spread.told, *self.remarks)
        self.requests = Requests(self.tokenizer, self.model.config.vocab_size, self.max_model_len)

    def restart(self) -> None:
        """A new engine with an empty cache, in place of one that has failed. Requests of the old one are lost.

        Raises:
            RuntimeError: several ranks share the model; they are out of step, and must be started anew.
        """
        if self._ranks is not None:
            raise RuntimeError("an engine on several ranks cannot be restarted after an error; start them anew")
        self.__dict__.pop("engine", None)  # its cache's memory is needed for the new one
        gc.collect()
        self._build()

    @property
    def acceptance_rate(self) -> float | None:
        """The share of all guesses so far that were right; None where nothing was guessed."""
        return self.engine.accepted / self.engine.guessed if self.engine.guessed else None

    def sampling_params(self, **settings: Any) -> SamplingParams:
        """Sampling parameters from explicit settings; the model's own defaults (`generation_config`) fill the rest."""
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        for name in settings.keys() - names:
            raise ValueError(f"no sampling setting {name!r}; there are {', '.join(sorted(names))}")
        return SamplingParams(**{**self.model_sampling.settings, **settings})

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many prompts.

        Args:
            prompts: texts or lists of token ids, mixed at will; or a single one.
            params: for all, or one for each prompt; `default_params` by default.
            show_progress: a bar on standard error; by default for more than one prompt, where that is a terminal.

        Returns:
            One output for each prompt, in their order. One that an error ended, such as a row of NaN, has the finish
            reason "abort" and says why in `error`; the others are not touched.

        Raises:
            ValueError: before any work, naming the prompt: one that is empty, or too long to leave room for a new
                token, or with ids outside the vocabulary; as many params as prompts are wanted, or one. After it, if
                errors have ended all of them.
        """
        if not isinstance(prompts, str | Seq):
            raise ValueError(
                f"prompts are of type {type(prompts).__name__}; a text, a list of texts or of ids is wanted"
            )
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if single else list(prompts)
        encoded = [self.requests.encode(prompt, index) for index, prompt in enumerate(listed)]
        return self._run(encoded, params, show_progress)

    def chat(
        self,
        conversations: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn of one or many chats, in the model's own chat format.

        Args:
            conversations: lists of messages (`role`, `content`), or a single one.
            params, show_progress: as for `generate`.

        Raises:
            ValueError: as for `generate`; there is no chat template, or it refuses the messages.
        """
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: list[Any] = [conversations] if single else list(conversations)
        return self._run([(None, self.encode_chat(messages)) for messages in listed], params, show_progress)

    def stream(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Continue one prompt or chat token by token; the chunks' texts joined are the text of `generate`.

        What the prompt has in common with earlier ones is not computed again. Close the iterator to end early.

        Raises:
            ValueError: as for `generate`, at once and not at the first chunk; or for n above 1.
        """
        params = params or self.default_params
        if params.n != 1:
            raise ValueError(f"a stream is one continuation; n must be 1, got {params.n}")
        text, ids = self.requests.encode(prompt)
        return self._chunks(self.requests.request(text, ids, params, streaming=True))

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """The token ids of a chat, up to where the assistant's turn begins."""
        return self.requests.needs_tokenizer("a chat").encode_chat(list(messages))

    def _chunks(self, request: Request) -> Generator[StreamChunk, None, None]:
        sequence = request.sequences[0]
        assert sequence.chunks is not None
        steps = self.engine.run([sequence])
        try:
            for _ in steps:
                while sequence.chunks:
                    yield sequence.chunks.popleft()
            yield from sequence.chunks
        finally:
            steps.close()
        if sequence.error is not None:
            raise ValueError(f"prompt 0: {sequence.error}")

    def _run(
        self,
        encoded: list[tuple[str | None, list[int]]],
        params: SamplingParams | Seq[SamplingParams] | None,
        show_progress: bool | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(encoded)
        if len(params) != len(encoded):
            raise ValueError(f"got {len(params)} params for {len(encoded)} prompts; give one, or one for each")
        requests = [
            self.requests.request(text, ids, each, index)
            for index, ((text, ids), each) in enumerate(zip(encoded, params, strict=True))
        ]
        sequences = [sequence for request in requests for sequence in request.sequences]
        with progress_bar(sequences, show_progress) as tell:
            for _ in self.engine.run(sequences):
                tell()
        errors = [sequence.error for sequence in sequences]
        if errors and all(error is not None for error in errors):
            raise ValueError(f"prompt 0: {errors[0]}")
        return [request.output() for request in requests]
