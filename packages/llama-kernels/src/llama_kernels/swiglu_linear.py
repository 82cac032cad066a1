"""SwiGLU and the product that reads it, as one function of autograd: y = h · weightᵀ, h = silu(gate) · up.

The product's gradient needs h, which is as large as gate or up. h follows from them without a product, so it is not
kept: SwiGLU's backward kernel has gate and up in its registers, and writes h once more beside their gradients. One
more write of h in the backward pass, for a sixth less memory held between the passes of a layer of Llama's shape.

Shapes: T tokens, F feed-forward, E hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import runs_triton
from llama_kernels.swiglu import _swiglu, _swiglu_backward_again


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_swiglu(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dh = (dy @ weight).view(gate.shape)
        dgate, dup, h = _swiglu_backward_again(dh, gate, up)
        del dh  # as large as h: not to be held beside the next product
        return dgate, dup, dy.mT @ h.view(-1, h.shape[-1]) if ctx.needs_input_grad[2] else None


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) · weightᵀ; gate and up are kept for the backward pass, their product is made again there.

    Args:
        gate, up: (..., F), the same shape and dtype, any strides.
        weight: (E, F), of that dtype.

    Returns:
        (..., E) in their dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if gate.shape != up.shape or not gate.dtype == up.dtype == weight.dtype or not gate.dim():
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be alike, "
            f"and of the weight's dtype, {weight.dtype}"
        )
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(f"weight {tuple(weight.shape)} must be (E, F) for gate {tuple(gate.shape)}, (..., F)")
    if not runs_triton(gate):
        return F.linear(reference.swiglu(gate, up), weight)
    return through_kernels(gate, up, weight)


def through_kernels(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`swiglu_linear` on a GPU, or on fake tensors, of which it needs no more than shapes."""
    out: Tensor = _SwigluLinear.apply(gate, up, weight)
    return out
