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
from llama_kernels.compat import cdiv, device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.operators import operator
from llama_kernels.row_launch import MAX_WIDTH, launch_row

MAX_ROWS = 64  # beyond it the product with converted weights is faster


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


@operator("llama_kernels::byte_linear")
def byte_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times weight (N, K) int8 or float8_e4m3fn, scale (N,) float32; (M, N) in x's dtype."""
    (rows, width), outputs = x.shape, weight.shape[0]
    if not runs_triton(x):
        return reference.byte_linear(x, weight, scale)
    if rows > MAX_ROWS or not _reads(x, weight.dtype):
        return ((x @ weight.to(x.dtype).T) * scale).to(x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows == 1 and width <= MAX_WIDTH:
        return launch_row(x, weight, scale)
    y = x.new_empty(rows, outputs)
    if not y.numel():
        return y
    with device_guard(x):
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
