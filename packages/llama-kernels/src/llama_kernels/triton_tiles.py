"""What the Triton attention kernels share on the host: tile sizes, and preparing tensors for plain pointers.

The tile tables are static: they were measured once on an H200 (benchmarks/results/attention-h200.md), so that the
first call of a process costs one compilation and not a search, and results do not depend on a search's outcome.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall
from llama_kernels.compat import INTERPRETING, tl

LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """block_m query rows by block_n keys, worked on by `warps` warps with loads `stages` deep."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def compute_type(dtype: torch.dtype) -> Any:
    """The type of matrix operands. The interpreter has no bfloat16 arithmetic, so there it is float32 for all."""
    if INTERPRETING or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def forward_tile(call: AttentionCall) -> Tile:
    if INTERPRETING:
        return Tile(32, 32, 4, 1)
    if call.dtype == torch.float32:  # exact float32 products run on the ordinary units: small tiles
        return Tile(32, 32, 4, 1) if call.head_dim > 128 else Tile(64, 32, 4, 1)
    return Tile(128, 64, 8, 2 if call.head_dim > 128 else 3)


def backward_tiles(call: AttentionCall) -> tuple[Tile, Tile]:
    """For the gradients of keys and values, and for the gradient of queries."""
    if INTERPRETING:
        return Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
    if call.dtype == torch.float32:
        return Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
    if call.head_dim > 128:
        return Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)
    # Two programs of four warps on a multiprocessor beat one of eight: one's products run beside the other's powers.
    return Tile(32, 64, 4, 3), Tile(128, 64, 8, 3) if call.head_dim > 64 else Tile(64, 64, 4, 3)


def heads_in_cache(call: AttentionCall) -> int:
    """How many query heads to work on at a time, so that the keys and values they read stay in the L2 cache.

    16 MB leaves room beside them for queries and outputs in the 50 MB of a Hopper card.
    """
    per_kv_head = 2 * call.max_k * call.head_dim * call.dtype.itemsize
    return call.group * max(1, min(64, (16 << 20) // max(per_kv_head, 1)))


def bounds_or_none(cu_q: Tensor | None, cu_k: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Pointers for the document bounds; a dense kernel never reads them but needs arguments of a fixed kind."""
    if cu_q is None or cu_k is None:
        return unused, unused
    return cu_q.contiguous(), cu_k.contiguous()
