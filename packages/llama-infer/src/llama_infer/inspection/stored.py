"""The tensors of a checkpoint as its file holds them: names, shapes, types, sizes. No weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from llama_core.gguf_weights import FLOATS, GgufEntry
from llama_core.load import open_checkpoint
from llama_core.stored_tensor import JoinedRows, PairedRows, StoredTensor


@dataclass(frozen=True)
class Stored:
    """One tensor of a file."""

    name: str
    """Hugging Face's, whatever the format calls it."""
    shape: tuple[int, ...]
    kind: str
    """The type of its values, GGUF's quantised ones included."""
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(path: str | Path) -> tuple[Stored, ...]:
    """All tensors of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    checkpoint = open_checkpoint(path)
    try:
        return tuple(_stored(name, tensor) for name, tensor in checkpoint.tensors.items())
    finally:
        checkpoint.close()


def _stored(name: str, tensor: StoredTensor) -> Stored:
    inner = tensor
    while isinstance(inner, PairedRows | JoinedRows):
        inner = inner.stored if isinstance(inner, PairedRows) else inner.parts[0]
    shape = tuple(tensor.shape)
    if isinstance(inner, GgufEntry) and inner.ggml_type not in FLOATS:
        import gguf

        return Stored(name, shape, gguf.GGMLQuantizationType(inner.ggml_type).name, shape[0] * inner.row_bytes)
    kind = str(tensor.dtype).removeprefix("torch.")
    return Stored(name, shape, kind, math.prod(shape) * tensor.dtype.itemsize)
