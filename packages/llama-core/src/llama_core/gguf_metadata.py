"""The key-value part of a GGUF file: configuration, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .gguf_file import read_gguf_header


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file as plain Python values, arrays as lists.

    Raises:
        CheckpointError: not a GGUF file, or a damaged one.
    """
    return read_gguf_header(path).metadata
