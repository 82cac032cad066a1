"""A file of token ids: a NumPy array on disk, mapped into memory, two bytes an id where the vocabulary allows it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


def write_tokens(path: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write the ids of all documents one after another; the file appears whole or not at all.

    Returns:
        The number of ids.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    parts = [np.asarray(document, dtype=dtype) for document in documents]
    array = np.concatenate(parts) if parts else np.empty(0, dtype)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(array)


def read_tokens(path: Path) -> TokenArray:
    """Map the file into memory, read-only.

    Raises:
        ValueError: not a file that `write_tokens` wrote.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole token file: {error}") from None
    if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"{path} holds {array.ndim}-dimensional {array.dtype}; token ids are one row of uint16 or uint32"
        )
    tokens: TokenArray = array
    return tokens
