"""The one error of checkpoint files, and how it lists names."""

from __future__ import annotations

from collections.abc import Iterable

LISTED = 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked. The message names the file and every fault found."""


def listed(names: Iterable[object], limit: int = LISTED) -> str:
    """The first `limit` names, and how many more there are: errors must stay readable for 2,000 tensors."""
    texts = [str(name) for name in names]
    rest = len(texts) - limit
    return ", ".join(texts[:limit]) + (f", … and {rest} more" if rest > 0 else "")
