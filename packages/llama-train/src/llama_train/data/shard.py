"""A token shard: one file with the token ids of many documents, mapped into memory by its readers.

Layout (docs/data.md has it as a table): 16 bytes of magic, version and header length, a JSON header, then arrays that
each begin at a multiple of 64 bytes: ids, where each document ends, how many bytes of text it had, and which tokens
count as targets (left out where all do).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"LLTOKENS"
VERSION = 1
_ALIGNMENT = 64
_PREFIX = struct.Struct("<8sII")  # magic, version, length of the header
_ARRAYS = ("tokens", "ends", "bytes", "counted")

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Shard:
    """A shard that is open: its arrays are views of the file.

    Attributes:
        path: the file.
        tokens: (N,) uint16 or uint32.
        ends: (D,) uint64: document d is tokens[ends[d-1]:ends[d]].
        bytes: (D,) uint64: UTF-8 bytes of the text that counts in each document.
        counted: (ceil(N / 8),) uint8, a bit for each token, lowest first: whether it counts as a target. None: all do.
        vocab_size: ids are below it.
        tokenizer: fingerprint of the tokenizer.
        facts: what else its writer noted.
    """

    path: Path
    tokens: TokenArray
    ends: NDArray[np.uint64]
    bytes: NDArray[np.uint64]
    counted: NDArray[np.uint8] | None
    vocab_size: int
    tokenizer: str
    facts: dict[str, Any]

    def counts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens from `start` to `stop` count as targets."""
        if self.counted is None:
            return np.ones(stop - start, dtype=np.bool_)
        first = start // 8
        bits = np.unpackbits(self.counted[first : (stop + 7) // 8], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].view(np.bool_)


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds every id: two bytes for up to 65,536."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_shard(
    path: Path,
    tokens: NDArray[Any],
    ends: NDArray[Any],
    sizes: NDArray[Any],
    counted: NDArray[np.bool_] | None,
    *,
    vocab_size: int,
    tokenizer: str,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write a shard; the file appears whole, on disk and under its name, or not at all.

    The same arguments give the same bytes: no date, no machine.

    Args:
        path: where; a file there is replaced.
        tokens: (N,) ids.
        ends: (D,) rising, the last is N.
        sizes: (D,) UTF-8 bytes of each document's text.
        counted: (N,) which tokens count as targets; None: all.
        vocab_size: decides the width of an id.
        tokenizer: its fingerprint.
        facts: further JSON for the header.

    Raises:
        ValueError: an id outside the vocabulary.
        OSError: the disk is full or closed to us; nothing is left behind.
    """
    assert len(ends) == len(sizes)
    assert int(ends[-1] if len(ends) else 0) == len(tokens)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"{path.name}: token id {int(tokens.max())} is outside the vocabulary of {vocab_size}")
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.ascontiguousarray(tokens, dtype=id_type(vocab_size).newbyteorder("<")),
        "ends": np.ascontiguousarray(ends, dtype="<u8"),
        "bytes": np.ascontiguousarray(sizes, dtype="<u8"),
    }
    if counted is not None and not counted.all():
        arrays["counted"] = np.packbits(counted, bitorder="little")
    layout, place, check = {}, 0, 0
    for name, array in arrays.items():
        layout[name] = {"dtype": array.dtype.str, "size": len(array), "offset": place}
        place += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        check = zlib.crc32(array.data, check)
    header = json.dumps(
        {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "arrays": layout,
            "crc32": check,
            "facts": facts or {},
        }
    ).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, VERSION, len(header)))
            file.write(header)
            for array in arrays.values():
                file.write(array.data)
                file.write(b"\0" * (-array.nbytes % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_shard(path: Path) -> Shard:
    """Open a shard: its header is checked, its arrays are mapped and not read.

    Raises:
        ValueError: not a whole token shard of a version that is known.
    """
    try:
        with path.open("rb") as file:
            magic, version, length = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != MAGIC:
                raise ValueError("it is no token shard")
            if version != VERSION:
                raise ValueError(f"it has format version {version}; this program reads {VERSION}")
            header = json.loads(file.read(length))
        start = _PREFIX.size + length
        arrays = {name: _map(path, start, header["arrays"][name]) for name in _ARRAYS if name in header["arrays"]}
        tokens, ends, sizes, counted = (arrays.get(name) for name in _ARRAYS)
        if tokens is None or tokens.dtype not in (np.uint16, np.uint32) or ends is None or sizes is None:
            raise ValueError("its header names no ids of two or four bytes, or no documents")
        if len(ends) != len(sizes) or int(ends[-1] if len(ends) else 0) != len(tokens):
            raise ValueError("its document index does not fit its tokens")
        if counted is not None and len(counted) != (len(tokens) + 7) // 8:
            raise ValueError("its target mask does not fit its tokens")
        return Shard(
            path, tokens, ends, sizes, counted, int(header["vocab_size"]), str(header["tokenizer"]), header["facts"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path} is not a whole token shard: {reason}") from None


def verify_shard(path: Path) -> None:
    """Read all of a shard and compare it with the checksum in its header.

    Raises:
        ValueError: it is damaged.
    """
    shard = read_shard(path)
    with path.open("rb") as file:
        length = _PREFIX.unpack(file.read(_PREFIX.size))[2]
        expected = json.loads(file.read(length)).get("crc32")
    check = 0
    for array in (shard.tokens, shard.ends, shard.bytes, shard.counted):
        if array is not None:
            check = zlib.crc32(np.ascontiguousarray(array).data, check)
    if check != expected:
        raise ValueError(f"{path} is damaged: its checksum is {check}, not {expected}")


def _map(path: Path, start: int, entry: dict[str, Any]) -> Any:
    if entry["size"] == 0:  # an empty file part cannot be mapped
        return np.empty(0, dtype=entry["dtype"])
    return np.memmap(path, dtype=entry["dtype"], mode="r", offset=start + entry["offset"], shape=(entry["size"],))
