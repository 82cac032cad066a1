"""Linear layer in fp8 for training: y = x · weightᵀ with both factors rounded to 8 bits, and so its two gradients.

Formats as in Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433): e4m3 for x and weight, e5m2 for the incoming
gradient, each tensor with one scale from its own largest magnitude, taken anew every time (no history to restore):

    q = round(x · F / amax),  F = 448 or 57,344          y = (qx · qwᵀ) · (amax_x / F) · (amax_w / F)

The products are torch's `_scaled_mm` (cuBLAS), which on Hopper wants both factors dense along the summed dimension.
The three products sum over different dimensions, so the cast writes each tensor twice in one pass, as it lies and
transposed. Backward keeps only transposed fp8 copies: half the memory of saved bfloat16 activations.

Shapes: M tokens, K inputs, N outputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_kernels.compat import HAS_TRITON, cdiv, device_guard, multiprocessors, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # finite (table 1)


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, count, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    high = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        x = tl.load(x_ptr + start + offset, mask=start + offset < count, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.abs(x))
    tl.atomic_max(amax_ptr, tl.max(high, axis=0))


@triton.jit
def _cast_kernel(
    x_ptr, amax_ptr, scale_ptr, q_ptr, qt_ptr, rows, columns, padded_rows, largest,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    amax = tl.maximum(tl.load(amax_ptr), 1e-30)  # an all-zero tensor has any scale
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, amax / largest)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    q = x * (largest / amax)
    q = tl.where(q > largest, largest, tl.where(q < -largest, -largest, q)).to(q_ptr.dtype.element_ty)  # NaN stays
    tl.store(q_ptr + row[:, None] * columns + column[None, :], q, mask=inside)
    if qt_ptr is not None:  # rows beyond x are zeros: the product over rows wants a multiple of 16
        inside_t = (column < columns)[:, None] & (row < padded_rows)[None, :]
        tl.store(qt_ptr + column[:, None] * padded_rows + row[None, :], tl.trans(q), mask=inside_t)


def _quantize(x: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(q (R, C), qᵀ (C, R padded to 16) or empty, scale () float32) with x ≈ q · scale."""
    x = x.contiguous()
    (rows, columns), largest = x.shape, LARGEST[dtype]
    padded = cdiv(rows, 16) * 16
    if not x.is_cuda or not HAS_TRITON:
        amax = x.abs().amax().float().clamp(min=1e-30) if x.numel() else x.new_ones((), dtype=torch.float32)
        q = (x.float() * (largest / amax)).clamp(-largest, largest).to(dtype)
        qt = F.pad(q.float(), (0, 0, 0, padded - rows)).T.contiguous().to(dtype) if transposed else q.new_empty(0)
        return q, qt, amax / largest
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    qt = torch.empty((columns, padded) if transposed else (0,), dtype=dtype, device=x.device)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    scale = torch.ones_like(amax)
    if x.numel():
        with device_guard(x):
            programs = min(cdiv(x.numel(), 8192), 8 * multiprocessors(x))
            _amax_kernel[(programs,)](x, amax, x.numel(), BLOCK=8192, num_warps=8)
            _cast_kernel[(cdiv(padded, 64), cdiv(columns, 128))](
                x, amax, scale, q, qt if transposed else None, rows, columns, padded, largest,
                BLOCK_R=64, BLOCK_C=128, num_warps=4,
            )  # fmt: skip
    return q, qt, scale


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a (R, S) · bᵀ with b (C, S). `fast` is Hopper's short accumulator: not for gradients."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
    return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)


@torch.library.custom_op("llama_kernels::fp8_matmul", mutates_args=())
def _fp8_matmul(x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    qx, qxt, x_scale = _quantize(x, E4M3, keep)
    qw, qwt, w_scale = _quantize(weight, E4M3, keep)
    y = _product(qx, x_scale, qw, w_scale, x.dtype, fast=True) if len(x) else x.new_empty(0, len(weight))
    return y, qxt, x_scale, qwt, w_scale


@_fp8_matmul.register_fake
def _(x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    scale = x.new_empty((), dtype=torch.float32)
    return (
        x.new_empty(rows, outputs),
        x.new_empty((inputs, (rows + 15) // 16 * 16) if keep else (0,), dtype=E4M3),
        scale,
        weight.new_empty((inputs, outputs) if keep else (0,), dtype=E4M3),
        torch.empty_like(scale),
    )


@torch.library.custom_op("llama_kernels::fp8_matmul_backward", mutates_args=())
def _fp8_matmul_backward(
    dy: Tensor, qxt: Tensor, x_scale: Tensor, qwt: Tensor, w_scale: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not len(dy):
        return dy.new_empty(0, len(qwt)), dy.new_zeros(dy.shape[1], len(qwt), dtype=weight_dtype)
    q, qt, scale = _quantize(dy, E5M2, transposed=True)
    dx = _product(q, scale, qwt, w_scale, dy.dtype, fast=False)
    return dx, _product(qt, scale, qxt, x_scale, weight_dtype, fast=False)


@_fp8_matmul_backward.register_fake
def _(
    dy: Tensor, qxt: Tensor, x_scale: Tensor, qwt: Tensor, w_scale: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    inputs = qwt.shape[0]
    return dy.new_empty(dy.shape[0], inputs), dy.new_empty(dy.shape[1], inputs, dtype=weight_dtype)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _backward(ctx, dy, *_unused):
    if dy is None:
        return None, None, None
    return *_fp8_matmul_backward(dy, *ctx.saved_tensors, ctx.weight_dtype), None


_fp8_matmul.register_autograd(_backward, setup_context=_save)


def fp8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in fp8, forward and backward, with scales taken from the tensors themselves.

    Args:
        x: (..., K), bfloat16 or float16 on a GPU of compute capability 8.9 and more; the CPU rounds the same way and
            multiplies in float32.
        weight: (N, K); K and N divisible by 16.

    Returns:
        (..., N) in x's dtype. Rounding alone costs about 2⁻⁵ of a product's norm for e4m3, 2⁻⁴ for e5m2.

    Raises:
        ValueError: shapes that do not fit or are not divisible by 16, or a GPU without fp8.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be (..., K) and (N, K)")
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise ValueError(f"weight {tuple(weight.shape)}: fp8 products want both dimensions divisible by 16")
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError(f"fp8 wants compute capability 8.9, this GPU has {torch.cuda.get_device_capability(x.device)}")
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    y: Tensor = _fp8_matmul(x.reshape(-1, x.shape[-1]), weight, keep)[0]
    return y.view(*x.shape[:-1], weight.shape[0])
