"""Checks that every section of the settings makes, and how a refusal reads."""

from __future__ import annotations

import math


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise a ValueError that names the key, its value and the values it may have."""
    if not condition:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def is_text(value: str) -> bool:
    """Whether a file and a path can hold it: no NUL, and nothing that is not UTF-8, as a command line may bring."""
    return "\0" not in value and value.encode(errors="ignore").decode() == value


def finite_and(value: float, condition: bool) -> bool:
    """Whether the number is finite and the condition holds."""
    return math.isfinite(value) and condition
