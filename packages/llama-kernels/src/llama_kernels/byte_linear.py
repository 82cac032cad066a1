"""Linear layer over weights of one byte (int8, or fp8 e4m3) with one scale per output: the kernels of two operations.

    y[n] = scale[n] · Σ_k x[k] · q[n, k]

Decoding reads every weight once per step, so half the bytes is half the time. One row of x: each program owns a few
outputs and streams their weights past x. Up to 64 rows: tiles through the matrix unit, weights
converted on the way. More rows are bound by arithmetic: weights are converted once and torch's product does the rest.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import cdiv, device_guard, multiprocessors, next_power_of_2, runs_triton, tl, triton
from llama_kernels.dot4 import dot4, fixed_point, has_dp4a, high_and_low_bytes, load_x

MAX_ROWS = 64  # beyond it the product with converted weights is faster


@triton.jit
def _one_row_kernel(
    x_ptr, q_ptr, scale_ptr, y_ptr, outputs, q_stride,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x stays in registers; whole rows of weights stream past, the next ones already on their way."""
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    step = tl.num_programs(0) * BLOCK_N
    for first in tl.range(tl.program_id(0) * BLOCK_N, outputs, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        inside = (n < outputs)[:, None] & (k < K)[None, :]
        q = tl.load(q_ptr + n[:, None].to(tl.int64) * q_stride + k[None, :], mask=inside, other=0.0)
        y = tl.sum(q.to(tl.float32) * x, axis=1) * tl.load(scale_ptr + n, mask=n < outputs, other=0.0)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < outputs)


@triton.jit
def _one_row_int8_kernel(
    x_ptr, q_ptr, scale_ptr, y_ptr, outputs, q_stride,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same for int8 read as words of four bytes, x in fixed point (see `dot4`)."""
    g = tl.arange(0, BLOCK_G)[None, :, None]
    j = tl.arange(0, 32)[None, None, :]
    real = g < GROUPS
    x = load_x(x_ptr + g * 128 + tl.arange(0, 128)[None, None, :], real)  # dense: a strided load spoils the layout
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
        rows = n.to(tl.int64)[:, None, None]
        word = tl.load(q_ptr + rows * q_stride + g * 32 + j, mask=(rows < outputs) & real, other=0)
        x_high_rows, x_low_rows = tl.broadcast_to(x_high, word.shape), tl.broadcast_to(x_low, word.shape)
        total = dot4(word, x_low_rows, 256 * dot4(word, x_high_rows, tl.zeros_like(word), ASM), ASM)
        y = tl.sum(tl.reshape(total.to(tl.float32) * x_scale, (BLOCK_N, BLOCK_G * 32)), axis=1)
        y *= tl.load(scale_ptr + n, mask=n < outputs, other=0.0)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < outputs)


@triton.jit
def _few_rows_kernel(
    x_ptr, q_ptr, scale_ptr, y_ptr, rows, outputs, x_stride, q_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptr += m[:, None].to(tl.int64) * x_stride + k[None, :]
    q_ptr += n[None, :].to(tl.int64) * q_stride + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start, mask=(m < rows)[:, None] & (start + k < K)[None, :], other=0.0)
        q = tl.load(q_ptr + start, mask=(start + k < K)[:, None] & (n < outputs)[None, :], other=0.0)
        # Every int8 and every e4m3 value is exact in bfloat16; float32 x keeps its bits ("ieee", no tf32).
        total = tl.dot(x.to(DOT), q.to(tl.float32).to(DOT), total, input_precision="ieee")
    y = total * tl.load(scale_ptr + n, mask=n < outputs, other=0.0)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


def dot_dtype(x: Tensor):
    """The dtype to hand to `tl.dot`: x's own, but float32 in the interpreter, which has no bfloat16 arithmetic."""
    return (
        {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32) if x.is_cuda else tl.float32
    )


def _reads(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether Triton reads this format on x's GPU: e4m3 from compute capability 8.9 on."""
    return dtype == torch.int8 or not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9)


def _in_words(weight: Tensor) -> bool:
    """Whether rows of bytes can be read as rows of aligned 32-bit words."""
    return not (weight.stride(0) % 4 or weight.storage_offset() % 4)


@torch.library.custom_op("llama_kernels::byte_linear", mutates_args=())
def byte_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times weight (N, K) int8 or float8_e4m3fn, scale (N,) float32; (M, N) in x's dtype."""
    (rows, width), outputs = x.shape, weight.shape[0]
    if not runs_triton(x):
        return reference.byte_linear(x, weight, scale)
    if rows > MAX_ROWS or not _reads(x, weight.dtype):
        return ((x @ weight.to(x.dtype).T) * scale).to(x.dtype)
    y = x.new_empty(rows, outputs)
    if not y.numel():
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    with device_guard(x):
        if rows == 1:
            block = next_power_of_2(width)
            wide = block > 8192  # measured at K = 4096 and 14,336
            block_n, warps = (2, min(block // 2048, 16)) if wide else (4, min(max(block // 1024, 1), 4))
            programs = min(cdiv(outputs, block_n), (2 if wide else 4) * multiprocessors(x))
            if weight.dtype == torch.int8 and x.dtype != torch.float32 and width % 128 == 0 and _in_words(weight):
                words = weight.view(torch.int32)
                _one_row_int8_kernel[(programs,)](
                    x, words, scale, y, outputs, words.stride(0), GROUPS=width // 128, BLOCK_N=block_n,
                    BLOCK_G=block // 128, STAGES=3, ASM=has_dp4a(x), num_warps=warps,
                )  # fmt: skip
            else:
                _one_row_kernel[(programs,)](
                    x, weight, scale, y, outputs, weight.stride(0), K=width, BLOCK_N=block_n, BLOCK_K=block,
                    STAGES=3, num_warps=warps,
                )  # fmt: skip
        else:
            block_m, block_n = max(16, next_power_of_2(rows)), 32 if outputs >= 8192 else 16
            _few_rows_kernel[(cdiv(outputs, block_n),)](
                x, weight, scale, y, rows, outputs, x.stride(0), weight.stride(0), K=width, BLOCK_M=block_m,
                BLOCK_N=block_n, BLOCK_K=128, DOT=dot_dtype(x), num_warps=4, num_stages=4,
            )  # fmt: skip
    return y


@byte_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def check(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """ValueError unless x (..., K), weight (N, K) of `dtype` with dense rows, scale (N,) float32."""
    if weight.dim() != 2 or weight.dtype != dtype or weight.stride(1) != 1:
        raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} must be (N, K) {dtype} with dense rows")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be (..., K) and (N, K)")
    if scale.shape != weight.shape[:1] or scale.dtype != torch.float32:
        raise ValueError(f"scale {tuple(scale.shape)} {scale.dtype} must be ({weight.shape[0]},) float32")
