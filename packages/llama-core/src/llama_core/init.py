"""Initial weights that do not depend on how the model is laid out.

Every element is a function of (seed, parameter name, its index in the whole parameter) and of nothing else: a
shard of any layout draws exactly its own part, on CPU and on GPU the same bits, and no generator has a state.

An integer hash gives 64 bits per element; the upper 12 choose a cell of the normal quantile function and the rest
the place inside the cell. Only integer arithmetic, one table and separately rounded sums and products are used,
because logarithms and cosines (Box-Muller) differ in the last bit between devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .model import Llama

_CELL_BITS = 12
_OFFSET_BITS = 24
_CHUNK = 1 << 18  # elements drawn at a time: temporaries stay small beside the weights, and in a CPU's cache
_CHUNK_GPU = 1 << 24  # some twenty kernels draw a chunk, and each takes longer to launch than a small chunk to compute


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill a model with fresh weights, in place.

    Matrices and embedding ~ N(0, initializer_range²), cut at about 4.2 standard deviations; norm scales 1; biases 0.

    Args:
        model: a materialised `Llama`, or a part of one.
        seed: any integer of 64 bits; the same seed gives the same weights on every device and layout.
    """
    std = model.config.initializer_range
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.fill_(0.0)
        else:
            tied = name == "lm_head.weight" and model.config.tie_word_embeddings
            key_name = "model.embed_tokens.weight" if tied else name  # a last pipeline stage has the head alone
            fill_normal(parameter, key_name, seed, std, parameter.shape, [0] * parameter.dim())


def fill_normal(
    out: Tensor, name: str, seed: int, std: float, global_shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Fill `out` with the block of a normally distributed parameter that starts at `offsets`.

    Args:
        out: (rows, columns) or (columns,), the block; any float dtype.
        name: the parameter's full name.
        seed: seed of the whole model.
        std: standard deviation.
        global_shape: shape of the whole parameter.
        offsets: index of the block's first element along each dimension of the whole.
    """
    assert out.dim() == len(global_shape) == len(offsets) <= 2
    block = out if out.dim() == 2 else out.unsqueeze(0)
    stride = global_shape[-1]
    row0, column0 = ([0] * (2 - out.dim()) + list(offsets))[:2]
    key = _key(name, seed)
    low, width = (torch.tensor(x, dtype=torch.float32, device=out.device) for x in _cells())
    columns = torch.arange(column0, column0 + block.shape[1], dtype=torch.int64, device=out.device)
    chunk = _CHUNK if out.device.type == "cpu" else _CHUNK_GPU
    step = max(1, chunk // max(1, block.shape[1]))
    for start in range(0, block.shape[0], step):
        rows = torch.arange(start, min(start + step, block.shape[0]), dtype=torch.int64, device=out.device)
        index = (rows.unsqueeze(1) + row0) * stride + columns
        bits = _mix(index, key)
        block[start : start + len(rows)] = (_standard_normal(bits, low, width) * std).to(out.dtype)


def _key(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _standard_normal(bits: Tensor, low: Tensor, width: Tensor) -> Tensor:
    """64 random bits per element → float32 draws of N(0, 1); low and width describe the cells."""
    cell = _shift(bits, 64 - _CELL_BITS)
    place = ((bits >> 8) & ((1 << _OFFSET_BITS) - 1)).to(torch.float32) * 2.0**-_OFFSET_BITS  # in [0, 1)
    return low[cell] + width[cell] * place


def _mix(index: Tensor, key: int) -> Tensor:
    """splitmix64 (Steele, Lea & Flood 2014) of the element's index, in wrapping int64 arithmetic."""
    z = index * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right; the mask drops the copies of the sign that an arithmetic shift brings in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


@cache
def _cells() -> tuple[list[float], list[float]]:
    """Lower borders and widths of the 2¹² equally likely cells of N(0, 1); the two open ends close at 4.17."""
    count = 1 << _CELL_BITS
    normal = NormalDist()
    end = normal.inv_cdf(1 - 1 / (16 * count))
    borders = [-end, *(normal.inv_cdf(i / count) for i in range(1, count)), end]
    return borders[:-1], [high - low for low, high in pairwise(borders)]
