"""Where the time of a step went on one GPU: arithmetic, communication that nothing hid, and nothing at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[int, int]
"""Begin and end, in nanoseconds."""


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the GPU."""

    name: str
    begin: int
    end: int

    @property
    def communicates(self) -> bool:
        """NCCL's kernels, and copies from GPU to GPU. Copies within a GPU are work like any other."""
        return "nccl" in self.name.lower() or "PtoP" in self.name


@dataclass(frozen=True)
class Shares:
    """Of the time from the first kernel's begin to the last one's end; they add up to 1."""

    compute: float
    exposed: float
    """Communication that runs alone. A receiver that waits for its peer communicates too."""
    idle: float
    """No kernel runs: the CPU is late, or a stream waits."""
    communication: float
    """All of it, hidden or not."""


def shares_of(kernels: Sequence[Kernel]) -> Shares | None:
    """None without kernels."""
    if not kernels:
        return None
    window = max(k.end for k in kernels) - min(k.begin for k in kernels)
    computing = union([(k.begin, k.end) for k in kernels if not k.communicates])
    talking = union([(k.begin, k.end) for k in kernels if k.communicates])
    both = union([*computing, *talking])
    busy, compute = length(both), length(computing)
    return Shares(compute / window, (busy - compute) / window, 1 - busy / window, length(talking) / window)


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as intervals that rise and do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    """Of intervals that do not touch."""
    return sum(end - begin for begin, end in intervals)


def kernels_of(profiler: Any) -> list[Kernel]:
    """What a finished torch.profiler.profile saw on the GPU. Its raw events: `events()` takes seconds for thousands."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        annotation = getattr(event, "is_user_annotation", lambda: False)()
        if event.device_type() == DeviceType.CUDA and not annotation:
            found.append(Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    return found


def top_kernels(kernels: Sequence[Kernel], steps: int = 1, limit: int = 40) -> str:
    """A table of the kernels that took longest, per step. Their times overlap."""
    times: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.begin)
    window = max(k.end for k in kernels) - min(k.begin for k in kernels)
    lines = [f"{len(kernels) // steps} kernels, {window / steps / 1e6:.1f} ms a step", ""]
    lines.append("| kernel | calls | ms | mean µs | share % |\n|---|---|---|---|---|")
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]:
        total = sum(spent)
        lines.append(
            f"| {name[:110].replace('|', '/')} | {len(spent) // steps} | {total / steps / 1e6:.2f} "
            f"| {total / len(spent) / 1e3:.1f} | {100 * total / window:.1f} |"
        )
    return "\n".join(lines)
