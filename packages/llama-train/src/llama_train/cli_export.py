"""`llama-train export RUN`: a checkpoint of a run as a model that other programs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from .config_checks import require


@dataclass(frozen=True)
class ExportConfig:
    """Write a model from any checkpoint of a run, on one process and without a GPU, whatever layout the run had."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder."""
    step: int | None = None
    """Which checkpoint; unset means the newest that is whole."""
    format: Literal["hf", "meta", "gguf"] = "hf"
    """hf: config.json, safetensors and the tokenizer; meta: params.json and consolidated.00.pth; gguf: one file with
    the tokenizer, for llama.cpp."""
    out: str | None = None
    """Folder (gguf: file) to write; unset means RUN/FORMAT-step-NNNNNNNN, RUN/step-NNNNNNNN.gguf or
    RUN/adapter-step-NNNNNNNN."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "Q8_0", "Q4_0"] = "auto"
    """Type of the weights; auto is that of the run. float32 gives the master weights of a bfloat16 run; the last two
    are for gguf."""
    merge: bool = False
    """Of a run with [lora]: the model with the adapter added to its weights (what is done without any flag)."""
    adapter: bool = False
    """Of a run with [lora]: the adapter alone, in PEFT's format."""
    overwrite: bool = False
    """Replace what is there."""

    def __post_init__(self) -> None:
        require(self.step is None or self.step >= 1, "--step", self.step, "at least 1")
        require(self.dtype not in ("Q8_0", "Q4_0") or self.format == "gguf", "--dtype", self.dtype,
                f"auto, float32, bfloat16 or float16 with --format {self.format}")  # fmt: skip
        if self.adapter and (self.merge or self.format != "hf" or self.dtype != "auto"):
            raise ValueError(
                "--adapter writes the adapter as it was trained: it goes with no --merge, --format, --dtype"
            )


def main(arguments: list[str]) -> int:
    """Export, and print where to."""
    config = tyro.cli(ExportConfig, args=arguments, prog="llama-train export")

    from .export_checkpoint import export_checkpoint

    print(f"exported   {export_checkpoint(config, print)}")
    return 0
