"""Which curves a picture of runs has, and the curves themselves; drawn by page.py and png.py alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .history import Axis, History, read_history
from .run_files import METRICS, find_runs
from .summary import Summary, summarize


@dataclass(frozen=True)
class Chart:
    """One picture: a figure of the history over an axis."""

    key: str
    """In metrics.jsonl; "held_out" is the held-out loss."""
    title: str
    unit: str
    scale: float = 1.0
    """The file's numbers times this are in that unit."""


CHARTS = (
    Chart("loss", "Loss", "nats a token"),
    Chart("held_out", "Held-out loss", "nats a token"),
    Chart("grad_norm", "Gradient norm", "before clipping"),
    Chart("learning_rate", "Learning rate", ""),
    Chart("tokens_per_second", "Speed", "tokens/s"),
    Chart("mfu", "MFU", "%", 100.0),
    Chart("memory", "Peak memory", "GB", 1e-9),
    Chart("data_wait", "Wait for data", "ms a step"),
)
AXIS_TITLES: dict[Axis, str] = {"steps": "steps", "tokens": "tokens", "time": "seconds of training"}


@dataclass(frozen=True)
class DrawnRun:
    """A run with what is drawn of it."""

    summary: Summary
    history: History

    @property
    def name(self) -> str:
        """Its label."""
        return self.summary.name

    def points(self, chart: Chart, axis: Axis) -> list[tuple[float, float]]:
        """(place, value) in the chart's unit."""
        return [(x, y * chart.scale) for x, y in self.history.curve(chart.key, axis)]


def open_runs(names: Iterable[str]) -> list[DrawnRun]:
    """The runs at or below the folders, each once; labels are told apart by the folders above them.

    Raises:
        ValueError: a folder is not there, or holds no run.
    """
    folders: dict[Path, None] = {}
    for name in names:
        found = find_runs(Path(name))
        if not found:
            raise ValueError(f"there is no run in {name}: a run folder has a config.toml and a metrics.jsonl")
        folders.update(dict.fromkeys(path.resolve() for path in found))
    runs = list(folders)
    root = _common(runs)
    return [DrawnRun(summarize(run, root), read_history(run / METRICS)) for run in runs]


def drawn_charts(runs: Sequence[DrawnRun], keys: Sequence[str] = ()) -> list[Chart]:
    """The charts of which a run has a point, or of those those asked for.

    Raises:
        ValueError: an unknown chart.
    """
    known = {chart.key: chart for chart in CHARTS}
    for key in keys:
        if key not in known:
            raise ValueError(f"--charts is {key!r}; it must be one of {', '.join(known)}")
    wanted = [known[key] for key in keys] or list(CHARTS)
    return [chart for chart in wanted if any(run.history.curve(chart.key) for run in runs)]


def _common(folders: Sequence[Path]) -> Path:
    """The deepest folder that is above all of them."""
    first = folders[0].parent
    return next(path for path in (first, *first.parents) if all(run.is_relative_to(path) for run in folders))
