"""Weight-only fp8 (e4m3) linear layer for decoding: w[n, k] ≈ scale[n] · q[n, k]. Kernels: `byte_linear`."""

import torch
from torch import Tensor

from llama_kernels.byte_linear import byte_linear, check

E4M3_MAX = 448.0  # largest finite value (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, table 1)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (N, K) to float8_e4m3fn, one scale per output row.

    Returns:
        (q (N, K) float8_e4m3fn, scale (N,) float32); |w − scale · q| ≤ 2⁻⁴ |w| for all but tiny entries.
    """
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp(min=1e-30) / E4M3_MAX
    return (wide / scale.unsqueeze(1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x · (scale · weight)ᵀ for inference (no gradient).

    Args:
        x: (..., K).
        weight: (N, K) float8_e4m3fn, from `quantize_fp8`.
        scale: (N,) float32.

    Returns:
        (..., N) in x's dtype; products are summed in float32.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check(x, weight, scale, torch.float8_e4m3fn)
    y: Tensor = byte_linear(x.reshape(-1, x.shape[-1]), weight, scale)
    return y.view(*x.shape[:-1], weight.shape[0])
