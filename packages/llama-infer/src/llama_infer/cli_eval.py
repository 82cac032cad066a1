"""`llama-infer eval`: how good a model is, as it is set up here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import tyro

from .cli_options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class Eval(ModelOptions):
    """Measure a model's quality. ppl: its perplexity on a text, and bits for each byte; lower is better.

    With --quantization, --dtype, --attention and the like it is measured as it would generate.
    """

    what: tyro.conf.Positional[Literal["ppl"]]
    """What to measure."""
    text: str
    """A file of UTF-8 text; - reads standard input."""
    window: int | None = None
    """Tokens that the model sees at once. Default: 1024, or the context less 1."""
    stride: int | None = None
    """New tokens in each window after the first; the fewer, the more each token has before it. Default: half of
    --window."""
    max_bytes: int | None = None
    """Take only so much from the beginning of the text, to the nearest whole character."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        for name in ("window", "stride", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        text = _read(self.text, self.max_bytes)
        llm = self.load()
        from .perplexity import measure

        window = min(1024, llm.max_model_len - 1) if self.window is None else self.window
        stride = max(1, window // 2) if self.stride is None else self.stride
        with _bar() as tell:
            found = measure(llm, text, window, stride, tell)
        if self.json:
            result = {
                "perplexity": found.perplexity,
                "bits_per_byte": found.bits_per_byte,
                "tokens": found.tokens,
                "bytes": found.bytes,
                "window": window,
                "stride": stride,
                "windows": found.windows,
                "seconds": found.seconds,
                "quantization": self.quantization,
                "kv_cache_dtype": self.kv_cache_dtype,
                "dtype": str(next(llm.model.parameters()).dtype).removeprefix("torch."),
            }
            print(json.dumps(result))
        else:
            print(f"perplexity     {found.perplexity:.4f}")
            print(f"bits per byte  {found.bits_per_byte:.4f}")
            rate = found.tokens / found.seconds
            print(f"{found.tokens} tokens, {found.bytes} bytes, {rate:.0f} tokens/s")
            print(f"windows of {window} tokens, {stride} new in each")
        return 0


def _read(name: str, most: int | None) -> str:
    if name == "-":
        data = sys.stdin.buffer.read() if most is None else sys.stdin.buffer.read(most)
    else:
        with open(name, "rb") as file:
            data = file.read() if most is None else file.read(most)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if most is not None and error.end == len(data) and error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8")  # --max-bytes cut a character
        raise ValueError(f"--text {name} is not UTF-8 at byte {error.start}") from None


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("windows", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
