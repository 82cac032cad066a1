"""Asking a run to stop: the step in progress is finished and saved first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name))


class StopRequest:
    """While entered, SIGTERM, Ctrl-C, SIGUSR1 and SIGHUP (the terminal was closed) set `number` instead of ending the
    process. A second Ctrl-C ends it.

    In a thread other than the main one signals cannot be caught, and nothing is changed.
    """

    def __init__(self) -> None:
        self.number = 0
        """Of the first signal that came; 0 if none did."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """What a user calls that signal."""
        return describe(self.number) if self.number else None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                number = signal.Signals[name]
                before = signal.getsignal(number)
                if number.name == "SIGHUP" and before == signal.SIG_IGN:
                    continue  # nohup: the run is to outlive its terminal
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number:
            raise KeyboardInterrupt
        self.number = self.number or number


def describe(number: int) -> str:
    """What a user calls the signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
