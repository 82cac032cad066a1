"""The figures of a step and of a measurement, and the file that keeps them: one line of JSON each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepMetrics:
    """What is known after a step. Times and speeds are those since the line before, evaluations and saves left out."""

    step: int
    tokens: int
    """Tokens trained on since step 1."""
    loss: float
    """Mean cross-entropy over the unmasked tokens of this step, in nats."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    """The same for one GPU, or one process on a CPU."""
    mfu: float | None
    """0 to 1, by picotron's formula; None where the device's peak is not known."""
    mfu_torchtitan: float | None
    """0 to 1, by torchtitan's, which leaves the input embedding out."""
    memory: int
    """Peak bytes: allocated on the GPU, or resident in the process on a CPU."""
    data_wait: float
    """Milliseconds that a step waited for its batches, on average, on rank 0."""
    skipped: int = 0
    """Steps since step 1 of this start that were left out because they were not finite."""


@dataclass(frozen=True)
class EvaluationMetrics:
    """A measurement on held-out text after a step."""

    step: int
    loss: float
    """Mean cross-entropy in nats over `tokens` targets."""
    tokens: int
    perplexity: float
    bits_per_byte: float | None
    """None where the bytes of what was scored are not known."""


class MetricsSink(Protocol):
    """Where figures go besides the console; on rank 0 alone."""

    def write(self, metrics: StepMetrics) -> None:
        """Those of a step; steps rise."""

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Those of a measurement."""

    def write_sample(self, step: int, text: str) -> None:
        """A text that the model wrote after a step."""

    def close(self) -> None:
        """Nothing more will come."""


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
        # A line that a bad disk made unreadable is dropped like one that was cut off: a log must not keep a run down.
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n") if path.exists() else []
        kept = [line for line in lines if _step(line) is not None and (_step(line) or 0) <= done]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._path = path
        # A finished run that is started again measures again; the file says it once.
        self._written: set[tuple[object, object]] = {
            (record.get("kind"), _step(line)) for line in kept for record in [json.loads(line)]
        }

    def write(self, metrics: StepMetrics) -> None:
        """Append a training line."""
        self._append({"kind": "train", **asdict(metrics)})

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append a measurement; not twice for one step."""
        self._append_once({"kind": "held_out", **asdict(metrics)})

    def write_sample(self, step: int, text: str) -> None:
        """Append a text sample; not twice for one step."""
        self._append_once({"kind": "sample", "step": step, "text": text})

    def close(self) -> None:
        """Every line is on its way to the disk already."""

    def _append_once(self, record: dict[str, object]) -> None:
        key = (record["kind"], record["step"])
        if key not in self._written:
            self._written.add(key)
            self._append(record)

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricsSink] = ()) -> None:
        self._sinks = sinks

    def write(self, metrics: StepMetrics) -> None:
        """To all."""
        for sink in self._sinks:
            sink.write(metrics)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """To all."""
        for sink in self._sinks:
            sink.write_evaluation(metrics)

    def write_sample(self, step: int, text: str) -> None:
        """To all."""
        for sink in self._sinks:
            sink.write_sample(step, text)

    def close(self) -> None:
        """All."""
        for sink in self._sinks:
            sink.close()


def _plain(value: object) -> object:
    """JSON has no word for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut
        return None
