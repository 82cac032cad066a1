"""The tensors of a GGUF file under their Hugging Face names, dequantised row by row.

Quantised types go through the `gguf` package (extra `gguf`). The rows of query and key projections are stored in the
order of interleaved rotary pairs and are put back into that of rotated halves.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .errors import CheckpointError, listed
from .file_bytes import FileBytes, Scratch
from .gguf_config import config_from_gguf
from .gguf_file import GgufHeader, GgufTensor, read_gguf_header
from .stored_tensor import PairedRows, StoredTensor

FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
ROPE_DIVISORS = "rope_freqs.weight"
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; `None` for names a Llama does not have."""
    if gguf_name in TOP:
        return TOP[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    return None


@dataclass(frozen=True)
class GgufEntry:
    """A tensor of a GGUF file, not read yet."""

    file: FileBytes
    offset: int
    shape: tuple[int, ...]
    ggml_type: int
    row_bytes: int
    dtype: torch.dtype
    granule: int = 1

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        offset, shape = self.offset + start * self.row_bytes, (stop - start, *self.shape[1:])
        if self.ggml_type in FLOATS:
            rows = scratch.take(shape, self.dtype, pinned=out.is_cuda)
            self.file.read_tensor(offset, rows)
            out.copy_(rows)
            return
        data = scratch.take((stop - start, self.row_bytes), torch.uint8)
        self.file.read_tensor(offset, data)
        out.copy_(torch.from_numpy(_dequantize(data.numpy(), self.ggml_type)).view(shape))


def open_gguf(path: Path) -> Checkpoint:
    """Read the header of a GGUF file, or of all files of a split one; no weights yet.

    Raises:
        CheckpointError: damaged, not a Llama, of a type that cannot be dequantised, or the extra `gguf` is missing.
    """
    asked = read_gguf_header(path)  # a vocabulary takes a tenth of a second: each file once
    headers = [asked if part == path else read_gguf_header(part) for part in _parts(path, asked)]
    files: list[FileBytes] = []
    try:
        files += [FileBytes(header.path) for header in headers]
        return _open(path, headers, files)
    except BaseException as error:
        for file in files:
            file.close()
        if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{path}: {error}") from None
        raise


def _parts(path: Path, header: GgufHeader) -> list[Path]:
    """All files of a model that llama.cpp's gguf-split has cut, in order; the first holds the metadata."""
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return [path]
    match = _SPLIT.fullmatch(path.name)
    if not isinstance(count, int) or not 0 < count < 100_000:
        raise CheckpointError(f"{path}: split.count is {str(count)[:80]}; it must be a number of files")
    if not match or count != int(match["count"]):
        raise CheckpointError(f"{path}: split.count is {count}; the file must be named NAME-00001-of-{count:05d}.gguf")
    parts = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(f"{path}: {len(absent)} of {count} parts are not there: {listed(absent)}")
    return parts


def _open(path: Path, headers: Sequence[GgufHeader], files: Sequence[FileBytes]) -> Checkpoint:
    stored: dict[str, tuple[GgufTensor, FileBytes, int]] = {}
    for header, file in zip(headers, files):
        row_bytes = {name: _row_bytes(header.path, tensor) for name, tensor in header.tensors.items()}
        _check_extent(header, row_bytes)
        for name, tensor in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"{header.path}: {name} stands in {stored[name][1].path.name} already")
            stored[name] = (tensor, file, row_bytes[name])
    divisors = _divisors(*stored.pop(ROPE_DIVISORS)[:2]) if ROPE_DIVISORS in stored else None
    shapes = {name: tensor.shape for name, (tensor, _, _) in stored.items()}
    config = config_from_gguf(headers[0].metadata, shapes, divisors)
    tensors: dict[str, StoredTensor] = {}
    for name, (tensor, file, row_size) in stored.items():
        dtype = FLOATS.get(tensor.ggml_type, torch.float32)
        entry: StoredTensor = GgufEntry(file, tensor.offset, tensor.shape, tensor.ggml_type, row_size, dtype)
        if ".attn_q." in name or ".attn_k." in name:
            if tensor.shape[0] % config.head_width:
                heads = f"{name} has {tensor.shape[0]} rows, no multiple of the head width {config.head_width}"
                raise CheckpointError(f"{file.path}: {heads}")
            entry = PairedRows(entry, config.head_width)
        tensors[hf_name(name) or name] = entry
    return Checkpoint(path, config, tensors, files=files)


def _divisors(tensor: GgufTensor, file: FileBytes) -> list[float]:
    if tensor.ggml_type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise CheckpointError(f"{file.path}: {ROPE_DIVISORS} must be a vector of float32")
    values = torch.empty(tensor.shape)
    file.read_tensor(tensor.offset, values)
    divisors: list[float] = values.tolist()
    return divisors


def _row_bytes(path: Path, tensor: GgufTensor) -> int:
    if not 1 <= len(tensor.shape) <= 2 or 0 in tensor.shape:
        raise CheckpointError(f"{path}: {tensor.name} has shape {list(tensor.shape)}; a Llama has vectors and matrices")
    inner = tensor.shape[1] if len(tensor.shape) == 2 else 1
    if tensor.ggml_type in FLOATS:
        return inner * FLOATS[tensor.ggml_type].itemsize
    block, size = _block(path, tensor)
    if len(tensor.shape) == 1 or inner % block:
        raise CheckpointError(
            f"{path}: {tensor.name} of shape {list(tensor.shape)} cannot be of GGML type {tensor.ggml_type}, "
            f"whose blocks hold {block} values of a row"
        )
    return inner // block * size


def _check_extent(header: GgufHeader, row_bytes: Mapping[str, int]) -> None:
    spans = sorted((t.offset, t.offset + t.shape[0] * row_bytes[t.name], t.name) for t in header.tensors.values())
    beyond = [f"{name} (ends at byte {end})" for _, end, name in spans if end > header.size]
    if beyond:
        raise CheckpointError(
            f"{header.path} is truncated: {len(beyond)} tensors lie beyond its {header.size} bytes: {listed(beyond)}"
        )
    for (_, end, before), (begin, _, name) in itertools.pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{header.path}: {name} begins at byte {begin}, inside {before}, which ends at {end}")


def _quants() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            "this GGUF file is quantised and the package `gguf` is not installed; install llama-core[gguf]"
        ) from None
    return gguf


def _block(path: Path, tensor: GgufTensor) -> tuple[int, int]:
    """Values and bytes of a block, after making sure that the type can be dequantised at all."""
    gguf = _quants()
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        _dequantize(np.zeros((1, size), dtype=np.uint8), tensor.ggml_type)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: {tensor.name} has GGML type {tensor.ggml_type}: {error}") from None
    return block, size


def _dequantize(rows: np.ndarray[Any, Any], ggml_type: int) -> np.ndarray[Any, Any]:
    gguf = _quants()
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; that is a value, not a warning
        values: np.ndarray[Any, Any] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type))
    return np.ascontiguousarray(values, dtype=np.float32)
