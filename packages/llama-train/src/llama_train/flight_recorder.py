"""NCCL's flight recorder: the latest collectives of every rank, written down when a step hangs.

torch has no other way to set it than variables of the environment, which it reads as it makes the first process group:
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html. What a user has set there stays.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from llama_parallel import Process


@contextmanager
def flight_recorder(
    entries: int, folder: Path, process: Process, environ: MutableMapping[str, str] = os.environ
) -> Iterator[Callable[[], None]]:
    """Around the process groups of a run.

    Args:
        entries: collectives to keep; with 0 nothing is set.
        folder: for the dumps, collectives-RANK each; it may be made later.
        process: this one.
        environ: of the process.

    Yields:
        A function that has torch write this rank's dump; it does so within a few seconds.
    """
    if entries == 0:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="llama-train-") as pipes:
        stem = str(Path(pipes) / "rank-")
        prefix = str(folder.resolve() / "collectives-")
        settings = {
            "TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries),
            "TORCH_FR_BUFFER_SIZE": str(entries),  # the same by its newer name
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
        }
        ours = [name for name in settings if name not in environ]
        environ.update({name: settings[name] for name in ours})

        def dump() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            _poke(Path(f"{environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{process.rank}.pipe"))

        try:
            yield dump
        finally:
            for name in ours:
                environ.pop(name, None)


def _poke(pipe: Path) -> None:
    """torch reads it now and then, and dumps when there is anything to read. Without NCCL there is no pipe."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
