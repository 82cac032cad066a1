from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from llama_train.console import Reporter
from llama_train.metrics import StepMetrics


def _metrics(step: int) -> StepMetrics:
    return StepMetrics(step, step * 2048, 1.5, 0.25, 1e-3, 12345.0, 12345.0, None, None, 10**9, 0.0)


def _run(console: Console, progress: bool = True) -> None:
    with Reporter(console, progress) as reporter:
        reporter.start(0, 1000)
        reporter.advance(1)
        reporter.line(_metrics(1))
        reporter.note("sample     x[1] = [red]" + "y" * 300)
        reporter.advance(1000)


def test_a_pipe_gets_plain_whole_lines() -> None:
    file = io.StringIO()
    _run(Console(file=file, width=40))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step    1/1000  loss  1.5000")
    assert lines[1] == "sample     x[1] = [red]" + "y" * 300
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


def test_a_terminal_gets_a_bar_unless_switched_off() -> None:
    for progress in (True, False):
        file = io.StringIO()
        _run(Console(file=file, force_terminal=True, width=200), progress)
        assert ("1000/1000" in file.getvalue()) == progress
        assert "loss  1.5000" in file.getvalue()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError()])
def test_a_console_that_is_lost_does_not_end_the_run(error: OSError) -> None:
    class Lost(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise error

    lost = Lost()
    console = Console(file=lost)
    console.on_broken_pipe = lambda: sys.exit(1)  # type: ignore[method-assign]  # rich's also closes this process's stdout
    reporter = Reporter(console)
    for _ in range(3):
        reporter.note("step")
    assert lost.tries == 1
