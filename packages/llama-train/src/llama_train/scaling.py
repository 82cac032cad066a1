"""How much faster P processes are than one: speed-up S = T₁ / T_P and efficiency E = S / P, strong and weak.

Strong: the same step, shared by more processes (Amdahl 1967). Weak: a step that grows with the processes, so that each
has as much as before (Gustafson 1988); S is then P · T₁ / T_P.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan, accumulate_gradients, clip_grad_norm_
from llama_parallel.parity import Task, make_parallel, shares
from llama_parallel.testing import run_ranks
from llama_parallel.trace import CommTrace


@dataclass(frozen=True)
class Measurement:
    """A step on so many processes."""

    processes: int
    rows: int
    """Of the global batch."""
    seconds: float
    """The median step, of the slowest process."""
    communication: float
    """Part of a step in which a process is in a collective, waiting for slower processes included, if none of them
    runs behind arithmetic: 0 to 1, the mean over processes. What pipeline stages send one another is not in it."""


@dataclass(frozen=True)
class Point:
    """A measurement beside that of one process."""

    measured: Measurement
    speedup: float
    efficiency: float


def layout_of(dimension: str, processes: int) -> ParallelConfig:
    """All processes in one dimension: "dp" (shards), "dp_replicate", "tp", "pp" or "cp"."""
    return ParallelConfig(**{"dp_shard" if dimension == "dp" else dimension: processes})


def measure(
    shape: LlamaConfig, layout: ParallelConfig, rows: int, length: int, steps: int, timeout: float
) -> Measurement:
    """Time training steps on forked ranks of the CPU, one thread each.

    Args:
        shape: the model.
        layout: sizes of the mesh.
        rows: of the global batch; must divide over dp.
        length: tokens in a row.
        steps: timed, after two of warm-up; one more is traced for its communication.
        timeout: seconds for all of it.

    Raises:
        RankError: of llama_parallel.testing: a rank failed or took too long.
    """
    accumulation = min(rows // layout.dp, 2 * layout.pp) if layout.pp > 1 else 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab_size, (1, rows, length + 1), generator=generator)
    inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    task = Task(shape, inputs, targets, accumulation, dtype=torch.float32)

    def work(rank: int) -> tuple[list[float], float]:
        parallel = make_parallel(task, layout, ParallelPlan())
        batches = shares(parallel, task.tokens[0], task.targets[0], accumulation)
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-4)

        def step() -> float:
            start = time.perf_counter()
            accumulate_gradients(parallel, batches)
            clip_grad_norm_(parallel.model, 1.0, parallel.mesh)
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - start

        times = [step() for _ in range(steps + 2)][2:]
        with CommTrace(parallel.mesh) as trace:
            whole = step()
        return times, sum(seconds for _, _, seconds in trace.sums().values()) / whole

    of_ranks = run_ranks(work, layout.num_processes, timeout=timeout)
    seconds = max(statistics.median(times) for times, _ in of_ranks)
    share = statistics.mean(part for _, part in of_ranks)
    return Measurement(layout.num_processes, rows, seconds, share)


def points(measurements: Sequence[Measurement], weak: bool) -> list[Point]:
    """S and E of each; the first measurement is that of one process."""
    one = measurements[0]
    assert one.processes == 1
    found = []
    for measured in measurements:
        ratio = one.seconds / measured.seconds
        speedup = measured.processes * ratio if weak else ratio
        found.append(Point(measured, speedup, speedup / measured.processes))
    return found


def plot(curves: Mapping[str, Sequence[Point]]) -> str:
    """Speed-up over processes as an SVG picture, the ideal S = P dashed."""
    most = max(point.measured.processes for curve in curves.values() for point in curve)
    width, height, left, bottom = 480, 360, 50, 40

    def place(x: float, y: float) -> str:
        return f"{left + x / most * (width - left - 20):.1f},{height - bottom - y / most * (height - bottom - 20):.1f}"

    colours = ("#1f5fb4", "#c2410c")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline points="{place(0, most)} {place(0, 0)} {place(most, 0)}" fill="none" stroke="black"/>',
        f'<polyline points="{place(0, 0)} {place(most, most)}" stroke="grey" stroke-dasharray="4" fill="none"/>',
    ]
    ticks = sorted({point.measured.processes for curve in curves.values() for point in curve})
    for tick in ticks:
        x, y = place(tick, 0).split(",")
        lines.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{tick}</text>')
        x, y = place(0, tick).split(",")
        lines.append(f'<text x="{float(x) - 8}" y="{float(y) + 4}" text-anchor="end">{tick}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        path = " ".join(place(point.measured.processes, point.speedup) for point in curve)
        colour = colours[number % len(colours)]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{left + 12}" y="{30 + 16 * number}" fill="{colour}">{name}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">processes P; speed-up S upwards</text>')
    return "\n".join([*lines, "</svg>", ""])
