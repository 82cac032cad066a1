"""The linear layers, and the one place where their matrix product can be exchanged: for another library's, or another
precision's, from outside and for one model."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x (..., in), weight (out, in), bias (out,) or None → x weightᵀ + bias, (..., out)."""


class Multiplies:
    """Anything that multiplies by weights."""

    product: LinearProduct = staticmethod(F.linear)


class Linear(Multiplies, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Nothing: weights come from a checkpoint or from `init_weights`, never from torch's global generator."""


def set_linear_product(model: nn.Module, product: LinearProduct) -> None:
    """Have every linear layer of `model` (and every joined one, see `packing`) multiply with `product`, in place."""
    for module in model.modules():
        if isinstance(module, Multiplies):
            module.product = product
