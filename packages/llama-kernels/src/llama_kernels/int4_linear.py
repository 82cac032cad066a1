"""Weight-only int4 linear layer for decoding, a scale and a minimum for each group of 128 inputs:

    w[n, k] ≈ scale[n, g] · q[n, k] + minimum[n, g],  q in 0 … 15,  g = k // 128

    y[n] = Σ_g scale[n, g] · Σ_{k in g} q[n, k] · x[k] + minimum[n, g] · Σ_{k in g} x[k]

Packing: a group is 16 words of 32 bits, and nibble i of word j holds input 16 i + j: dense stretches of x meet dense
words, and nothing is shuffled. One row of x goes through integer dot products, up to 64 through the matrix unit, for
which a nibble becomes a float without a conversion: put into the top bits of the mantissa of 1.0 it reads 1 + q/16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.byte_linear import MAX_ROWS, dot_dtype
from llama_kernels.compat import cdiv, device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.operators import operator
from llama_kernels.row_launch import launch_row

GROUP = 128


@triton.jit
def _one_plus_sixteenths(word, NIBBLE: tl.constexpr):
    """1 + q/16 as float32, q the given nibble of each word: its bits moved to 19 … 22."""
    if NIBBLE < 5:
        moved = word << (19 - 4 * NIBBLE)
    else:
        moved = word >> (4 * NIBBLE - 19)
    return ((moved & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _few_rows_kernel(
    x_ptr, q_ptr, scale_ptr, minimum_ptr, y_ptr, rows, outputs, x_stride,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_G * 16)  # word c % 16 of group c // 16
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, GROUPS, BLOCK_G):
        group = start + c // 16
        inside = (group < GROUPS)[:, None] & (n < outputs)[None, :]
        group_at = n[None, :].to(tl.int64) * GROUPS + group[:, None]
        word = tl.load(q_ptr + group_at * 16 + (c % 16)[:, None], mask=inside, other=0)
        scale = tl.load(scale_ptr + group_at, mask=inside, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + group_at, mask=inside, other=0.0).to(tl.float32)
        x_at = x_ptr + m[:, None].to(tl.int64) * x_stride + (group * 128 + c % 16)[None, :]
        for i in tl.static_range(8):
            x = tl.load(x_at + 16 * i, mask=(m < rows)[:, None] & (group < GROUPS)[None, :], other=0.0)
            weight = (_one_plus_sixteenths(word, i) - 1.0) * (16.0 * scale) + minimum
            total = tl.dot(x.to(DOT), weight.to(DOT), total, input_precision="ieee")
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _unpack_kernel(q_ptr, scale_ptr, minimum_ptr, weight_ptr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """A stretch of one row of the weight as floats."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    j = tl.arange(0, 16)[None, :]
    inside = (g < GROUPS)[:, None]
    word = tl.load(q_ptr + (row * GROUPS + g)[:, None] * 16 + j, mask=inside, other=0)
    scale = tl.load(scale_ptr + row * GROUPS + g, mask=g < GROUPS, other=0.0).to(tl.float32)[:, None]
    minimum = tl.load(minimum_ptr + row * GROUPS + g, mask=g < GROUPS, other=0.0).to(tl.float32)[:, None]
    for i in tl.static_range(8):
        weight = (_one_plus_sixteenths(word, i) - 1.0) * (16.0 * scale) + minimum
        at = weight_ptr + (row * GROUPS + g)[:, None] * 128 + 16 * i + j
        tl.store(at, weight.to(weight_ptr.dtype.element_ty), mask=inside)


def _unpacked(x: Tensor, packed: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The weight (N, K) in x's dtype."""
    if not runs_triton(x):
        return reference.int4_weight(packed, scale, minimum).to(x.dtype)
    outputs, groups = packed.shape[:2]
    weight = x.new_empty(outputs, groups * GROUP)
    if weight.numel():
        with device_guard(x):
            _unpack_kernel[(outputs, cdiv(groups, 32))](
                packed, scale, minimum, weight, GROUPS=groups, BLOCK_G=32, num_warps=4
            )
    return weight


@operator("llama_kernels::int4_linear")
def _int4_linear(x: Tensor, packed: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    rows, outputs, groups = x.shape[0], packed.shape[0], packed.shape[1]
    if not runs_triton(x) or rows > MAX_ROWS:
        return x @ _unpacked(x, packed, scale, minimum).T
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows == 1 and x.dtype != torch.float32:  # whose bits fixed point would cut
        return launch_row(x, packed, scale, minimum)
    y = x.new_empty(rows, outputs)
    if not y.numel():
        return y
    with device_guard(x):
        block_m, block_n = max(16, next_power_of_2(rows)), 32 if outputs >= 8192 else 16
        _few_rows_kernel[(cdiv(outputs, block_n),)](
            x, packed, scale, minimum, y, rows, outputs, x.stride(0), GROUPS=groups, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_G=4, DOT=dot_dtype(x), num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


@_int4_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight (N, K), K divisible by 128, to 4 bits with a scale and a minimum per group of 128 inputs.

    Returns:
        packed (N, K / 128, 16) int32, scale and minimum (N, K / 128) in the weight's dtype. The error is at most half
        a scale, (max − min) / 30 of the group, plus the rounding of scale and minimum themselves.

    Raises:
        ValueError: K is not divisible by 128.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"weight {tuple(weight.shape)} must be (N, K) with K divisible by {GROUP}")
    grouped = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2), grouped.amax(2)
    # Rounded first, so that q is the best choice for the scale and minimum that will be used.
    minimum = low.to(weight.dtype)
    scale = ((high - low) / 15).clamp(min=1e-30 if weight.dtype != torch.float16 else 6e-8).to(weight.dtype)
    q = (grouped - minimum.float().unsqueeze(2)) / scale.float().unsqueeze(2)
    nibbles = q.round_().clamp_(0, 15).to(torch.int64).unflatten(2, (8, 16))
    shifts = torch.arange(0, 32, 4, device=weight.device).view(8, 1)
    words = (nibbles << shifts).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), scale, minimum


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """x times a weight of `quantize_int4`, for inference (no gradient).

    Args:
        x: (..., K).
        packed: (N, K / 128, 16) int32.
        scale, minimum: (N, K / 128).

    Returns:
        (..., N) in x's dtype; products are summed in float32.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if packed.dim() != 3 or packed.shape[2] != 16 or packed.dtype != torch.int32 or not packed.is_contiguous():
        raise ValueError(f"packed {tuple(packed.shape)} {packed.dtype} must be (N, K / 128, 16) int32, contiguous")
    if x.dim() < 1 or x.shape[-1] != packed.shape[1] * GROUP:
        raise ValueError(f"x {tuple(x.shape)} must have a last dimension of {packed.shape[1] * GROUP}")
    if scale.shape != packed.shape[:2] or minimum.shape != packed.shape[:2] or scale.dtype != minimum.dtype:
        raise ValueError(
            f"scale {tuple(scale.shape)}, minimum {tuple(minimum.shape)} must be {tuple(packed.shape[:2])}"
        )
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _int4_linear(rows, packed, scale.contiguous(), minimum.contiguous())
    return y.view(*x.shape[:-1], packed.shape[0])
