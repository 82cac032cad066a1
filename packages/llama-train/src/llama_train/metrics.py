"""The figures of a step: as one aligned line, and as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class StepMetrics:
    """What is known after a step. Times and speeds are those since the line before."""

    step: int
    tokens: int
    """Tokens trained on since step 1."""
    loss: float
    """Mean over the unmasked tokens of this step, in nats."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens_per_second: float
    mfu: float | None
    """0 to 1; None where the device's peak is not known."""
    memory: int
    """Peak bytes: allocated on the GPU, or resident in the process on a CPU."""


def format_line(metrics: StepMetrics, last_step: int) -> str:
    """The console line; every line of a run has the same width."""
    width = len(str(last_step))
    used = "   –  " if metrics.mfu is None else f"{100 * metrics.mfu:5.1f}%"
    return (
        f"step {metrics.step:{width}d}/{last_step}  loss {metrics.loss:7.4f}  grad {metrics.grad_norm:8.3f}  "
        f"lr {metrics.learning_rate:.2e}  tokens {human(metrics.tokens):>7}  "
        f"{human(metrics.tokens_per_second):>7} tok/s  MFU {used}  memory {metrics.memory / 1e9:6.2f} GB"
    )


def human(number: float) -> str:
    """1234 → 1.23K, as picotron prints it."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size * 0.999995:  # 999,995 would read 1000.00K
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU since the start; on a CPU the most that was resident, 0 if the OS cannot say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
        import sys
    except ImportError:  # Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


class MetricsFile:
    """metrics.jsonl of a run. Opening it for step n drops the lines after n: they will be written again."""

    def __init__(self, path: Path, done: int) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) is not None and (_step(line) or 0) <= done]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._path = path
        self._evaluated = {_step(line) for line in kept if json.loads(line).get("kind") == "held_out"}

    def write(self, metrics: StepMetrics) -> None:
        """Append a training line."""
        self._append({"kind": "train", **asdict(metrics)})

    def write_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Append a held-out loss; not twice for one step, as when a finished run is started again."""
        if step in self._evaluated:
            return
        self._evaluated.add(step)
        self._append({"kind": "held_out", "step": step, "loss": loss, "tokens": tokens})

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut
        return None
