"""Draws the figures of these pages: `python docs/parallelism/figures.py` writes one .svg for each page beside itself.

Text stays text and identifiers come from a fixed salt, so the same matplotlib always writes the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

SETTINGS = {"svg.hashsalt": "llama", "svg.fonttype": "none", "font.family": ["DejaVu Sans"], "font.size": 9}
COMPUTE, OTHER, SENT, WAIT, EDGE = "#a8cbe8", "#dbe9c8", "#f4b183", "#f2f2f2", "#404040"
RANKS = ("#8fbcdf", "#f4b183", "#b5d6a0", "#d9b3e0")


def box(ax: Axes, x: float, y: float, width: float, height: float, color: str, text: str = "", size: float = 8) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=EDGE, linewidth=0.7))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def canvas(width: float, height: float, right: float, top: float) -> tuple[Figure, Axes]:
    """A figure of so many inches, and axes without frame that run from (0, 0) to (right, top)."""
    figure = Figure(figsize=(width, height))
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.axis("off")
    return figure, ax


def draw_tensor() -> Figure:
    """One layer on two ranks: what each computes, and the four transfers between."""
    figure, ax = canvas(9.2, 2.9, 12.2, 4.1)
    parts = [
        ("norm", OTHER), ("all-\ngather", SENT), ("q, k, v", COMPUTE), ("attention", COMPUTE), ("o", COMPUTE),
        ("reduce-\nscatter", SENT), ("norm", OTHER), ("all-\ngather", SENT), ("gate, up", COMPUTE), ("down", COMPUTE),
        ("reduce-\nscatter", SENT),
    ]  # fmt: skip
    ax.text(0.1, 3.05, "rank 0", va="center")
    ax.text(0.1, 1.75, "rank 1", va="center")
    for place, (name, color) in enumerate(parts):
        x = 1.0 + place
        if color == SENT:
            box(ax, x, 1.3, 0.92, 2.2, SENT, name)
            continue
        for y in (2.6, 1.3):
            box(ax, x, y, 0.92, 0.9, color, name)
    for start, end, text in (
        (1.0, 1.92, "S/2"), (3.0, 5.92, "all S, half the heads"), (7.0, 7.92, "S/2"), (9.0, 10.92, "all S, half of F"),
    ):  # fmt: skip
        ax.plot([start, end], [1.1, 1.1], color=EDGE, linewidth=0.8)
        ax.text((start + end) / 2, 0.95, text, ha="center", va="top", fontsize=8)
    ax.text(1.0, 3.75, "forward pass of one layer, tp 2", va="center")
    legend(ax, 1.0, 0.15, ((OTHER, "on own tokens"), (COMPUTE, "on own heads or channels"), (SENT, "sent")))
    return figure


def draw_data() -> Figure:
    """Two lanes of one rank, arithmetic and network, in a step of a model of three layers under FSDP2."""
    figure, ax = canvas(9.2, 2.6, 15.2, 3.7)
    ax.text(0.1, 2.4, "arithmetic", va="center")
    ax.text(0.1, 1.3, "network", va="center")
    x0, layers = 1.9, (1, 2, 3)
    for place, layer in enumerate(layers):
        box(ax, x0 + place, 0.9, 0.94, 0.8, SENT, f"gather\n{layer}", 7)
        box(ax, x0 + place + 1, 2.0, 0.94, 0.8, COMPUTE, f"F {layer}")
    start = x0 + 3
    box(ax, start + 1, 2.0, 0.94, 0.8, OTHER, "loss")
    for place, layer in enumerate(reversed(layers)):
        box(ax, start + 2 + 2 * place, 2.0, 1.94, 0.8, COMPUTE, f"B {layer}")
        box(ax, start + 1 + 2 * place, 0.9, 0.94, 0.8, SENT, f"gather\n{layer}", 7)
        box(ax, start + 4 + 2 * place, 0.9, 0.94, 0.8, RANKS[3], f"reduce-\nscatter {layer}", 6.5)
    box(ax, start + 9, 2.0, 0.94, 0.8, OTHER, "update")
    ax.text(x0, 3.25, "one rank, one step, three layers: F forward, B backward", va="center")
    legend(ax, x0, 0.15, ((COMPUTE, "arithmetic"), (SENT, "parameters, bfloat16"), (RANKS[3], "gradients, float32")))
    return figure


def legend(ax: Axes, x: float, y: float, entries: tuple[tuple[str, str], ...]) -> None:
    """What colors mean, from (x, y) on to the right."""
    unit = ax.get_xlim()[1] / 12
    for color, text in entries:
        box(ax, x, y, 0.3 * unit, 0.3 * ax.get_ylim()[1] / 5, color)
        ax.text(x + 0.42 * unit, y + 0.15 * ax.get_ylim()[1] / 5, text, va="center", fontsize=8)
        x += (0.85 + 0.085 * len(text)) * unit


Task = tuple[float, float, str, int]
"""When it begins, how long it takes, F, B or W, and of which micro-batch."""


def timeline(schedule: str, stages: int, batches: int) -> list[list[Task]]:
    """What each stage does when: F takes 1, a whole backward pass 2, of which W, the weights' gradients, is half.

    Sending takes no time. W is drawn apart in zero_bubble only, where it waits until a stage would idle.
    """
    late = schedule == "zero_bubble"
    back = 1 if late else 2
    orders = [order(schedule, stage, stages, batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    now: list[float] = [0.0] * stages
    waiting: list[list[int]] = [[] for _ in range(stages)]
    rows: list[list[Task]] = [[] for _ in range(stages)]

    def ready(stage: int) -> float | None:
        """When the stage's next task can begin, None while that is not known; infinity without tasks."""
        if not orders[stage]:
            return float("inf")
        kind, batch = orders[stage][0]
        before = (kind, batch, stage + (1 if kind == "B" else -1))
        if not 0 <= before[2] < stages:
            return 0.0
        return done.get(before)

    def run(stage: int, kind: str, batch: int, length: float) -> None:
        rows[stage].append((now[stage], length, kind, batch))
        now[stage] += length
        done[kind, batch, stage] = now[stage]

    while any(orders) or any(waiting):
        for stage in sorted(range(stages), key=lambda stage: now[stage]):
            when = ready(stage)
            if when is None:
                continue
            if waiting[stage] and when >= now[stage] + 1:
                run(stage, "W", waiting[stage].pop(0), 1)
                break
            if orders[stage]:
                now[stage] = max(now[stage], when)
                kind, batch = orders[stage].pop(0)
                run(stage, kind, batch, back if kind == "B" else 1)
                if late and kind == "B":
                    waiting[stage].append(batch)
                break
    return rows


def order(schedule: str, stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """Forward and backward passes of a stage, in order."""
    ahead = batches if schedule == "gpipe" else min(batches, stages - stage)
    tasks = [("F", batch) for batch in range(ahead)]
    for batch in range(batches):
        tasks.append(("B", batch))
        if ahead + batch < batches:
            tasks.append(("F", ahead + batch))
    return tasks


def idle(rows: list[list[Task]]) -> float:
    """The part of the whole time in which stage 0 does nothing."""
    end = max(start + length for row in rows for start, length, _, _ in row)
    return 1 - sum(length for _, length, _, _ in rows[0]) / end


def draw_pipeline() -> Figure:
    """Four stages, eight micro-batches, three schedules."""
    stages, batches, colors = 4, 8, {"F": COMPUTE, "B": RANKS[2], "W": RANKS[3]}
    figure, ax = canvas(9.2, 5.4, 36.5, 18.6)
    for place, schedule in enumerate(("gpipe", "1f1b", "zero_bubble")):
        rows, top = timeline(schedule, stages, batches), 17.6 - 5.7 * place
        ax.text(3, top + 0.2, f"{schedule}: idle for {idle(rows):.0%} of the step", va="center")
        for stage, row in enumerate(rows):
            y = top - 1.2 - stage
            ax.text(0.2, y + 0.45, f"stage {stage}", va="center", fontsize=8)
            ax.add_patch(Rectangle((3, y), 33, 0.9, facecolor=WAIT, edgecolor="none"))
            for start, length, kind, batch in row:
                box(ax, 3 + start, y, length, 0.9, colors[kind], str(batch), 7)
    meaning = ("forward", "backward (zero_bubble: for inputs)", "for weights", "idle")
    legend(ax, 3, 0.2, tuple(zip((COMPUTE, RANKS[2], RANKS[3], WAIT), meaning, strict=True)))
    return figure


def draw_context() -> Figure:
    """Whose queries meet whose keys in the ring, and in which step, for four ranks."""
    size = 4
    owner = [*range(size), *reversed(range(size))]
    figure, ax = canvas(9.2, 4.6, 20.0, 10.0)
    for query, rank in enumerate(owner):
        y = 8 - query
        ax.text(0.9, y + 0.5, f"rank {rank}", ha="right", va="center", fontsize=7, color=EDGE)
        for key in range(query + 1):
            text = str((rank - owner[key]) % size)
            box(ax, 1.1 + key, y, 1, 1, RANKS[rank], text + (" ◣" if key == query else ""))
        ax.text(1.6 + query, 0.75, str(owner[query]), ha="center", va="center", fontsize=8)
    ax.text(5.1, 9.5, "eight pieces of a sequence: queries down, keys across", ha="center", va="center")
    ax.text(5.1, 0.3, "rank that holds the keys", ha="center", va="center", fontsize=8)
    ax.text(15.2, 9.5, "whose keys and values a rank has", ha="center", va="center")
    for rank in range(size):
        y = 7.4 - 1.6 * rank
        ax.text(11.4, y + 0.6, f"rank {rank}", ha="right", va="center", fontsize=8)
        for step in range(size):
            holds = (rank - step) % size
            box(ax, 11.7 + 1.9 * step, y, 1.4, 1.2, RANKS[holds], f"of {holds}")
            if step:
                tail = {"arrowstyle": "->", "color": EDGE}
                ax.annotate("", (11.7 + 1.9 * step, y + 0.6), (11.25 + 1.9 * step, y + 0.6), arrowprops=tail)
    for step in range(size):
        ax.text(12.4 + 1.9 * step, 2.1, f"step {step}", ha="center", va="center", fontsize=8)
    ax.text(11.7, 1.2, "a number on the left is the step; ◣ is masked", va="center", fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "context": draw_context,
    "data": draw_data,
    "pipeline": draw_pipeline,
    "tensor": draw_tensor,
}


def write(folder: Path) -> None:
    """All figures, as folder/NAME.svg."""
    metadata: Any = {"Date": None}  # the version of matplotlib stays in
    for name, draw in FIGURES.items():
        with matplotlib.rc_context(SETTINGS):
            draw().savefig(folder / f"{name}.svg", format="svg", metadata=metadata)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
