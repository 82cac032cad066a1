"""Runs below a folder and their jobs: which there are, how they stand, and handing them in."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_train.config import TrainConfig
from llama_train.config_file import load_config
from llama_train.layout_choice import check_parallel

from .history import read_history
from .job_script import Cluster, job_fields, render, resolved, size_of
from .new_run import shape_of
from .run_files import CONFIG, JOBS, METRICS, find_settings, last_checkpoint, run_path
from .run_state import run_state
from .slurm import hand_in, job_states

DEFAULT = ("new", "stopped")
"""States of runs that are handed in without being asked for by --only."""
CHOICES = ("new", "stopped", "fail", "oom", "timeout")
_LOG = "jobs.jsonl"


@dataclass(frozen=True)
class Job:
    """A run that has a file of settings, and how it and its jobs stand."""

    file: Path
    config: TrainConfig | None
    """None: the file is no run that could be started."""
    state: str
    """A state of runs, "pending", or "invalid"."""
    jobs: tuple[str, ...] = ()
    """Ids of all its jobs, oldest first."""
    reason: str = ""
    step: str = ""
    size: str = ""

    @property
    def name(self) -> str:
        """Of the run; of the file where it is none."""
        return self.file.name if self.config is None else self.config.name


def look(folder: Path, cluster: Cluster) -> list[Job]:
    """All runs that have a TOML file at or below a folder, with their states.

    Raises:
        ValueError: no such folder, no TOML file, or two files with one run folder.
    """
    names = find_settings(folder)
    if not names:
        raise ValueError(f"there is no TOML file in {folder}: `llama-train init` writes one")
    loaded: list[tuple[Path, TrainConfig | None, str]] = []
    owners: dict[Path, Path] = {}
    for file in names:
        config, reason = _load(file, cluster)
        loaded.append((file, config, reason))
        if config is not None:
            run = run_path(config).resolve()
            if run in owners:
                raise ValueError(f"{owners[run]} and {file} have one run folder, {run_path(config)}: give them names")
            owners[run] = file
    ids = {file: _jobs(run_path(config)) for file, config, _ in loaded if config is not None}
    known = job_states({job for jobs in ids.values() for job in jobs})
    return [
        Job(file, None, "invalid", reason=reason) if config is None else _job(file, config, ids[file], known, cluster)
        for file, config, reason in loaded
    ]


def submit(job: Job, template: str, cluster: Cluster, chain: int) -> list[str]:
    """Write the run's job script and hand it in, `chain` times, each to begin when the one before has ended.

    Returns:
        The ids.

    Raises:
        SlurmError: Slurm refuses. What was handed in before that is kept.
    """
    assert job.config is not None
    folder = run_path(job.config) / JOBS
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "job.sh"
    script.write_text(render(template, job_fields(job.config, job.file, cluster)), encoding="utf-8")
    ids: list[str] = []
    for link in range(1, chain + 1):
        after = ids[-1] if ids else None
        ids.append(hand_in(script, link, after))
        record = {"job": ids[-1], "time": time.time(), "link": link, "after": after, "file": str(job.file)}
        with (folder / _LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return ids


def wanted(job: Job, only: Sequence[str]) -> bool:
    """Whether a run is handed in: never one that is waiting, running or finished."""
    return job.config is not None and job.state in (only or DEFAULT)


def _load(file: Path, cluster: Cluster) -> tuple[TrainConfig | None, str]:
    """The settings, checked as far as that can be done without a GPU: a mistake costs no place in the queue."""
    try:
        config = load_config(file)
        whole = resolved(config, size_of(config, cluster))
        check_parallel(whole, shape_of(whole))
    except ValueError as error:
        return None, str(error)
    return config, ""


def _jobs(run: Path) -> tuple[str, ...]:
    try:
        lines = (run / JOBS / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            found.append(str(json.loads(line)["job"]))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(found)


def _job(
    file: Path, config: TrainConfig, jobs: tuple[str, ...], known: dict[str, tuple[str, str]], cluster: Cluster
) -> Job:
    run, size = run_path(config), size_of(config, cluster)
    history = read_history(run / METRICS)
    state: str
    state, reason = run_state(run, history)
    total = config.schedule.resolved(config.rows_per_step * config.data.sequence_length).total
    if state == "finished" and (last_checkpoint(run) or 0) < total:
        state, reason = "stopped", f"its file now says {total} steps"
    of_jobs = [known[job] for job in jobs if job in known]
    active = [found for found, _ in of_jobs if found in ("running", "pending")]
    if active:
        state, reason = "running" if "running" in active else "pending", ""
    elif of_jobs and state not in ("finished", "running", "oom"):
        ended, word = of_jobs[-1]
        # a job that completed has stopped its run in good order; "new": its run folder has no settings yet
        if ended != "finished":
            state, reason = ended, reason or f"Slurm: {word}"
        elif state == "new":
            state, reason = "fail", "its last job completed without starting the run"
    step = f"{max(history.last_step, last_checkpoint(run) or 0)}/{total}" if (run / CONFIG).is_file() else ""
    return Job(file, config, state, jobs, reason, step, f"{size.nodes} × {size.per_node}")
