"""Column-parallel products: one communication for all layers that read the same input, hidden behind arithmetic.

Y_i = X W_iᵀ + b_i, where each rank holds some rows of W_i, i.e. some columns of Y_i (Megatron-LM, Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053; with the sequence shared between the products, Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import (
    TOKENS,
    Axis,
    finish,
    parts_along,
    parts_first,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from .deferred_products import DeferredProducts, Held

# Shape legend: B batch, S sequence, S' = S / ranks, E hidden, F_i this rank's columns of output i


def column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: Axis,
    sequence_parallel: bool,
    deferred: DeferredProducts | None = None,
    early: bool = False,
) -> tuple[Tensor, ...]:
    """The products of one input with this rank's rows of several weights.

    Sequence-parallel, x is this rank's (B, S', E), a stretch of all tokens (`TOKENS`): forward sends one all-gather;
    backward one all-gather of x, behind the product for the input's gradient, and one reduce-scatter of that gradient,
    behind those for the weights'. So only shards are kept between the passes. Otherwise x is the whole (B, S, E),
    alike on all ranks, and backward all-reduces its gradient behind the products for the weights'.

    Args:
        x: (B, S', E), or (B, S, E) if not `sequence_parallel`.
        weights: (F_i, E) each.
        biases: (F_i,) each, or None.
        deferred: takes the products for the weights' gradients, to be made later.
        early: begin with this rank's own tokens while those of the others arrive. Products are then written into parts
            of their results, which neither selective checkpointing nor torch.compile knows how to keep.

    Returns:
        (B, S, F_i) for each weight.
    """
    later = None
    if deferred is not None and torch.is_grad_enabled() and x.requires_grad:
        later = deferred, [Held(weight) for weight in weights]
        weights = [weight.detach() for weight in weights]
    outputs: tuple[Tensor, ...] = _ColumnProducts.apply(x, axis, sequence_parallel, later, early, *weights, *biases)
    return outputs


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sequence_parallel: bool, later: Any, early: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.later = later
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.axis, ctx.shared, ctx.count = axis, sequence_parallel and axis.size > 1, count
        ctx.save_for_backward(x, *weights)
        if ctx.shared and early:
            return _own_first(x, weights, biases, axis)
        whole = parts_along(finish(start_all_gather(x, axis)), axis, TOKENS) if ctx.shared else x
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        axis, wanted = ctx.axis, ctx.needs_input_grad[5:]
        if ctx.shared:
            x = start_all_gather(x, axis)
        rows = [grad.flatten(0, -2) for grad in grads]

        grad_x = None
        if ctx.needs_input_grad[0]:
            flat = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                flat = torch.addmm(flat, row, weight)
            grad_x = flat.unflatten(0, grads[0].shape[:-1])
            if ctx.shared:
                grad_x = start_reduce_scatter(parts_first(grad_x, axis, TOKENS), axis)
            elif axis.size > 1:
                grad_x = start_all_reduce(grad_x, axis)

        if ctx.shared:
            x = parts_along(finish(x), axis, TOKENS)
        flat_x = x.flatten(0, -2)
        of_weights = [row.mT @ flat_x if want else None for row, want in zip(rows, wanted[: ctx.count], strict=True)]
        of_biases = [row.sum(0) if want else None for row, want in zip(rows, wanted[ctx.count :], strict=True)]
        if ctx.later is not None:
            deferred, held = ctx.later
            for weight, row in zip(held, rows, strict=True):
                deferred.add(weight.tensor, row, flat_x)
        if grad_x is not None and axis.size > 1:
            grad_x = finish(grad_x)
        return (grad_x, None, None, None, None, *of_weights, *of_biases)


def _own_first(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], axis: Axis
) -> tuple[Tensor, ...]:
    """x (B, S', E) → (B, S, F_i): the own rows' products hide the all-gather of the others'."""
    coming = start_all_gather(x, axis)
    own = x.flatten(0, 1)
    first, end = axis.rank * len(own), (axis.rank + 1) * len(own)
    pairs = [(w, b) for w, b in zip(weights, biases, strict=True) if w is not None]
    outs = [x.new_empty(axis.size * len(own), len(w)) for w, _ in pairs]
    _products_into([out[first:end] for out in outs], own, pairs)
    whole = parts_along(finish(coming), axis, TOKENS)
    for part in (slice(first), slice(end, None)):
        _products_into([out[part] for out in outs], whole.flatten(0, 1)[part], pairs)
    return tuple(out.unflatten(0, whole.shape[:2]) for out in outs)


def _products_into(outs: Sequence[Tensor], rows: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    if not len(rows):
        return
    for out, (weight, bias) in zip(outs, pairs, strict=True):
        if bias is None:
            torch.mm(rows, weight.mT, out=out)
        else:
            torch.addmm(bias, rows, weight.mT, out=out)
