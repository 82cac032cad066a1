"""A linear layer with what stands before and behind it in a decoder layer, for decoding one sequence:

    y = W · rms_norm(x)        q, k, v
    y = W · x + residual       output and down projections
    y = silu(W₁ · rms_norm(x)) · (W₂ · rms_norm(x))        gate and up

At batch 1 the norms, SwiGLU and sums of a layer are each a launch that moves a few kilobytes; here they cost nothing.
The weight is in floats, or rounded by `quantize_int8`, `quantize_fp8` or `quantize_int4`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_kernels.compat import runs_triton
from llama_kernels.fp8_linear import fp8_linear
from llama_kernels.int4_linear import int4_linear
from llama_kernels.int8_linear import int8_linear
from llama_kernels.operators import operator
from llama_kernels.rms_norm import rms_norm
from llama_kernels.row_launch import MAX_WIDTH, launch_row
from llama_kernels.swiglu import swiglu


@operator("llama_kernels::fused_row")
def fused_row(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """`fused_linear` for x (1, K), on checked arguments that Triton can run."""
    return launch_row(x, weight, scale, minimum, norm_weight, eps, gated, residual)


@fused_row.register_fake
def _(x, weight, scale, minimum, norm_weight, eps, gated, residual):  # type: ignore[no-untyped-def]
    return x.new_empty(1, weight.shape[0] // 2 if gated else weight.shape[0])


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
    if scale is None:
        return F.linear(x, weight)
    if minimum is not None:
        return int4_linear(x, weight, scale, minimum)
    return int8_linear(x, weight, scale) if weight.dtype == torch.int8 else fp8_linear(x, weight, scale)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    minimum: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x times a weight, with a norm before and SwiGLU or a sum behind; for inference (no gradient).

    One row on a GPU is one launch; more rows, and rows elsewhere, are the separate operations of this package.

    Args:
        x: (..., K).
        weight: (N, K) in x's dtype; with `scale` (N,) float32 int8 or fp8 e4m3; with `scale` and `minimum` the packed
            (N, K / 128, 16) int32 of `quantize_int4`.
        norm_weight, eps: (K,), of an RMS norm of x (Zhang & Sennrich 2019).
        gated: the weight has 2 N rows, gates and then ups: silu(gate) · up (Shazeer 2020, eq. 6).
        residual: (..., N) in x's dtype, added.

    Returns:
        (..., N) in x's dtype. In the one launch, what comes after the product is computed in float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    groups_fit = minimum is None or (weight.dim() == 3 and weight.shape[2] == 16 and weight.dtype == torch.int32)
    width = weight.shape[1] * 128 if minimum is not None else weight.shape[-1]
    if x.dim() < 1 or weight.dim() not in (2, 3) or not groups_fit or x.shape[-1] != width:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be (..., K) and (N, K)")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"a gated weight must have an even number of rows, got {weight.shape[0]}")
    if norm_weight is not None and norm_weight.shape != (width,):
        raise ValueError(f"norm_weight {tuple(norm_weight.shape)} must be ({width},)")
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None and (residual.shape != (*x.shape[:-1], outputs) or residual.dtype != x.dtype):
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} must be {(*x.shape[:-1], outputs)} {x.dtype}"
        )
    if scale is None and weight.dtype != x.dtype:
        raise ValueError(f"weight {weight.dtype} must have x's dtype {x.dtype}, or a scale")
    if x.numel() == width and width and runs_triton(x) and _fits(x, weight, scale, minimum):
        row = None if residual is None else residual.reshape(1, outputs).contiguous()
        y: Tensor = fused_row(x.reshape(1, width).contiguous(), weight, scale, minimum, norm_weight, eps, gated, row)
        return y.view(*x.shape[:-1], outputs)
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    y = _product(normed, weight, scale, minimum)
    if gated:
        y = swiglu(*y.chunk(2, dim=-1))
    return y if residual is None else y + residual


def _fits(x: Tensor, weight: Tensor, scale: Tensor | None, minimum: Tensor | None) -> bool:
    """Whether the one launch serves this weight; what it doesn't, the separate operations serve or refuse."""
    if minimum is not None:  # float32 x keeps its bits
        assert scale is not None
        return weight.is_contiguous() and scale.is_contiguous() and minimum.is_contiguous() and x.dtype != torch.float32
    if weight.stride(-1) != 1 or weight.shape[-1] > MAX_WIDTH:
        return False
    if scale is None:
        return True
    readable = not x.is_cuda or weight.dtype == torch.int8 or torch.cuda.get_device_capability(x.device) >= (8, 9)
    return readable and weight.dtype in (torch.int8, torch.float8_e4m3fn) and scale.dtype == torch.float32
