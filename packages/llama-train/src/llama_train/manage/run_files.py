"""Where a run's files lie, found without torch, and which folders below one are runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from llama_train.config import TrainConfig
from llama_train.config_file import load_config

CONFIG, METRICS, OUTCOME = "config.toml", "metrics.jsonl", "outcome.json"
SWEEP = "sweep.json"
JOBS = "slurm"
"""Of `llama-train submit`, in a run folder that may be of a run that has not started yet."""
_CHECKPOINT = re.compile(r"step-(\d{8,})")


def run_path(config: TrainConfig) -> Path:
    """Where the run lies, as seen from the current directory."""
    return Path(config.folder) if config.folder is not None else Path("runs") / config.name


def is_run(folder: Path) -> bool:
    """Whether it is a run folder: settings, and a lock or figures beside them."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (METRICS, ".lock", "checkpoints"))


def find_runs(folder: Path) -> list[Path]:
    """All run folders at or below a folder, by name; what lies inside a run is not searched.

    Raises:
        ValueError: there is no such folder.
    """
    return [path for path in _walk(folder) if is_run(path)]


def find_settings(folder: Path) -> list[Path]:
    """All TOML files at or below a folder that lie in no run folder, by name.

    Raises:
        ValueError: there is no such folder.
    """
    folders = [path for path in _walk(folder) if not is_run(path)]
    return [file for path in folders for file in sorted(path.glob("*.toml")) if file.is_file()]


def last_checkpoint(run: Path) -> int | None:
    """Step of the newest complete checkpoint, by its name; None without any."""
    try:
        names = os.listdir(run / "checkpoints")
    except OSError:
        return None
    return max((int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))), default=None)


def settings_of(run: Path) -> TrainConfig | None:
    """The resolved settings; None where this version cannot read them."""
    try:
        return load_config(run / CONFIG)
    except ValueError:
        return None


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one that holds runs")
    if (folder / SWEEP).is_file():
        return  # of `llama-train bench sweep`, whose cases are no runs
    yield folder
    if is_run(folder):
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _walk(child)
