"""Small questions about texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

_CHARS = range(0x100000, 0x10FFFE)  # private use, plane 16


def check_text(text: Any, what: str) -> None:
    """Raises ValueError unless `text` is a str that UTF-8 can hold; `what` names it in the message."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"{what} holds half of a surrogate pair, {half}, which UTF-8 can't") from None


def shared_front(first: str, second: str) -> int:
    """How many characters two texts have in common at their front."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)


def unused_chars(texts: Iterable[str], count: int = 1, last: bool = False) -> list[str]:
    """Private-use characters that are in none of the texts, from the first on or from the last back.

    Raises:
        ValueError: the texts hold nearly every one of the 65,534 characters.
    """
    texts = list(texts)
    codes = reversed(_CHARS) if last else iter(_CHARS)
    unused = (chr(code) for code in codes if not any(chr(code) in text for text in texts))
    found = list(itertools.islice(unused, count))
    if len(found) < count:
        raise ValueError("the text holds every private-use character of plane 16, none is left to mark special tokens")
    return found
