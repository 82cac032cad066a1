"""Which of several processes tells the user what went wrong. Imports nothing heavy."""

from __future__ import annotations

import time

from llama_parallel import Process

FIRST = "(the first of all processes to fail)"
"""Note on the exception that was not another one's echo."""


class RemoteError(RuntimeError):
    """Another process failed; it has told the user why."""


class RankError(RuntimeError):
    """Another process is gone, or no longer answers."""


def is_mine_to_tell(error: BaseException, process: Process) -> bool:
    """Whether this process says what went wrong: the one that failed first, or rank 0 for what all find alike."""
    if isinstance(error, RemoteError):
        return False
    return process.is_main or isinstance(error, RankError) or FIRST in getattr(error, "__notes__", ())


def wait_to_be_ended(seconds: float = 20.0) -> None:
    """Let the process that tells it speak first: torchrun ends all others as soon as one has left."""
    time.sleep(seconds)
