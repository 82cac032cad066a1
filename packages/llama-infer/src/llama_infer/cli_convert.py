"""`llama-infer convert`: a model out of one format into another, complete or not at all."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from .loading_bar import loading_bar

if TYPE_CHECKING:
    import torch

    from llama_core import Tokenizer

QUANTISED = ("Q8_0", "Q4_0")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model in another format: Hugging Face, Meta or GGUF. Never replaces what is there unless told to."""

    source: Annotated[str, tyro.conf.Positional]
    """A model's folder (Hugging Face's or Meta's format), a .gguf file, or a name on a hub."""
    target: Annotated[str, tyro.conf.Positional]
    """The folder to write, or the .gguf file."""
    format: Literal["auto", "hf", "meta", "gguf"] = "auto"
    """auto: gguf if the target ends in .gguf, else hf."""
    dtype: Literal["auto", "float32", "float16", "bfloat16", "Q8_0", "Q4_0"] = "auto"
    """Type of the written weights; Q8_0 and Q4_0 for GGUF only. auto: the source's (float32 if that is quantised)."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Round the weights of the layers to fewer bits, for the format hf: a folder with a quantization_config in
    compressed-tensors' format, which this and other engines load as it is."""
    rope_factor: float | None = None
    """For a source in Meta's format of Llama 3.1 or later, whose params.json does not say it: 8 for 3.1 and 3.3, 32 for
    3.2."""
    overwrite: bool = False
    """Replace a model that stands in the target."""

    def run(self) -> int:
        target = Path(self.target).expanduser()
        form = self._format(target)
        if self.dtype in QUANTISED and form != "gguf":
            raise ValueError(f"--dtype {self.dtype} is a type of GGUF; the format is {form}")
        if self.quantization is not None and form != "hf":
            raise ValueError(f"--quantization writes Hugging Face's format; the format is {form}")
        if not self.overwrite and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
            raise ValueError(f"{target} is there already; name another target, or add --overwrite")
        from llama_core import CheckpointError, load_model, load_tokenizer, save_model
        from llama_core.hub import local_path

        source = local_path(Path(self.source).expanduser() if Path(self.source).expanduser().exists() else self.source)
        if source.exists() and source.resolve() == target.resolve():
            raise ValueError(f"source and target are both {source}; name another target")
        torch_dtype = None if self.dtype in ("auto", *QUANTISED) else _torch_dtype(self.dtype)
        with loading_bar("reading") as tell:
            model = load_model(source, torch_dtype, rope_factor=self.rope_factor, progress=tell)
        try:
            tokenizer: Tokenizer | None = load_tokenizer(source)
        except CheckpointError as error:
            tokenizer = None
            _note(f"the tokenizer is left out: {error}")
        if self.quantization is not None:
            from .save_rounded import save_rounded

            with loading_bar("rounding") as tell:
                save_rounded(
                    model,
                    target,
                    self.quantization,
                    dtype=torch_dtype,
                    overwrite=self.overwrite,
                    generation=_generation(source),
                    tokenizer=tokenizer,
                    progress=tell,
                )
            print(f"{target}: hf, {self.quantization}, {model.num_parameters():,} parameters")
            return 0
        with loading_bar("writing") as tell:
            save_model(
                model,
                target,
                form,
                dtype=self.dtype if self.dtype in QUANTISED else torch_dtype,
                overwrite=self.overwrite,
                generation=_generation(source) if form == "hf" else None,
                tokenizer=tokenizer if form != "meta" else None,
                progress=tell,
            )
        if form == "meta":
            _copy_meta_tokenizer(source, target)
        print(f"{target}: {form}, {model.num_parameters():,} parameters")
        return 0

    def _format(self, target: Path) -> str:
        if self.format != "auto":
            return self.format
        return "gguf" if target.suffix == ".gguf" else "hf"


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _generation(source: Path) -> dict[str, Any] | None:
    """The source's generation_config.json as it stands; None, and a note, where there is no valid one."""
    path = source / "generation_config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # Llama 3.2 was first published with one that is not JSON
        _note(f"{path} is left out, it is not valid JSON: {error}")
        return None
    return values if isinstance(values, dict) else None


def _copy_meta_tokenizer(source: Path, target: Path) -> None:
    original = source / "tokenizer.model"
    if original.is_file():
        shutil.copyfile(original, target / original.name)
    else:
        _note(f"{source} has no tokenizer.model, the only form in which Meta's format has a tokenizer; add it yourself")


def _note(text: str) -> None:
    print(f"llama-infer: {text}", file=sys.stderr)
