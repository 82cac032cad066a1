"""What a run prints: notes, one line for every few steps and, on a terminal, a progress bar below them."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console_line import format_line
from .metrics import StepMetrics


class Reporter:
    """Prints to a console; a pipe or file gets plain lines alone, never the bar's control codes.

    Args:
        console: where to; standard output by default.
        progress: whether a terminal gets a bar.
    """

    def __init__(self, console: Console | None = None, progress: bool = True) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._wants_bar = progress and self._console.is_terminal
        self._bar: Progress | None = None
        self._last_step = 0

    def silence(self) -> None:
        """Print nothing from now on: another process speaks."""
        self._console.quiet = True
        self._wants_bar = False

    def note(self, text: str) -> None:
        """Print a line as it is."""
        # soft_wrap: a long line stays one line in a narrow pipe; markup off: [x] in a text sample is no style
        try:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):
            # A log's disk is full, or its reader went away (rich answers that with SystemExit): no reason to lose the
            # training. metrics.jsonl has the figures.
            self._console.quiet = True

    def start(self, done: int, last_step: int) -> None:
        """Begin the steps after `done`."""
        self._last_step = last_step
        if self._wants_bar:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,  # the lines remain, the bar goes
            )
            self._bar.add_task("training", total=last_step, completed=done)
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def line(self, metrics: StepMetrics) -> None:
        """Print the figures of a step."""
        self.note(format_line(metrics, self._last_step))

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
