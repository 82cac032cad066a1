"""The linear layers, and the one place where their matrix product can be exchanged: for another library's, or another
precision's, from outside and for one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x (..., in), weight (out, in), bias (out,) or None → x weightᵀ + bias, (..., out)."""


SharedProduct = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
"""x (..., in), weights (out_i, in) → x weightᵢᵀ for each, (..., out_i)."""


class _SharedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rows[0] @ weights[0]
            for grad, weight in zip(rows[1:], weights[1:], strict=True):
                dx.addmm_(grad, weight)
            dx = dx.view(x.shape)
        flat = x.reshape(-1, x.shape[-1])
        needed = ctx.needs_input_grad[1:]
        return dx, *(grad.mT @ flat if wanted else None for grad, wanted in zip(rows, needed, strict=True))


def shared_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Products of one x with several weights. The gradient for x is summed inside the backward products, where autograd
    would add their results in passes over memory of its own, and round after each."""
    if not torch.is_grad_enabled():
        return tuple(F.linear(x, weight) for weight in weights)
    out: tuple[Tensor, ...] = _SharedLinear.apply(x, *weights)
    return out


class Multiplies:
    """Anything that multiplies by weights."""

    product: LinearProduct = staticmethod(F.linear)
    shared_product: SharedProduct | None = staticmethod(shared_linear)


class Linear(Multiplies, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Nothing: weights come from a checkpoint or from `init_weights`, never from torch's global generator."""


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and torch's product alone: what it computes may then be computed in other ways."""
    return type(layer) is Linear and layer.product is F.linear and layer.bias is None


def set_linear_product(model: nn.Module, product: LinearProduct, shared: SharedProduct | None = None) -> None:
    """Have every linear layer of `model` (and every joined one, see `packing`) multiply with `product`, in place.

    Args:
        model: a model, or a part of one.
        product: for one layer.
        shared: for layers without bias that read the same x: q, k, v; gate, up. None: each has its own product.
    """
    for module in model.modules():
        if isinstance(module, Multiplies):
            module.product = product
            module.shared_product = shared_linear if product is F.linear else shared
