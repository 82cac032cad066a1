"""Batches of the next steps, made by a thread and, for a GPU, copied there beside its work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from .batches import Batch

_AHEAD = 2
"""Steps that are made beforehand: one is being used, one lies ready, one is in the making."""


@dataclass(frozen=True)
class _Ready:
    step: int
    batches: Sequence[Batch] = ()
    copied: torch.cuda.Event | None = None
    """Recorded behind the copies to the GPU."""
    error: BaseException | None = None


class Prefetch:
    """Batches by step, in order. A context: leaving it ends the thread.

    The batches are those that `make` gives; a thread only makes them earlier. On a GPU they come from pinned memory by
    copies on a stream of their own, so neither this process nor the GPU waits for them, unless they take longer to make
    than a step.

    Args:
        make: a step's number to its batches, on the CPU. Called by the thread.
        first, last: steps that will be asked for, both included.
        device: where batches go; on a CPU they stay as they are.
    """

    def __init__(
        self, make: Callable[[int], Sequence[Batch]], first: int, last: int, device: torch.device | str = "cpu"
    ) -> None:
        self._make, self._steps, self._device = make, range(first, last + 1), torch.device(device)
        self._ready: queue.Queue[_Ready] = queue.Queue(_AHEAD)
        self._ended = threading.Event()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self.waited = 0.0
        """Seconds that the last `take` had to wait."""

    def take(self, step: int) -> Sequence[Batch]:
        """The batches of `step`, on the device.

        Raises:
            Whatever `make` raised for it.
        """
        begun = time.perf_counter()
        ready = self._ready.get()
        self.waited = time.perf_counter() - begun
        if ready.error is not None:
            raise ready.error
        assert ready.step == step, "steps are taken in order"
        if ready.copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ready.copied)
            for batch in ready.batches:
                batch.used_on(current)
        return ready.batches

    def _run(self) -> None:
        for step in self._steps:
            if self._ended.is_set():
                return
            try:
                ready = self._prepared(step)
            except BaseException as error:  # the thread that asks for the step raises it
                self._ready.put(_Ready(step, error=error))
                return
            self._ready.put(ready)

    def _prepared(self, step: int) -> _Ready:
        batches = self._make(step)
        if self._stream is None:
            return _Ready(step, batches)
        with torch.cuda.stream(self._stream):
            moved = [batch.pinned().to(self._device) for batch in batches]
            return _Ready(step, moved, self._stream.record_event())

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        while self._thread.is_alive():  # it may be waiting for a place
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
