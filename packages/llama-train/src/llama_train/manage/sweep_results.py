"""What a sweep has found so far: kept case by case, shown as a table, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from llama_train.config_file import dump_config

from .collect import number, write_text
from .png import COLOURS, NEEDED
from .sweep import Case

Row = Mapping[str, Any]
_SHADES = {"ok": "", "oom": "red", "fail": "red", "timeout": "magenta", "impossible": "yellow"}


@dataclass(frozen=True)
class Results:
    """A folder with one file for each case that was measured."""

    folder: Path
    steps: int
    warmup: int

    def known(self, case: Case) -> dict[str, Any] | None:
        """What was found for just these settings; None: nothing yet."""
        try:
            stored = json.loads((self.folder / f"{case.key}.json").read_text(encoding="utf-8"))
            found: dict[str, Any] = stored["found"]
            return found if stored["asked"] == self._asked(case) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, case: Case, found: Mapping[str, Any]) -> None:
        """For the next start of the sweep."""
        write_text(self.folder / f"{case.key}.json", json.dumps({"asked": self._asked(case), "found": found}) + "\n")

    def _asked(self, case: Case) -> dict[str, Any]:
        return {"settings": dump_config(case.config), "steps": self.steps, "warmup": self.warmup}


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """The fastest for each device first; those without a figure last, as they came."""
    return sorted(rows, key=lambda row: -(row.get("tokens_per_second_per_device") or 0.0))


def csv_of(rows: Sequence[Row]) -> str:
    """A column for everything that any case has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return text.getvalue()


def table_of(rows: Sequence[Row]) -> Table:
    """The fastest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    left = ("layout", "checkpointing", "")
    for name in ("layout", "micro", "acc", "checkpointing", "compile", "tok/s", "each", "MFU", "memory", "step", ""):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "")
    for row in by_speed(rows):
        ok = row["state"] == "ok"
        table.add_row(
            row["layout"],
            str(row["micro_batch_size"]),
            str(row["gradient_accumulation_steps"]),
            row["activation_checkpointing"],
            "yes" if row["compile"] else "no",
            number(row.get("tokens_per_second")),
            number(row.get("tokens_per_second_per_device")),
            f"{100 * row['mfu']:.1f}%" if row.get("mfu") is not None else "–",
            f"{row['memory'] / 1e9:.2f} GB" if row.get("memory") else "–",
            f"{1000 * row['seconds']:,.0f} ms" if ok else "–",
            Text("" if ok else f"{row['state']}: {row.get('reason', '')}", style=_SHADES[row["state"]]),
        )
    return table


def png_of(rows: Sequence[Row]) -> bytes:
    """Speed of each case as a bar with its memory beside it, the fastest above.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(NEEDED) from None
    shown = [row for row in by_speed(rows) if row["state"] == "ok"]
    figure = Figure(figsize=(9, 1.2 + 0.32 * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    layouts = list(dict.fromkeys(row["layout"] for row in shown))
    speeds = [row["tokens_per_second_per_device"] for row in shown]
    colours = [COLOURS[layouts.index(row["layout"]) % len(COLOURS)] for row in shown]
    bars = axes.barh([row["case"] for row in shown], speeds, color=colours)
    notes = [
        f"{speed:,.0f}, {row['memory'] / 1e9:.1f} GB" + (f", MFU {100 * row['mfu']:.1f}%" if row["mfu"] else "")
        for speed, row in zip(speeds, shown)
    ]
    axes.bar_label(bars, notes, padding=4, fontsize=8)
    axes.set_xlim(0, 1.35 * max(speeds, default=1.0))
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.set_xlabel("tokens/s of each device")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
