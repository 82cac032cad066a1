"""One row of x times a weight in floats (16 or 32 bits, fp8), int8 or int4: the kernels of `fused_linear`.

Each program keeps x in registers and streams whole rows of the weight past it, the next ones already on their way. In
floats its first rows are loaded before x is there; for rounded weights that costs more registers than it gains.
Gated: output n is silu(row n) · (row n + N) of a weight with 2 N rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from llama_kernels.compat import tl, triton
from llama_kernels.dot4 import dot4, fixed_point, high_and_low_bytes
from llama_kernels.one_row import finish, inverse_rms, let_next_start, take_in, wait_for_previous


@triton.jit
def _float_rows(weight_ptr, n, k, rows, stride, K: tl.constexpr):
    inside = (n < rows)[:, None] & (k < K)[None, :]
    return tl.load(weight_ptr + n.to(tl.int64)[:, None] * stride + k[None, :], mask=inside, other=0.0)


@triton.jit
def _times_floats(weight, scale_ptr, x, n, rows, SCALED: tl.constexpr):
    y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if SCALED:
        y *= tl.load(scale_ptr + n, mask=n < rows, other=0.0)
    return y


@triton.jit
def float_row_kernel(
    x_ptr, weight_ptr, scale_ptr, norm_ptr, residual_ptr, y_ptr, outputs, stride, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weight (N or 2 N, K) in floats, where SCALED (fp8) times scale (N,)."""
    let_next_start(PDL)
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = _float_rows(weight_ptr, n, k, outputs, stride, K)
    weight_2 = weight
    if GATED:
        weight_2 = _float_rows(weight_ptr, n + outputs, k, 2 * outputs, stride, K)
    wait_for_previous(PDL)
    inverse = inverse_rms(x_ptr, eps, K, BLOCK_K, NORM)
    x = take_in(x_ptr, norm_ptr, k, k < K, inverse, NORM)
    y = _times_floats(weight, scale_ptr, x, n, outputs, SCALED)
    up = y
    if GATED:
        up = _times_floats(weight_2, scale_ptr, x, n + outputs, 2 * outputs, SCALED)
    finish(y, up, residual_ptr, y_ptr, n, outputs, GATED, ADD)
    step = tl.num_programs(0) * BLOCK_N
    for first in tl.range(tl.program_id(0) * BLOCK_N + step, outputs, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        y = _times_floats(_float_rows(weight_ptr, n, k, outputs, stride, K), scale_ptr, x, n, outputs, SCALED)
        up = y
        if GATED:
            m = n + outputs
            weight_2 = _float_rows(weight_ptr, m, k, 2 * outputs, stride, K)
            up = _times_floats(weight_2, scale_ptr, x, m, 2 * outputs, SCALED)
        finish(y, up, residual_ptr, y_ptr, n, outputs, GATED, ADD)


@triton.jit
def _words(word_ptr, n, at, real, rows, stride):
    """Words (rows, groups, words of a group); `at` their places in a row."""
    row = n.to(tl.int64)[:, None, None]
    return tl.load(word_ptr + row * stride + at, mask=(row < rows) & real, other=0)


@triton.jit
def _times_int8(word, scale_ptr, x_high, x_low, x_scale, n, rows, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
                ASM: tl.constexpr):  # fmt: skip
    high, low = tl.broadcast_to(x_high, word.shape), tl.broadcast_to(x_low, word.shape)
    total = dot4(word, low, 256 * dot4(word, high, tl.zeros_like(word), ASM), ASM)
    y = tl.sum(tl.reshape(total.to(tl.float32) * x_scale, (BLOCK_N, BLOCK_G * 32)), axis=1)
    return y * tl.load(scale_ptr + n, mask=n < rows, other=0.0)


@triton.jit
def int8_row_kernel(
    x_ptr, word_ptr, scale_ptr, norm_ptr, residual_ptr, y_ptr, outputs, stride, eps,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weight rows of int8 read as words of four bytes, x in fixed point (see `dot4`); K = 128 · GROUPS."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    g = tl.arange(0, BLOCK_G)[None, :, None]
    at, real = g * 32 + tl.arange(0, 32)[None, None, :], g < GROUPS
    inverse = inverse_rms(x_ptr, eps, GROUPS * 128, BLOCK_G * 128, NORM)
    # dense: a strided load spoils the layout
    x = take_in(x_ptr, norm_ptr, g * 128 + tl.arange(0, 128)[None, None, :], real, inverse, NORM)
    even, odd = tl.split(tl.reshape(x, (1, BLOCK_G, 32, 2, 2)))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    amax = tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1)), tl.maximum(tl.abs(x_2), tl.abs(x_3)))
    amax = tl.max(amax, axis=2, keep_dims=True)
    x_high, x_low = high_and_low_bytes(
        fixed_point(x_0, amax), fixed_point(x_1, amax), fixed_point(x_2, amax), fixed_point(x_3, amax)
    )
    strange = 0.0 * x_0 + 0.0 * x_1 + 0.0 * x_2 + 0.0 * x_3  # NaN or ∞ in x must show
    x_scale = amax * (1.0 / 32512.0) + tl.sum(strange, axis=2, keep_dims=True)
    step = tl.num_programs(0) * BLOCK_N
    for first in tl.range(tl.program_id(0) * BLOCK_N, outputs, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        word = _words(word_ptr, n, at, real, outputs, stride)
        y = _times_int8(word, scale_ptr, x_high, x_low, x_scale, n, outputs, BLOCK_N, BLOCK_G, ASM)
        up = y
        if GATED:
            m = n + outputs
            word = _words(word_ptr, m, at, real, 2 * outputs, stride)
            up = _times_int8(word, scale_ptr, x_high, x_low, x_scale, m, 2 * outputs, BLOCK_N, BLOCK_G, ASM)
        finish(y, up, residual_ptr, y_ptr, n, outputs, GATED, ADD)


@triton.jit
def _times_int4(word, scale_ptr, minimum_ptr, even_high, even_low, odd_high, odd_low, x_scale, x_sum, n, g, real, rows,
                GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    row = n.to(tl.int64)[:, None, None]
    inside = (row < rows) & real
    scale = tl.load(scale_ptr + row * GROUPS + g, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + row * GROUPS + g, mask=inside, other=0.0).to(tl.float32)
    even, odd = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F  # nibbles 0, 2, 4, 6 and 1, 3, 5, 7 as bytes
    total = dot4(even, tl.broadcast_to(even_high, word.shape), tl.zeros_like(word), ASM)
    total = 256 * dot4(odd, tl.broadcast_to(odd_high, word.shape), total, ASM)
    total = dot4(even, tl.broadcast_to(even_low, word.shape), total, ASM)
    total = dot4(odd, tl.broadcast_to(odd_low, word.shape), total, ASM)
    y = total.to(tl.float32) * (scale * x_scale) + minimum * x_sum
    return tl.sum(tl.reshape(y, (BLOCK_N, BLOCK_G * 16)), axis=1)


@triton.jit
def int4_row_kernel(
    x_ptr, word_ptr, scale_ptr, minimum_ptr, norm_ptr, residual_ptr, y_ptr, outputs, eps,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights of `quantize_int4` with x in fixed point (see `dot4`); K = 128 · GROUPS."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    g = tl.arange(0, BLOCK_G)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    at, real = g * 16 + j, g < GROUPS
    inverse = inverse_rms(x_ptr, eps, GROUPS * 128, BLOCK_G * 128, NORM)
    x_at = g * 128 + j
    x_0 = take_in(x_ptr, norm_ptr, x_at, real, inverse, NORM)
    x_1 = take_in(x_ptr, norm_ptr, x_at + 16, real, inverse, NORM)
    x_2 = take_in(x_ptr, norm_ptr, x_at + 32, real, inverse, NORM)
    x_3 = take_in(x_ptr, norm_ptr, x_at + 48, real, inverse, NORM)
    x_4 = take_in(x_ptr, norm_ptr, x_at + 64, real, inverse, NORM)
    x_5 = take_in(x_ptr, norm_ptr, x_at + 80, real, inverse, NORM)
    x_6 = take_in(x_ptr, norm_ptr, x_at + 96, real, inverse, NORM)
    x_7 = take_in(x_ptr, norm_ptr, x_at + 112, real, inverse, NORM)
    amax = tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1)), tl.maximum(tl.abs(x_2), tl.abs(x_3)))
    amax = tl.maximum(amax, tl.maximum(tl.maximum(tl.abs(x_4), tl.abs(x_5)), tl.maximum(tl.abs(x_6), tl.abs(x_7))))
    amax = tl.max(amax, axis=2, keep_dims=True)
    even_high, even_low = high_and_low_bytes(
        fixed_point(x_0, amax), fixed_point(x_2, amax), fixed_point(x_4, amax), fixed_point(x_6, amax)
    )
    odd_high, odd_low = high_and_low_bytes(
        fixed_point(x_1, amax), fixed_point(x_3, amax), fixed_point(x_5, amax), fixed_point(x_7, amax)
    )
    x_sum = ((x_0 + x_1) + (x_2 + x_3)) + ((x_4 + x_5) + (x_6 + x_7))  # carries NaN too
    x_scale = amax * (1.0 / 32512.0)
    step = tl.num_programs(0) * BLOCK_N
    for first in tl.range(tl.program_id(0) * BLOCK_N, outputs, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        word = _words(word_ptr, n, at, real, outputs, GROUPS * 16)
        y = _times_int4(word, scale_ptr, minimum_ptr, even_high, even_low, odd_high, odd_low, x_scale, x_sum, n, g,
                        real, outputs, GROUPS, BLOCK_N, BLOCK_G, ASM)  # fmt: skip
        up = y
        if GATED:
            m = n + outputs
            word = _words(word_ptr, m, at, real, 2 * outputs, GROUPS * 16)
            up = _times_int4(word, scale_ptr, minimum_ptr, even_high, even_low, odd_high, odd_low, x_scale, x_sum, m, g,
                             real, 2 * outputs, GROUPS, BLOCK_N, BLOCK_G, ASM)  # fmt: skip
        finish(y, up, residual_ptr, y_ptr, n, outputs, GATED, ADD)
