"""A bar on standard error while many prompts are continued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .sequence import Sequence

INTERVAL = 0.1
"""Seconds between two looks at how far everybody is."""


@contextmanager
def progress_bar(sequences: list[Sequence], wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Yields what to call after every step.

    Args:
        sequences: those that run.
        wanted: None shows it for more than one sequence, where standard error is a terminal.
    """
    if wanted is False or (wanted is None and len(sequences) < 2):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    speed = TextColumn("{task.fields[speed]}")
    with Progress(*columns, speed, console=console, disable=wanted is None and not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=len(sequences), speed="")
        start = last = time.perf_counter()

        def tell() -> None:
            nonlocal last
            now = time.perf_counter()
            ended = sum(sequence.finish_reason is not None for sequence in sequences)
            if now - last < INTERVAL and ended < len(sequences):
                return
            last = now
            tokens = sum(len(sequence.token_ids) for sequence in sequences)
            bar.update(task, completed=ended, speed=f"{tokens / max(now - start, 1e-9):.0f} tokens/s")

        yield tell
