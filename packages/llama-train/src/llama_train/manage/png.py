"""Runs as one PNG picture, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from .charts import AXIS_TITLES, Chart, DrawnRun
from .history import Axis, thin

COLOURS = ("#1f6fc4", "#c2410c", "#15803d", "#9333ea", "#be123c", "#0e7490", "#a16207", "#475569")
_DASHES = ("-", "--", ":", "-.")
NEEDED = "a PNG needs matplotlib: pip install 'llama-train[plot]'"


def png_of(runs: Sequence[DrawnRun], charts: Sequence[Chart], axis: Axis, log: bool = False) -> bytes:
    """The picture, two charts beside each other.

    Args:
        runs, charts: at least one of each.
        axis: of all charts.
        log: whether values are drawn logarithmically where all of a chart are above 0.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(NEEDED) from None
    across = min(2, len(charts))
    down = math.ceil(len(charts) / across)
    figure = Figure(figsize=(6.4 * across, 3.4 * down + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[len(charts) :]:
        axes.set_visible(False)
    for axes, chart in zip(grid, charts):
        curves = [thin(run.points(chart, axis), 2000) for run in runs]
        for index, (run, points) in enumerate(zip(runs, curves)):
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=_label(run.name),
                color=COLOURS[index % len(COLOURS)],
                linestyle=_DASHES[index // len(COLOURS) % len(_DASHES)],
                marker="." if len(points) < 40 else None,
                linewidth=1.3,
            )
        if log and all(y > 0 for points in curves for _, y in points):
            axes.set_yscale("log")
        axes.set_title(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, fontsize=10)
        axes.set_xlabel(AXIS_TITLES[axis], fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(runs)), fontsize=9, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _label(name: str) -> str:
    """A name that begins with "_" would be left out of the legend, and "$" would begin a formula."""
    return ("\N{ZERO WIDTH SPACE}" if name.startswith("_") else "") + name.replace("$", r"\$")
