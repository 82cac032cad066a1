"""Writing one safetensors file, tensor by tensor, so that a model on a GPU never has a second copy in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .safetensors_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 16 << 20
Done = Callable[[int], None]


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    done: Done | None = None,
) -> None:
    """Write `tensors` to a new file.

    Args:
        path: must not exist.
        tensors: on any device, of any strides.
        dtype: to convert to on the way; `None` keeps each tensor's.
        metadata: strings for the header; `format: pt` is always there, because Hugging Face's loaders look for it.
        done: called after every piece with its bytes in memory.
    """
    # Wide types first, as the library does, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -(dtype or tensors[name].dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        kind, shape = dtype or tensors[name].dtype, list(tensors[name].shape)
        begin, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            for rows in host_rows(tensors[name], dtype, done):
                file.write(rows.flatten().view(torch.uint8).numpy().data)  # flat: (n, 1) may be of odd strides


def host_rows(tensor: Tensor, dtype: torch.dtype | None = None, done: Done | None = None) -> Iterator[Tensor]:
    """The tensor in contiguous pieces of dimension 0 in main memory; copied only where it must be."""
    tensor = tensor.detach()
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, _PIECE_BYTES * rows // max(1, tensor.numel() * tensor.element_size()))
    for start in range(0, rows, step):
        piece = tensor[start : start + step] if tensor.dim() else tensor.reshape(1)
        if piece.numel():
            yield piece.to("cpu", dtype or tensor.dtype).contiguous()
            if done is not None:
                done(piece.nbytes)
