"""Runs as one HTML page that needs nothing else: no network, no server, no file beside it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files

from .charts import AXIS_TITLES, Chart, DrawnRun
from .collect import number
from .history import AXES, Axis, thin

MOST_POINTS = 1500
"""Of a curve on the page; extremes are kept."""


def page_of(runs: Sequence[DrawnRun], charts: Sequence[Chart], axis: Axis) -> str:
    """The page's text. Curves are data in it, drawn by the script that stands beside them in it."""
    data = {
        "axis": axis,
        "axes": AXIS_TITLES,
        "charts": [{"key": chart.key, "title": chart.title, "unit": chart.unit} for chart in charts],
        "runs": [{"name": run.name, "curves": {chart.key: _curve(run, chart) for chart in charts}} for run in runs],
    }
    title = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _file("page.css"),
        "SCRIPT": _file("page.js"),
        # "<" as an escape: a run's name must not be able to end the script
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "ROWS": "\n".join(_row(run) for run in runs),
    }
    text = _file("page.html")
    head, *rest = text.split("%%")
    # each piece is put in once: what a run is called is never taken for a placeholder
    return head + "".join(parts[piece] if index % 2 == 0 else piece for index, piece in enumerate(rest))


def _curve(run: DrawnRun, chart: Chart) -> dict[str, list[float]]:
    """Places on every axis, and values, of the same points."""
    by_steps = thin(run.points(chart, "steps"), MOST_POINTS)
    kept = {step for step, _ in by_steps}
    places: dict[str, list[float]] = {
        axis: [
            round(x, 3)
            for (x, _), (step, _) in zip(run.points(chart, axis), run.points(chart, "steps"))
            if step in kept
        ]
        for axis in AXES
    }
    return {**places, "y": [float(f"{value:.6g}") for _, value in by_steps]}


def _row(run: DrawnRun) -> str:
    row = run.summary
    cells = [
        ("model", row.model),
        ("layout", row.layout),
        ("step", row.progress),
        ("loss", "–" if row.loss is None else f"{row.loss:.4f}"),
        ("held out", "–" if row.held_out_loss is None else f"{row.held_out_loss:.4f}"),
        ("tokens/s", number(row.tokens_per_second)),
        ("MFU", "–" if row.mfu is None else f"{100 * row.mfu:.1f}%"),
        ("memory", "–" if not row.memory else f"{row.memory / 1e9:.2f} GB"),
    ]
    name = f'<th scope="row"><i class="key"></i>{html.escape(row.name)}</th>'
    state = f'<td data-name="state"><span class="state {row.state}">{row.state}</span></td>'
    none = {"–": ' class="none"'}
    others = "".join(f'<td data-name="{key}"{none.get(value, "")}>{html.escape(value)}</td>' for key, value in cells)
    return f"<tr>{name}{state}{others}</tr>"


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
