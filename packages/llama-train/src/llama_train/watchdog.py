"""A process that waits too long for another ends, and with it all others; each says first where it stands.

torch's own limits end a collective that hangs, but the process that everybody waits for is somewhere else, and tells
nothing. Here a thread of every process looks at a clock that each step sets anew. The first whose time is up leaves a
word in the store that all processes share; every thread that reads it prints the Python stacks of its process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from llama_parallel import Process

_HUNG = "llama-train/hung"
_LOOK = 0.5  # seconds between two looks at the clock
_GRACE = 4.0  # seconds for the others to speak, before the first to leave has torchrun end them


class Store(Protocol):
    """Of torch.distributed's stores, what is used here; they leave it untyped."""

    def set(self, key: str, value: str) -> None:
        """Store."""

    def get(self, key: str) -> bytes:
        """Wait for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""


class Watchdog:
    """The clock of one process, and the thread that looks at it until `close`.

    Args:
        process: which one.
        store: shared by all processes of the run.
        limit: seconds that a step may take; later ones at least twice as long as the slowest before.
        file: descriptor that gets the stacks.
        hangs: called when the time is up, before anything is printed.
        end: called when all is said; it does not return.
        clock: seconds.
    """

    def __init__(
        self,
        process: Process,
        store: Store,
        limit: float,
        *,
        hangs: Callable[[], None] = lambda: None,
        file: int = 2,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._store, self._limit, self._file, self._end = process, store, limit, file, end
        self._hangs, self._clock = hangs, clock
        self._slowest = 0.0
        self._what: str | None = None
        self._since = clock()
        self._allowed = limit
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def expect(self, what: str, parts: int = 1) -> None:
        """The clock starts: the next call of this or of `rest` must come in time.

        Args:
            what: is being done, for the message.
            parts: of the first thing that is expected, each of which may take the limit: nobody knows yet how long
                one takes.
        """
        self._stop_clock()
        self._allowed = max(self._limit, 2 * self._slowest) if self._slowest else self._limit * parts
        self._since, self._what = self._clock(), what

    def rest(self) -> None:
        """The clock stops: what comes may take as long as it takes."""
        self._stop_clock()
        self._what = None

    def tell(self, why: str) -> None:
        """Let every other process print its stacks and end."""
        with contextlib.suppress(RuntimeError):  # the host of the store is gone
            self._store.set(_HUNG, f"rank {self._process.rank} {why}")

    def close(self) -> None:
        """No more looks."""
        self._closed.set()
        self._thread.join(10 * _LOOK)  # it may be in a store whose host is gone

    def _stop_clock(self) -> None:
        if self._what is not None:
            self._slowest = max(self._slowest, self._clock() - self._since)

    def _look(self) -> None:
        shared = True
        while not self._closed.wait(_LOOK):
            what, waited = self._what, self._clock() - self._since
            if what is not None and waited > self._allowed:
                why = f"has been in {what} for {waited:.0f} s, and may be for {self._allowed:.0f} (parallel.timeout)"
                self.tell(why)
                self._speak(f"rank {self._process.rank} {why}")
                return
            if not shared:
                continue
            try:
                if self._store.check([_HUNG]):
                    self._speak(self._store.get(_HUNG).decode())
                    return
            except RuntimeError:
                shared = False

    def _speak(self, why: str) -> None:
        self._hangs()
        rank = f"rank {self._process.rank}: "
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        lines = [f"llama-train: {why}; every process ends. It stands at", *stacks.splitlines()]
        # In one piece: the processes of a host speak into the same terminal at the same time.
        os.write(self._file, "".join(f"{rank}{line}\n" for line in lines).encode())
        time.sleep(_GRACE)
        self._end(1)


def backend_limit(limit: float) -> timedelta:
    """For torch's own watch over collectives: later than ours, which says more."""
    return timedelta(seconds=1.25 * limit + 5.0)
