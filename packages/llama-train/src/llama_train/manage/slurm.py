"""Slurm's programs, as far as runs need them: sbatch to hand in a job, squeue and sacct to ask after jobs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from .run_state import State

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
_ENDED: dict[str, State] = {
    "COMPLETED": "finished",
    "FAILED": "fail",
    "NODE_FAIL": "fail",
    "BOOT_FAIL": "fail",
    "LAUNCH_FAILED": "fail",
    "OUT_OF_MEMORY": "oom",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "CANCELLED": "stopped",
    "PREEMPTED": "stopped",
    "REVOKED": "stopped",
}
"""What the end of a job says of its run; of one that completed the run itself knows more."""


class SlurmError(RuntimeError):
    """A program of Slurm is missing or failed."""


def hand_in(script: Path, link: int, after: str | None) -> str:
    """The id of the new job.

    Args:
        script: to run.
        link: its number in a chain, from 1; the script's argument.
        after: id of the job whose end it waits for, however that ends.

    Raises:
        SlurmError: there is no sbatch, or it refuses.
    """
    options = [] if after is None else [f"--dependency=afterany:{after}"]
    # "7" or "7;cluster"
    return _call(["sbatch", "--parsable", *options, str(script), str(link)]).strip().split(";")[0]


def job_states(jobs: Collection[str]) -> dict[str, tuple[str, str]]:
    """Of each job that Slurm still knows: (pending, running, or how it ended, as a state of runs; Slurm's own word).

    Without accounting (sacct) only jobs in the queue are known; without Slurm none.
    """
    if not jobs:
        return {}
    found: dict[str, tuple[str, str]] = {}
    # sacct first: what squeue says is newer. All own jobs, since squeue fails over an id that it has forgotten.
    asked = [
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={','.join(jobs)}"],
        ["squeue", "--noheader", "--me", "--format=%i|%T"],
    ]
    for command in asked:
        if shutil.which(command[0]) is None:
            continue
        try:
            lines = _call(command).splitlines()
        except SlurmError:
            continue
        for line in lines:
            job, _, word = line.strip().partition("|")
            word = (word.split() or ["?"])[0]  # "CANCELLED by 1000"
            state = "pending" if word in _WAITING else "running" if word in _RUNNING else _ENDED.get(word)
            if job in jobs and state is not None:
                found[job] = state, word
    return found


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} here: this is for a login node of a Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} does not answer") from None
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        raise SlurmError(f"{command[0]}: {reason}")
    return done.stdout
