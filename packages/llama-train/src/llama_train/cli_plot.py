"""`llama-train plot RUN...`: curves of runs as a page and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

_EXAMPLES = """
Runs that are unfinished, were resumed or were killed are fine: of steps that were trained twice the later count.

Examples:
  llama-train plot runs/quickstart                     curves.html and curves.png
  llama-train plot runs/a runs/b --x tokens            two runs compared by tokens
  llama-train plot runs --x time --output pictures/all every run below runs, by seconds of training
  llama-train plot runs --charts loss held_out --log
"""


@dataclass(frozen=True)
class PlotConfig:
    """Curves of runs over steps, tokens or time: a page that needs nothing but a browser, and a PNG."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, or folders that hold some."""
    x: Literal["steps", "tokens", "time"] = "steps"
    """What to compare by; the page can switch."""
    output: str = "curves"
    """Name of the files, without their endings .html and .png; existing ones are replaced."""
    format: Literal["both", "html", "png"] = "both"
    """What to write; the PNG needs the extra `plot`, and both leaves it out without that."""
    charts: tuple[str, ...] = ()
    """Which: loss, held_out, grad_norm, learning_rate, tokens_per_second, mfu, memory, data_wait; unset means all that
    the runs have."""
    log: bool = False
    """Whether the PNG's values are logarithmic; the page can switch."""


def main(arguments: list[str]) -> int:
    """Draw; the exit status."""
    description = (PlotConfig.__doc__ or "") + "\n" + _EXAMPLES
    config = tyro.cli(PlotConfig, args=arguments, prog="llama-train plot", description=description)
    if not config.runs:
        raise ValueError("which runs? Give folders: llama-train plot runs/quickstart")

    from .manage.charts import drawn_charts, open_runs
    from .manage.page import page_of
    from .manage.png import png_of

    runs = open_runs(config.runs)
    charts = drawn_charts(runs, config.charts)
    if not charts:
        raise ValueError(f"{', '.join(run.name for run in runs)}: there is no figure to draw yet")
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run.history.damaged:
            print(f"{run.name}: {run.history.damaged} lines of metrics.jsonl cannot be read")
    if config.format != "png":
        page = output.with_name(f"{output.name}.html")
        page.write_text(page_of(runs, charts, config.x), encoding="utf-8")
        print(f"page       {page}")
    if config.format != "html":
        try:
            picture = png_of(runs, charts, config.x, config.log)
        except ValueError as error:
            if config.format == "png":
                raise
            print(f"no PNG     {error}")
            return 0
        path = output.with_name(f"{output.name}.png")
        path.write_bytes(picture)
        print(f"picture    {path}")
    return 0
