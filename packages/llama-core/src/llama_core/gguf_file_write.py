"""Writing the container of a GGUF file: metadata, tensor infos, and where each tensor's bytes must go.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

ALIGNMENT = 32


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor: its place in the header, and its bytes piece by piece when their turn comes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    size: int
    """Bytes that `pieces` gives in all."""
    pieces: Iterable[Any]
    """Buffers."""


def write_gguf_file(file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a whole file.

    Args:
        metadata: values of the types str, bool, int (written as uint32), float (float32), and lists of one of str,
            bool, int (int32), float.
        tensors: written in this order.
    """
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header += [_string(key), *_value(value)]
    offset = 0
    for tensor in tensors:
        shape = tuple(reversed(tensor.shape))
        header.append(_string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        header.append(struct.pack("<IQ", tensor.ggml_type, offset))
        offset += _aligned(tensor.size)
    text = b"".join(header)
    file.write(text.ljust(_aligned(len(text)), b"\0"))
    for tensor in tensors:
        written = 0
        for piece in tensor.pieces:
            written += file.write(piece)
        assert written == tensor.size, f"{tensor.name}: {written} bytes instead of {tensor.size}"
        file.write(b"\0" * (_aligned(written) - written))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


_KINDS: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
_LIST_KINDS: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}


def _value(value: Any) -> Iterator[bytes]:
    if isinstance(value, str):
        yield struct.pack("<I", 8) + _string(value)
    elif isinstance(value, list):
        kind = type(value[0]) if value else str
        assert all(type(item) is kind for item in value), "a GGUF array holds values of one type"
        if kind is str:
            yield struct.pack("<IIQ", 9, 8, len(value))
            yield from map(_string, value)
        else:
            number, code = _LIST_KINDS[kind]
            yield struct.pack("<IIQ", 9, number, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
    else:
        number, code = _KINDS[type(value)]
        yield struct.pack("<I" + code, number, value)
