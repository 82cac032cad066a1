"""The container of a GGUF file: metadata, tensor names, shapes, types and offsets. Needs no other package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is checked against the file before
anything is read or allocated, so that a damaged count costs nothing.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError

MAX_HEADER = 1 << 28  # metadata and tensor infos; the largest vocabularies take about 20 MB
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place. `shape` is in torch's order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """From the start of the file, in bytes."""


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read everything in front of the tensors' data.

    Raises:
        CheckpointError: not a GGUF file, or a damaged one; the message names file, byte and what was read there.
    """
    path = Path(path)
    try:
        with open(path, "rb", buffering=1 << 20) as file:
            return _Parser(path, file).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None


class _Parser:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.file = file
        self.at = 0

    def fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: at byte {self.at}: {text}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at or self.at + count > MAX_HEADER:
            limit = f"a header may have {MAX_HEADER} in all; the file is truncated or damaged"
            raise self.fault(f"{what} needs {count} bytes, {self.size - self.at} are left, {limit}")
        data = self.file.read(count)
        if len(data) != count:
            raise self.fault(f"{what}: the file ended while being read")
        self.at += count
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        data = self.take(self.number("Q", f"length of {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8: {error.reason}") from None

    def count(self, what: str, least: int) -> int:
        """A number of items of which each takes at least `least` bytes."""
        count: int = self.number("Q", what)
        if count * least > self.size - self.at:
            raise self.fault(f"{what} is {count}, which cannot fit into the {self.size - self.at} bytes left")
        return count

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth > 3:
            raise self.fault(f"{what} has value type {kind}; known are 0 to 12, arrays at most four deep")
        inner = self.number("I", f"element type of {what}")
        if code := _SCALARS.get(inner):
            width = struct.calcsize("<" + code)
            count = self.count(f"length of {what}", width)
            return list(struct.unpack(f"<{count}{code}", self.take(count * width, what)))
        count = self.count(f"length of {what}", 8)
        return [self.value(inner, what, depth + 1) for _ in range(count)]

    def header(self) -> GgufHeader:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is no GGUF file: it begins with {magic!r}")
        version: int = self.number("I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            detail = "a big-endian file" if swapped in (2, 3) else "2 and 3 are read"
            raise self.fault(f"GGUF version {version} is not supported: {detail}")
        tensor_count = self.count("the number of tensors", 24)
        pair_count = self.count("the number of metadata pairs", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.fault(f"metadata key {key[:80]!r} stands there twice")
            metadata[key] = self.value(self.number("I", f"value type of {key[:80]!r}"), f"metadata {key[:80]!r}")
        infos = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fault(f"general.alignment is {alignment!r}; it must be a power of two")
        begin = math.ceil(self.at / alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self.fault(f"tensor {name!r} stands there twice")
            if offset % alignment or begin + offset > self.size:
                raise self.fault(
                    f"tensor {name!r} begins at data byte {offset}; it must be a multiple of {alignment} within the "
                    f"file's {self.size - begin} bytes of data: truncated or damaged"
                )
            tensors[name] = GgufTensor(name, shape, kind, begin + offset)
        return GgufHeader(self.path, self.size, metadata, tensors)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        dims: int = self.number("I", f"number of dimensions of {name[:80]!r}")
        if dims > 4:
            raise self.fault(f"tensor {name[:80]!r} has {dims} dimensions; at most 4 are allowed")
        shape = tuple(reversed([self.number("Q", f"shape of {name[:80]!r}") for _ in range(dims)]))
        if math.prod(shape) >= 1 << 63:
            raise self.fault(f"tensor {name[:80]!r} has the impossible shape {list(shape)}")
        return name, shape, self.number("I", f"type of {name[:80]!r}"), self.number("Q", f"offset of {name[:80]!r}")
