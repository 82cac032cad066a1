"""How a run stands: running, or how its last start ended. `llama-train run` leaves a note; its absence tells too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from llama_train.config import TrainConfig

from .history import History
from .run_files import CONFIG, JOBS, OUTCOME, last_checkpoint, run_path, settings_of

State = Literal["new", "running", "finished", "stopped", "fail", "oom", "timeout"]
STATES: tuple[State, ...] = get_args(State)
# What Slurm writes into a job's output when it ends it.
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT")
_KILLED_FOR_MEMORY = re.compile(r"oom[-_ ]kill|Out Of Memory|OUT_OF_MEMORY|out of memory", re.IGNORECASE)
_TAIL = 20_000


@contextlib.contextmanager
def noted_outcome(config: TrainConfig) -> Iterator[list[bool]]:
    """Around a run: leave RUN/outcome.json when it ends. The caller appends to the list whether it reached its end.

    A ValueError leaves no note: the settings were refused, as of a folder that another process is using.
    """
    result: list[bool] = []
    run = run_path(config)
    before = _stamp(run / CONFIG)
    rank = int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0
    try:
        yield result
    except ValueError:
        raise
    except BaseException as error:
        # Any process may be the one that has no memory left; of other failures all have the same, and rank 0 tells.
        memory = type(error).__name__ == "OutOfMemory"
        started = _stamp(run / CONFIG) != before  # else the folder is as an earlier start left it
        if started and (memory or (rank == 0 and not (_is_of_last_start(run) and _read_note(run)[0] == "oom"))):
            _note(run, "oom" if memory else "fail", f"{type(error).__name__}: {error}")
        raise
    if rank == 0 and result:
        _note(run, "finished" if result[-1] else "stopped", "")


def _note(run: Path, state: State, message: str) -> None:
    temporary = run / f"{OUTCOME}.{os.getpid()}.tmp"
    note = {"state": state, "time": time.time(), "message": message[:2000], "job": os.environ.get("SLURM_JOB_ID")}
    with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
        temporary.write_text(json.dumps(note) + "\n", encoding="utf-8")
        temporary.replace(run / OUTCOME)


def run_state(run: Path, history: History) -> tuple[State, str]:
    """(state, a reason where there is one to tell).

    The note counts if it is of the last start, which writes config.toml anew. Without it the run is running if its lock
    is held; else what Slurm wrote tells, else it died without a word. Runs from Python leave no note: such a one has
    finished if it saved its last step.
    """
    if not (run / CONFIG).is_file():
        return "new", ""
    state, message = _read_note(run)
    if state is not None and _is_of_last_start(run):
        return state, message
    if _is_locked(run / ".lock"):
        return "running", ""
    settings, saved = settings_of(run), last_checkpoint(run)
    if settings is not None and saved is not None and saved >= settings.schedule.total:
        return "finished", ""
    log = _last_log(run)
    if _TIME_LIMIT.search(log):
        return "timeout", "ended by its time limit"
    if _KILLED_FOR_MEMORY.search(log):
        return "oom", "ended for lack of memory"
    if saved is not None and saved >= history.last_step > 0:
        return "stopped", ""
    return "fail", "ended without a word"


def _read_note(run: Path) -> tuple[State | None, str]:
    try:
        note = json.loads((run / OUTCOME).read_text(encoding="utf-8"))
        return (note["state"], str(note.get("message", ""))) if note["state"] in STATES else (None, "")
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def _is_of_last_start(run: Path) -> bool:
    return 0 < _stamp(run / CONFIG) <= _stamp(run / OUTCOME)


def _stamp(path: Path) -> int:
    """When it was written; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _is_locked(path: Path) -> bool:
    """Whether a process holds the run's lock; asked for a moment, and only of runs that left no note."""
    if sys.platform == "win32" or not path.is_file():
        return False
    import fcntl

    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _last_log(run: Path) -> str:
    """The end of the newest job's output."""
    logs = sorted((run / JOBS).glob("*.out"), key=lambda path: path.stat().st_mtime) if (run / JOBS).is_dir() else []
    if not logs:
        return ""
    with logs[-1].open("rb") as file:
        file.seek(max(0, logs[-1].stat().st_size - _TAIL))
        return file.read().decode("utf-8", errors="replace")
