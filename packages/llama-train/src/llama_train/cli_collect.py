"""`llama-train collect FOLDER`: the table of all runs below a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_EXAMPLES = """
Speed and MFU are medians over the lines after the first three of a run, its warm-up; the loss is the mean of the last
tenth of the lines. The state is that of the last start: running, finished, stopped (asked to, and saved), fail,
oom, timeout.

Examples:
  llama-train collect runs                          a table; runs/runs.csv, and metrics.csv in every run folder
  llama-train collect runs --output tables          tables/runs.csv and tables/NAME.csv; nothing is written below runs
  llama-train collect runs --only fail oom          what went wrong
  llama-train collect runs --sort tokens_per_second
"""


@dataclass(frozen=True)
class CollectConfig:
    """A table of the runs at or below a folder, on the terminal and as CSV."""

    folder: Annotated[str, tyro.conf.Positional]
    """Where to look; a run folder itself is fine too."""
    output: str | None = None
    """Folder for the tables; unset means runs.csv in the folder and metrics.csv in each run folder."""
    only: tuple[str, ...] = ()
    """Show and write runs of these states only: running, finished, stopped, fail, oom, timeout."""
    sort: str = "name"
    """Column of runs.csv to sort by; numbers fall."""
    csv: bool = True
    """Whether tables are written, or only shown."""


def main(arguments: list[str]) -> int:
    """Show and write; the exit status."""
    description = (CollectConfig.__doc__ or "") + "\n" + _EXAMPLES
    config = tyro.cli(CollectConfig, args=arguments, prog="llama-train collect", description=description)

    from .manage.collect import run_csv, runs_csv, table_console, table_of, write_text
    from .manage.history import read_history
    from .manage.run_files import METRICS, find_runs
    from .manage.run_state import STATES
    from .manage.summary import COLUMNS, summarize

    for state in config.only:
        if state not in STATES:
            raise ValueError(f"--only is {state!r}; it must be one of {', '.join(STATES)}")
    if config.sort not in COLUMNS:
        raise ValueError(f"--sort is {config.sort!r}; it must be one of {', '.join(COLUMNS)}")
    root = Path(config.folder)
    rows = [(run, summarize(run, root)) for run in find_runs(root)]
    if not rows:
        raise ValueError(f"there is no run in {root}: a run folder has a config.toml and a metrics.jsonl")
    rows = [(run, row) for run, row in rows if not config.only or row.state in config.only]
    if config.sort != "name":
        values = {id(row): getattr(row, config.sort) for _, row in rows}
        text = any(isinstance(value, str) for value in values.values())
        known = [pair for pair in rows if values[id(pair[1])] is not None]
        unknown = [pair for pair in rows if values[id(pair[1])] is None]
        rows = sorted(known, key=lambda pair: values[id(pair[1])], reverse=not text) + unknown
    summaries = [row for _, row in rows]
    console = table_console()
    console.print(table_of(summaries, console))
    for row in summaries:
        if row.reason:
            console.print(f"{row.name}: {row.reason.splitlines()[0]}", markup=False)
        if row.damaged_lines:
            console.print(f"{row.name}: {row.damaged_lines} lines of metrics.jsonl cannot be read", markup=False)
    if not config.csv:
        return 0
    output = root if config.output is None else Path(config.output)
    for run, row in rows:
        name = row.name.replace("/", "-") + ".csv"
        write_text(
            run / "metrics.csv" if config.output is None else output / name, run_csv(read_history(run / METRICS))
        )
    write_text(output / "runs.csv", runs_csv(summaries))
    console.print(f"written    {output / 'runs.csv'}", markup=False, soft_wrap=True)
    return 0
