"""`llama-infer inspect`: what a model does with a prompt, as a page and in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cli_options import model_path


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a model does with a prompt: tokens, positions, attention, cost, and the next token layer by layer.

    Writes a report (one HTML file, nothing else needed to read it) and prints a summary.
    """

    prompt: str
    """The text to look at."""
    model: str | None = None
    """A model's folder (Hugging Face's or Meta's format), a .gguf file, or a name on a hub. Default: the embedded
    SmolLM2-135M-Instruct."""
    output: Path = Path("inspect.html")
    """The report; a file of this name is replaced."""
    layer: int = 0
    """The layer whose attention is shown. Below zero it counts from the last."""
    heads: tuple[int, ...] = (0, 1, 2)
    """The query heads whose attention is shown; those that the model lacks are left out of the default."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. auto: float32 on a CPU, bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: a GPU if there is one."""

    def run(self) -> int:
        if not self.prompt:
            raise ValueError("the prompt is empty; give --prompt TEXT")
        if not self.heads:
            raise ValueError("no heads; give --heads with at least one number")
        if not self.output.parent.is_dir():
            raise ValueError(f"--output {self.output}: there is no folder {self.output.parent}")
        path = model_path(self.model)
        from rich.console import Console

        from llama_core import load_model, load_tokenizer
        from llama_core.hub import local_path
        from llama_core.load import open_checkpoint

        from .embedded import NAME
        from .inspection import Recorder, look, report
        from .inspection.stored import stored_tensors
        from .inspection.summary import print_summary
        from .placement import resolve_device, resolve_dtype

        path = local_path(path)
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        checkpoint.close()
        layers = config.num_hidden_layers
        layer = self.layer + layers if self.layer < 0 else self.layer
        if not 0 <= layer < layers:
            raise ValueError(f"--layer {self.layer}: the model's layers are 0 to {layers - 1}")
        heads = self.heads
        if heads == Inspect.heads:
            heads = tuple(head for head in heads if head < config.num_attention_heads)
        if absent := [head for head in heads if not 0 <= head < config.num_attention_heads]:
            raise ValueError(f"--heads {absent[0]}: the model's heads are 0 to {config.num_attention_heads - 1}")
        recorder = Recorder(keep=layer)
        device = resolve_device(self.device)
        tokenizer = load_tokenizer(path)
        model = load_model(path, resolve_dtype(self.dtype, device), device, recorder.ops)
        name = NAME if self.model is None else path.name
        seen = look(model, recorder, tokenizer, self.prompt, name=name, stored=stored_tensors(path), heads=heads)
        self.output.write_text(report(seen), encoding="utf-8")
        print_summary(seen, Console(file=sys.stdout))
        print(f"\nreport: {self.output}")
        return 0
