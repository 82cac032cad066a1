"""One safetensors file: eight bytes of header length, a JSON header, the tensors' bytes.

Format: https://github.com/huggingface/safetensors#format. Read here rather than through the library so that bytes go
from the page cache straight into the parameter, and so that a damaged header gives an error that names the place.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError, listed
from .file_bytes import FileBytes, Scratch

MAX_HEADER = 100_000_000  # the limit of the safetensors library
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a safetensors file, not read yet."""

    file: FileBytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    granule: int = 1

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        offset = self.offset + start * math.prod(self.shape[1:]) * self.dtype.itemsize
        if out.device.type == "cpu" and out.dtype == self.dtype and out.is_contiguous():
            self.file.read_tensor(offset, out)
            return
        rows = scratch.take(out.shape, self.dtype, pinned=out.is_cuda)
        self.file.read_tensor(offset, rows)
        out.copy_(rows)


def read_header(file: FileBytes) -> tuple[dict[str, SafetensorsEntry], dict[str, str]]:
    """All entries by name, and the `__metadata__` strings.

    Raises:
        CheckpointError: anything the format does not allow; the message names file and place.
    """
    if file.size < 8:
        raise CheckpointError(f"{file.path}: {file.size} bytes are too few for a safetensors file; it is truncated")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER or length > file.size - 8:
        raise CheckpointError(
            f"{file.path}: byte 0 announces a header of {length} bytes in a file of {file.size} bytes; "
            f"it is truncated or no safetensors file (limit {MAX_HEADER})"
        )
    header = _parse_json(file, file.read(8, length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file.path}: __metadata__ must be an object of strings")
    begin = 8 + length
    spans: list[tuple[int, int, str]] = []
    entries = {}
    for name, entry in header.items():
        dtype, shape, (first, last) = _parse_entry(file, name, entry)
        if last - first != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{file.path}: {name} of shape {list(shape)} and type {dtype} needs "
                f"{math.prod(shape) * dtype.itemsize} bytes, data_offsets {[first, last]} give {last - first}"
            )
        spans.append((first, last, name))
        entries[name] = SafetensorsEntry(file, shape, dtype, begin + first)
    _check_layout(file, sorted(spans), file.size - begin)
    return entries, metadata


def _parse_json(file: FileBytes, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            keys = [key for key, _ in pairs]
            raise CheckpointError(f"{file.path}: header names twice: {listed({k for k in keys if keys.count(k) > 1})}")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: the header at byte 8 is no valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: the header at byte 8 must be a JSON object")
    return header


def _parse_entry(file: FileBytes, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{file.path}: the header's entry {name} must have dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(f"{file.path}: {name} has dtype {kind!r}; known: {', '.join(DTYPES)}")
    if not _whole_numbers(shape) or len(shape) > 8 or math.prod(shape) >= 1 << 63:
        raise CheckpointError(f"{file.path}: {name} has shape {str(shape)[:80]}; it must be up to 8 whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{file.path}: {name} has data_offsets {str(offsets)[:80]}; it must be [begin, end]")
    return DTYPES[kind], tuple(shape), (offsets[0], offsets[1])


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(file: FileBytes, spans: list[tuple[int, int, str]], available: int) -> None:
    """Tensors must follow each other without holes or overlaps and end where the file does."""
    end = 0
    for first, last, name in spans:
        if first != end:
            raise CheckpointError(
                f"{file.path}: {name} begins at data byte {first}, the tensor before it ends at {end}"
            )
        end = last
    if end != available:
        state = "it is truncated" if end > available else "there are bytes behind the last tensor"
        raise CheckpointError(
            f"{file.path}: the header describes {end} bytes of tensors, {available} are there; {state}"
        )
