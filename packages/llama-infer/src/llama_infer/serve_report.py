"""Percentiles of loads on a server: as a table, as JSON, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from .serve_load import Run

PERCENTILES = (50, 90, 99)
TIMES = {"first": "to the first token", "between": "between tokens", "whole": "whole request"}


def percentile(values: Sequence[float], which: float) -> float:
    """The smallest of the values that at least `which` % do not exceed (nearest rank); NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(which / 100 * len(ordered)) - 1)] if ordered else math.nan


def summary(run: Run) -> dict[str, Any]:
    """The numbers of one load; seconds."""
    good = [answer for answer in run.answers if answer.error is None]
    gaps = [b - a for answer in good for a, b in zip(answer.events, answer.events[1:], strict=False)]
    values = {"first": [answer.first for answer in good], "between": gaps, "whole": [answer.whole for answer in good]}
    tokens = sum(answer.tokens for answer in good)
    return {
        "loop": run.kind,
        "load": run.load,
        "requests": len(run.answers),
        "failed": len(run.answers) - len(good),
        "errors": sorted({str(answer.error) for answer in run.answers if answer.error is not None})[:5],
        "seconds": run.seconds,
        "requests_per_second": len(good) / run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "tokens": tokens,
        **{name: {f"p{p}": percentile(found, p) for p in PERCENTILES} for name, found in values.items()},
    }


def table(summaries: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("load", "seconds"):
        made.add_column(name, no_wrap=True)
    for name in (*(f"p{p}" for p in PERCENTILES), "failed", "req/s", "tokens/s"):
        made.add_column(name, justify="right", no_wrap=True)
    for found in summaries:
        clients = "client" if found["load"] == 1 else "clients"
        load = f"{found['load']:g} {clients if found['loop'] == 'closed' else 'req/s'}"
        failed = f"{found['failed']}/{found['requests']}"
        rates = (failed, f"{found['requests_per_second']:.1f}", f"{found['tokens_per_second']:.0f}")
        for at, (what, title) in enumerate(TIMES.items()):
            times = [_duration(found[what][f"p{p}"]) for p in PERCENTILES]
            made.add_row("" if at else load, title.removeprefix("to the "), *times, *(("", "", "") if at else rates))
    return made


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def draw(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Percentiles and tokens per second against the load."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("closed", "open") if any(found["loop"] == kind for found in summaries)]
    figure = Figure(figsize=(12, 3.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 4, squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        some = sorted((found for found in summaries if found["loop"] == kind), key=lambda found: found["load"])
        loads = [found["load"] for found in some]
        row[0].plot(loads, [found["tokens_per_second"] for found in some], marker="o")
        row[0].set_title("tokens per second")
        for axis, (name, title) in zip(row[1:], TIMES.items(), strict=True):
            for which in PERCENTILES:
                axis.plot(loads, [1000 * found[name][f"p{which}"] for found in some], marker="o", label=f"p{which}")
            axis.set_title(f"{title}, ms")
            axis.legend()
        for axis in row:
            axis.set_xlabel("clients" if kind == "closed" else "requests per second")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
