"""What `llama-train prepare` shows while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .inputs import find_inputs
from .settings import PrepareConfig


@contextmanager
def show_progress(config: PrepareConfig) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """A bar over the bytes of all inputs on a terminal; plain lines elsewhere.

    Yields:
        (print a line, move the bar): the latter takes the number of an input and how much of it was read, -1 for all.
    """
    console = Console(highlight=False, soft_wrap=True)

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not (config.progress and console.is_terminal):
        yield note, lambda source, progress: None
        return
    sizes = [source.size for source in find_inputs(config)]
    columns = (TextColumn("preparing"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=sum(sizes) or None)

        def advance(source: int, progress: int) -> None:
            done = sizes[source] if progress < 0 else min(progress, sizes[source])
            bar.update(task, completed=sum(sizes[:source]) + done)

        yield note, advance
