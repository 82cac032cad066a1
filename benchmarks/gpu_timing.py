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
    flops: float = 0.0  # operations and bytes that cannot be avoided, for the roofline
    nbytes: float = 0.0

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
    operations: tuple[int, int],
) -> Iterator[Row]:
    """Rows of an operation that is bound by memory; `tensors` of the inputs' size move forward and backward.

    `operations` are the additions, products and the like for one element, forward and backward.
    """
    size, count = max(x.nbytes for x in inputs), max(x.numel() for x in inputs)
    ceilings = copying(tensors[0] * size), copying(tensors[1] * size)
    for who, function in rivals.items():
        forward, backward = forward_and_backward(function, inputs, grads)
        for i, (way, ms) in enumerate((("forward", forward), ("backward", backward))):
            nbytes = tensors[i] * size
            rate = f"{nbytes / ms / 1e9:.2f} TB/s"
            yield Row(f"{name} {way}", who, ms, ceilings[i], rate, operations[i] * count, nbytes)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def plot(rows: list[Row], path: str, copy_rate: float, matrix_rate: float) -> None:
    """The roofline (Williams et al. 2009) of our own rows: operations per second over operations per byte.

    `copy_rate` in bytes/s and `matrix_rate` in FLOP/s are the roofs, both measured in the same run.
    """
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(11, 6.5))
    knee = matrix_rate / copy_rate
    axes.loglog([0.4, knee, 2e4], [0.4 * copy_rate, matrix_rate, matrix_rate], color="black", linewidth=1)
    axes.annotate(f"copy, {copy_rate / 1e12:.2f} TB/s", (8, 14 * copy_rate), rotation=45)
    axes.annotate(f"bf16 products, {matrix_rate / 1e12:.0f} TFLOP/s", (knee, 0.6 * matrix_rate))
    shown = [row for row in rows if row.flops and row.nbytes]
    kinds = list(dict.fromkeys(row.operation.split()[0] for row in shown))
    for row in shown:
        x, y = row.flops / row.nbytes, row.flops / row.ms * 1e3
        kind = kinds.index(row.operation.split()[0])
        label = f"{row.operation} ({row.who}): {row.fraction:.2f}"
        axes.plot([x], [y], marker="os^vDPX*h<"[kind % 10], linestyle="", label=label, alpha=0.8, color=f"C{kind % 10}")
    axes.set_xlabel("operations per byte that has to move")
    axes.set_ylabel("operations per second")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5), title="of its own ceiling", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100, bbox_inches="tight")
