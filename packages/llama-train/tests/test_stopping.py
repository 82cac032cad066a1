from __future__ import annotations

import os
import signal
import threading

import pytest

from llama_train.stopping import StopRequest


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")],
)
def test_a_signal_is_noted_and_handlers_come_back(number: signal.Signals, reason: str) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == reason
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "Ctrl-C"


def test_another_thread_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside = []

    def work() -> None:
        with StopRequest() as stop:
            inside.append((stop.reason, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(None, before)]
