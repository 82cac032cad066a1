"""How the kernel benchmarks time, what they hold a time against, and how they print it."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

BF16 = torch.bfloat16


@dataclass
class Row:
    """One line of the table."""

    operation: str
    who: str
    ms: float
    ceiling_ms: float  # the same bytes copied, or the same products
    note: str = ""

    @property
    def fraction(self) -> float:
        return self.ceiling_ms / self.ms


def events(call: Callable[[], object], times: int) -> float:
    """Median milliseconds of a call."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for _ in range(3):
        call()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs)


def timed(call: Callable[[], object], times: int = 20, inner: int = 10) -> float:
    """Milliseconds of a call replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            call()
    return events(graph.replay, times) / inner


def copying(nbytes: float) -> float:
    """Milliseconds to copy so that nbytes are read or written; no graph, for in a graph torch's copy is slow."""
    source = torch.randn(int(nbytes) // 4, device="cuda").to(BF16)
    target = torch.empty_like(source)
    return events(lambda: target.copy_(source), 30)


def forward_and_backward(
    function: Callable[..., object], inputs: list[Tensor], grads: list[Tensor]
) -> tuple[float, float]:
    """Milliseconds forward and backward of function(*inputs), whose outputs receive grads."""
    with torch.no_grad():
        forward = timed(lambda: function(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # backward runs on forward's stream: capture must use the same
        out = function(*leaves)
        outputs = list(out) if isinstance(out, tuple) else [out]
        call = lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)  # noqa: E731
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(5):
            call()
    return forward, events(graph.replay, 20) / 5


def both_ways(
    name: str,
    rivals: dict[str, Callable[..., object]],
    inputs: list[Tensor],
    grads: list[Tensor],
    tensors: tuple[int, int],
) -> Iterator[Row]:
    """Rows of an operation that is bound by memory; `tensors` of the inputs' size move forward and backward."""
    size = max(x.nbytes for x in inputs)
    ceilings = copying(tensors[0] * size), copying(tensors[1] * size)
    for who, function in rivals.items():
        forward, backward = forward_and_backward(function, inputs, grads)
        yield Row(f"{name} forward", who, forward, ceilings[0], f"{tensors[0] * size / forward / 1e9:.2f} TB/s")
        yield Row(f"{name} backward", who, backward, ceilings[1], f"{tensors[1] * size / backward / 1e9:.2f} TB/s")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def plot(rows: list[Row], path: str) -> None:
    """Bars of the fraction of the ceiling."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(rows) + 1))
    axes.barh([f"{row.operation}: {row.who}" for row in rows], [row.fraction for row in rows])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("fraction of the ceiling (the same bytes copied, or the same products in bf16)")
    axes.invert_yaxis()
    axes.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
