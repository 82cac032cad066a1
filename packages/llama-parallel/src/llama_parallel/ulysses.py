"""Ulysses attention: ranks that share a sequence share the heads instead, for attention only (arXiv:2309.14509).

    (B, S, H, D) of this rank's tokens  →  all-to-all  →  (B, S · n, H / n, D): all tokens of this rank's heads
    →  attention on one device  →  all-to-all  →  (B, S, H, D)

Queries, keys and values travel in one all-to-all. Fewer key/value heads than ranks: each rank is sent those that its
query heads read, and no others unless ranks need different numbers of them (then all get the largest number).

    sent by each rank and layer, in elements, with B·S tokens of a rank, n ranks and m key/value heads for each rank:
    forward     (n - 1)/n · B·S·D · (H + 2·n·m)    q, k, v;    (n - 1)/n · B·S·D·H    the result
    backward    the same, the other way

Ring attention sends no queries and can hide what it sends; Ulysses makes two transfers of fixed number, and lets the
kernel see whole sequences. Its n is at most the number of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_core import Attend

from .collectives import Axis, all_to_all

# Shape legend: B batch, S tokens of a sequence on this rank, H query heads, K key/value heads, D head width
_SEQUENCE, _HEADS = 1, 2


class UlyssesAttend:
    """Attention over sequences that the ranks of `axis` share piece by piece, in order.

    Args:
        axis: the ranks.
        whole: causal attention on whole sequences, of as many heads as it gets.
    """

    def __init__(self, axis: Axis, whole: Attend) -> None:
        self.axis, self.whole = axis, whole

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D), all of this rank's tokens → (B, S, H, D); a collective call.

        Raises:
            ValueError: query heads that do not divide over the ranks.
        """
        size, heads, kv_heads = self.axis.size, q.shape[_HEADS], k.shape[_HEADS]
        if heads % size:
            raise ValueError(f"{heads} attention heads do not divide over cp {size}")
        own = heads // size
        starts, width = kv_windows(heads, kv_heads, size)
        k, v = (take_heads(x, starts, width) for x in (k, v))
        parts = [x.unflatten(_HEADS, (size, -1)) for x in (q, k, v)]  # (B, S, ranks, heads of a rank, D)
        sent = torch.cat(parts, 3).flatten(2, 3)
        q, k, v = all_to_all(sent, self.axis, _HEADS, _SEQUENCE).split((own, width, width), _HEADS)
        first = self.axis.rank * own
        group, start = heads // kv_heads, starts[self.axis.rank]
        read = tuple((first + head) // group - start for head in range(own))  # by each of our query heads
        if own % width or read != tuple(head // (own // width) for head in range(own)):
            k, v = (take_heads(x, read, 1) for x in (k, v))  # not in even groups, which is what kernels know
        return all_to_all(self.whole(layer, q, k, v), self.axis, _SEQUENCE, _HEADS)


def kv_windows(heads: int, kv_heads: int, size: int) -> tuple[tuple[int, ...], int]:
    """The first key/value head that each rank gets, and how many in a row: as few as the neediest rank needs."""
    own, group = heads // size, heads // kv_heads
    first = [rank * own // group for rank in range(size)]
    last = [((rank + 1) * own - 1) // group for rank in range(size)]
    width = max(b - a for a, b in zip(first, last, strict=True)) + 1
    return tuple(min(a, kv_heads - width) for a in first), width


def take_heads(x: Tensor, starts: tuple[int, ...], width: int) -> Tensor:
    """(B, S, K, D) → (B, S, len(starts) · width, D): `width` heads from each start on; x itself if that is all of it.

    Gradients of a head that is taken more than once are added in float32, always in the same order.
    """
    if starts == tuple(range(0, x.shape[_HEADS], width)):
        return x
    return _TakeHeads.apply(x, starts, width)  # type: ignore[no-any-return]


class _TakeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: tuple[int, ...], width: int) -> Tensor:
        ctx.starts, ctx.width, ctx.heads = starts, width, x.shape[_HEADS]
        return torch.cat([x.narrow(_HEADS, start, width) for start in starts], _HEADS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape = (*grad.shape[:_HEADS], ctx.heads, grad.shape[-1])
        total = grad.new_zeros(shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        for start, part in zip(ctx.starts, grad.split(ctx.width, _HEADS), strict=True):
            total.narrow(_HEADS, start, ctx.width).add_(part)
        return total.to(grad.dtype), None, None
