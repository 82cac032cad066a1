"""Row-parallel products whose sum over ranks is under way while this rank's own part is still being computed.

Y = Σ_ranks X Wᵀ, where each rank holds some columns of W and wants one stretch of Y's rows (sequence parallelism). The
rows that others want are computed and sent first, and this rank's own hide the transfer. Backward, the gradient of the
own rows is used while that of the others' arrives. What is sent is what a reduce-scatter and an all-gather send.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import TOKENS, Axis, finish, parts_along, start_all_gather, start_exchange
from .deferred_products import DeferredProducts, Held

# Shape legend: B batch, S sequence, S' = S / ranks, T = B · S tokens, E hidden, F this rank's part of the inner width


def row_product(x: Tensor, weight: Tensor, axis: Axis, deferred: DeferredProducts | None = None) -> Tensor:
    """The sum over ranks of x weightᵀ, of which each rank gets its stretch of tokens (`TOKENS`).

    Args:
        x: (B, S, F).
        weight: (E, F).
        axis: more than one rank.
        deferred: takes the product for the weight's gradient, to be made later.

    Returns:
        (B, S', E). Two partial sums are added in the type of x, as NCCL does; more of them in float32.

    Raises:
        ValueError: a sequence that does not divide over the ranks.
    """
    if x.shape[1] % axis.size:
        raise ValueError(f"dimension 1 of {tuple(x.shape)} does not divide over {axis.size} ranks")
    later = None
    if deferred is not None and torch.is_grad_enabled():
        later, weight = (deferred, Held(weight)), weight.detach()
    out: Tensor = _RowProduct.apply(x, weight, axis, later)
    return out


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, later: Any) -> Tensor:
        ctx.axis, ctx.later = axis, later
        ctx.save_for_backward(x, weight)
        rows = x.flatten(0, 1)
        length = len(rows) // axis.size
        first, end = axis.rank * length, (axis.rank + 1) * length
        sent = x.new_empty(len(rows) - length, len(weight))
        for part, out in ((rows[:first], sent[:first]), (rows[end:], sent[first:])):
            if len(part):
                torch.mm(part, weight.mT, out=out)
        coming = start_exchange(sent, axis)
        own = rows[first:end] @ weight.mT
        parts = finish(coming).unflatten(0, (axis.size - 1, length))
        if axis.size == 2:
            own += parts[0]
        else:
            own = (parts.sum(0, dtype=torch.promote_types(own.dtype, torch.float32)) + own).to(own.dtype)
        shared: Tensor = own.unflatten(0, (x.shape[0], -1))
        return shared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis = ctx.axis
        coming = start_all_gather(grad, axis)
        own = grad.flatten(0, 1)
        first, end = axis.rank * len(own), (axis.rank + 1) * len(own)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            torch.mm(own, weight, out=grad_x.flatten(0, 1)[first:end])
        whole = parts_along(finish(coming), axis, TOKENS).flatten(0, 1)
        if grad_x is not None:
            for part in (slice(first), slice(end, None)):
                if len(whole[part]):
                    torch.mm(whole[part], weight, out=grad_x.flatten(0, 1)[part])
        rows = x.flatten(0, 1)
        if ctx.later is not None:
            deferred, held = ctx.later
            deferred.add(held.tensor, whole, rows)
        return grad_x, whole.mT @ rows if ctx.needs_input_grad[1] else None, None, None
