"""The one model that has a name of its own in settings and on the command line."""

from __future__ import annotations

from pathlib import Path

from llama_core.embedded import INSTALL, NAME, find_embedded

EMBEDDED = "embedded"


def locate(model: str) -> str:
    """The path or hub name behind a setting that names a model or its tokenizer.

    Raises:
        ValueError: the embedded model is wanted and not installed.
    """
    if model != EMBEDDED:
        return str(Path(model).expanduser()) if model.startswith("~") else model
    path = find_embedded()
    if path is None:
        raise ValueError(f"{EMBEDDED!r} is {NAME}, which is not installed: {INSTALL}")
    return str(path)
