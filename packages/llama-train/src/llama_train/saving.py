"""Saving a run while it goes on: the state is copied, and a thread writes the copy as a checkpoint.

One checkpoint is written at a time; the next waits for it. What goes wrong in the thread is raised by the next call in
the loop, on every process at the same step, and leaves no checkpoint that could be taken for a whole one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from .checkpoint import Checkpoint, quiet, save_checkpoint
from .config import CheckpointConfig
from .host_copy import HostCopy
from .world import World, lost_another

FAILED = 1 << 16
"""`Saver.signal` after a failure; larger than the number of any signal of the system."""
_PATIENCE = timedelta(days=2)  # a disk may be slow; a process that dies is noticed at once
_GRACE = 5.0  # seconds for a thread whose peers are gone


class Saver:
    """Writes the checkpoints of a run. A context: leaving it waits for the one that is being written.

    Every process makes the same calls. Making it is a collective call.

    Args:
        folder: of the run's checkpoints.
        config: whether asynchronously, and which checkpoints stay.
        world: of the run.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self._folder, self._config, self._world = folder, config, world
        self._copy: HostCopy | None = None
        self._quiet = quiet()
        if config.asynchronous:
            self._copy = HostCopy(world.device)
            if world.control is not None:  # the thread's words must not mix with the loop's
                group = dist.new_group(backend="gloo", timeout=_PATIENCE)
                assert isinstance(group, dist.ProcessGroup)
                self._world = replace(world, control=group)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._written: Checkpoint | None = None
        self.step: int | None = None
        """Of the last checkpoint that was begun here."""

    @property
    def signal(self) -> int:
        """FAILED once a checkpoint could not be written, else 0: for all processes to agree on."""
        return FAILED if self._failure is not None else 0

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Make the memory for copies now, so that the first save takes no longer than the others."""
        if self._copy is not None and self._config.every:
            self._copy.reserve(tensors)

    def save(self, step: int, tensors: dict[str, Tensor], *, last: bool = False) -> None:
        """Begin a checkpoint, after waiting for the one before; without `asynchronous`, write it.

        Args:
            step: optimizer steps made.
            tensors: all of the state.
            last: nothing follows that could go on beside it, so it is written without a copy.

        Raises:
            SaveError: this one or the one before could not be written.
        """
        self.wait()
        self.step = step
        if self._copy is None or last:
            self._write(step, tensors, None)
            self._raise()
            return
        copies = self._copy.take(tensors)
        # A daemon: where a second Ctrl-C or a lost process ends the run, nothing waits for the disk.
        self._thread = threading.Thread(
            target=self._write, args=(step, tensors, copies), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()

    def hold_back(self) -> None:
        """Call before the tensors change: a GPU begins that after the copy."""
        if self._copy is not None:
            self._copy.hold_back()

    def written(self) -> Checkpoint | None:
        """The newest checkpoint that was completed since the last time this was asked."""
        written, self._written = self._written, None
        return written

    def wait(self) -> None:
        """Until no checkpoint is being written.

        Raises:
            SaveError: the last one could not be written; earlier ones are intact.
        """
        self._join(None)
        self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _write(self, step: int, tensors: dict[str, Tensor], copies: Mapping[str, Tensor] | None) -> None:
        try:
            if copies is not None and self._copy is not None:
                self._copy.wait()
            config = self._config
            self._written = save_checkpoint(
                self._folder, step, tensors, config.keep, self._world, keep_every=config.keep_every, copies=copies
            )
        except BaseException as error:  # SaveError as a rule; the loop raises it
            self._failure = error

    def __enter__(self) -> Saver:
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.rest()  # the disk may be slow
        try:
            if error is None:
                self.wait()
            elif isinstance(error, Exception):  # not a second Ctrl-C
                self._join(_GRACE if lost_another(error) else None)
                if isinstance(error, OSError) and self._failure is not None:
                    raise self._failure from error  # both met the full disk; this one says which checkpoint it cost
        finally:
            self._quiet.__exit__(kind, error, trace)
