"""All runs below a folder in one table: one CSV for each run, one for all, and what a terminal shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .history import History
from .summary import COLUMNS, Summary

COLOURS = {
    "finished": "green", "running": "cyan", "stopped": "yellow", "pending": "yellow",
    "fail": "red", "oom": "red", "timeout": "magenta",
}  # fmt: skip


def run_csv(history: History) -> str:
    """Every training line of a run, with the seconds of training up to it; the held-out loss beside its step.

    A column for each figure that any line has. A measurement without a training line of its step has a row of its own.
    """
    keys = list(dict.fromkeys(key for record in history.train for key in record))
    keys = ["step", *(key for key in keys if key != "step")]
    rows: dict[int, dict[str, object]] = {}
    for record, seconds in zip(history.train, history.seconds):
        rows[int(record["step"])] = {
            **{key: plain(value) for key, value in record.items()},
            "seconds": round(seconds, 6),
        }
    for record in history.held_out:
        step = int(record["step"])
        row = rows.setdefault(step, {"step": step})
        row["held_out_loss"] = record.get("loss")
    return _csv([*keys, "seconds", "held_out_loss"], (rows[step] for step in sorted(rows)))


def runs_csv(summaries: Sequence[Summary]) -> str:
    """A row for each run."""
    return _csv(COLUMNS, (vars(summary) for summary in summaries))


def write_text(path: Path, text: str) -> None:
    """A file that appears whole: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    temporary.replace(path)


def table_console() -> Console:
    """Standard output; wide where it is a file or pipe, so that a program that reads it finds whole cells."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=400)


def table_of(summaries: Sequence[Summary], console: Console) -> Table:
    """As many columns as fit; all of them are in the CSV."""
    hidden: list[str] = []
    for name in (*_GIVEN_UP, None):
        table = _table(summaries, hidden)
        wanted = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if wanted <= console.width or name is None:
            break
        hidden.append(name)
    return table


_GIVEN_UP = ("each", "MFU", "model", "memory", "layout")
"""What a narrow terminal does without, in this order."""


def _table(summaries: Sequence[Summary], hidden: Sequence[str]) -> Table:
    cells: dict[str, Callable[[Summary], RenderableType]] = {
        "run": lambda row: Text(row.name),
        "state": lambda row: Text(row.state, style=COLOURS.get(row.state, "")),
        "model": lambda row: Text(row.model),
        "layout": lambda row: Text(row.layout),
        "step": lambda row: row.progress,
        "tok/s": lambda row: number(row.tokens_per_second),
        "each": lambda row: number(row.tokens_per_second_per_process),
        "MFU": lambda row: "–" if row.mfu is None else f"{100 * row.mfu:.1f}%",
        "memory": lambda row: "–" if not row.memory else f"{row.memory / 1e9:.2f} GB",
        "loss": lambda row: "–" if row.loss is None else f"{row.loss:.4f}",
        "held out": lambda row: "–" if row.held_out_loss is None else f"{row.held_out_loss:.4f}",
    }
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [name for name in cells if name not in hidden]
    for name in shown:
        table.add_column(name, justify="left" if name in ("run", "state", "model", "layout") else "right", no_wrap=True)
    for row in summaries:
        table.add_row(*(cells[name](row) for name in shown))
    return table


def number(value: float | None) -> str:
    """12,345; 12.3 below 100; – for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain(value: float) -> float | int:
    """Whole numbers without a decimal point."""
    return int(value) if value == value and abs(value) < 2**53 and value == int(value) else value


def _csv(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return text.getvalue()
