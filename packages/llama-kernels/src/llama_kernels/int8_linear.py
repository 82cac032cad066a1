"""Weight-only int8 linear layer for decoding: w[n, k] ≈ scale[n] · q[n, k], q in −127 … 127. Kernels: `byte_linear`."""

import torch
from torch import Tensor

from llama_kernels.byte_linear import byte_linear, check


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (N, K) to int8, one scale per output row.

    Returns:
        (q (N, K) int8, scale (N,) float32); |w − scale · q| ≤ scale / 2, scale = max|w| / 127 of the row.
    """
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp(min=1e-30) / 127
    return (wide / scale.unsqueeze(1)).round_().to(torch.int8), scale


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x · (scale · weight)ᵀ for inference (no gradient).

    Args:
        x: (..., K).
        weight: (N, K) int8, from `quantize_int8`.
        scale: (N,) float32.

    Returns:
        (..., N) in x's dtype; products are summed in float32.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check(x, weight, scale, torch.int8)
    y: Tensor = byte_linear(x.reshape(-1, x.shape[-1]), weight, scale)
    return y.view(*x.shape[:-1], weight.shape[0])
