"""Gradients of weights that wait: what a zero-bubble schedule fills its idle time with.

The backward pass of Y = X Wᵀ is two products, of which only dX = dY W is waited for by the stage before. The other,
dW = dYᵀ X, is put off here with its two factors until the schedule asks for it (Qi et al. 2023,
https://arxiv.org/abs/2401.10241). torch can also split a backward pass by searching its graph, but not through
functions with several outputs (torch 2.11 adds up their gradients), and then computes fused products twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Llama
from llama_core.linear import Linear, Multiplies
from llama_core.model import DecoderLayer


class DeferredProducts:
    """The products of one stage that are still to be made; in the order in which they are made they are summed."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Put off weight's gradient gradᵀ x; weight (out, in), a parameter or computed from one, rows (n, ·)."""
        self.waiting.append((weight, grad, x))

    def take(self) -> Callable[[], None]:
        """All that wait, as one piece of work for later."""
        taken, self.waiting = self.waiting, []

        def work() -> None:
            for weight, grad, x in taken:
                if weight.requires_grad:
                    torch.autograd.backward(weight, grad.mT @ x)  # on to the parameter, through what lies in between
            taken.clear()

        return work

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`, whose gradient for the weight is put off. Without one for x, there is nothing to do before it."""
        if not (torch.is_grad_enabled() and weight.requires_grad and x.requires_grad):
            return F.linear(x, weight, bias)
        out: Tensor = _Product.apply(x, weight.detach(), bias, Held(weight), self)
        return out


class Held:
    """A tensor that autograd does not see."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, held: Held, deferred: DeferredProducts
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held, ctx.deferred = held, deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        ctx.deferred.add(ctx.held.tensor, rows, x.flatten(0, -2))
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None


def defer_products(model: Llama) -> DeferredProducts:
    """Put off the gradients of all matrices in the decoder layers of `model`; norms, embedding and head do not wait.

    Raises:
        ValueError: layers that multiply in another way (llama_core.set_linear_product).
    """
    deferred = DeferredProducts()
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer):
            for module in layer.modules():
                if isinstance(module, Multiplies) and module.product is not F.linear:
                    raise ValueError("zero_bubble makes its own products: set_linear_product does not go with it")
                if isinstance(module, Linear):
                    module.product = deferred.product
                if hasattr(module, "deferred"):  # a tensor-parallel layer's column products
                    setattr(module, "deferred", deferred)  # noqa: B010 (mypy takes it for a submodule)
    return deferred
