"""Linear layers in fp8 for training: yᵢ = x · weightᵢᵀ with all factors rounded to 8 bits, and so their gradients.

Formats as in Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433): e4m3 for x and weights, e5m2 for incoming
gradients, each tensor with one scale from its own largest magnitude, taken anew every time (no history to restore):

    q = round(x · F / amax),  F = 448 or 57,344          y = (qx · qwᵀ) · (amax_x / F) · (amax_w / F)

The products are torch's `_scaled_mm` (cuBLAS), which on Hopper wants both factors dense along the summed dimension.
The three products sum over different dimensions, so the cast writes each tensor twice in one pass, as it lies and
transposed. Backward keeps only transposed fp8 copies: half the memory of saved bfloat16 activations.

Layers that read the same x (q, k, v; gate, up) share its cast. Their weights are rounded into one matrix with one
scale, and their gradients into another, so that the gradient for x is a single product. On a CPU the same rounding is
done by torch, and the products are float32's.

Shapes: M tokens, K inputs, N outputs of a weight, ΣN of all of them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    x_ptr, amax_ptr, scale_ptr, q_ptr, qt_ptr, rows, columns, padded_rows, q_stride, qt_stride, largest,
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
    tl.store(q_ptr + row[:, None] * q_stride + column[None, :], q, mask=inside)
    if qt_ptr is not None:  # rows beyond x are zeros: the product over rows wants a multiple of 16
        inside_t = (column < columns)[:, None] & (row < padded_rows)[None, :]
        tl.store(qt_ptr + column[:, None] * qt_stride + row[None, :], tl.trans(q), mask=inside_t)


def _cast_into(x: Tensor, amax: Tensor, scale: Tensor, q: Tensor, qt: Tensor | None, largest: float) -> None:
    """q (R, C) ≈ x / scale and qt (C, at least R) its transpose, zeros beyond; both may be parts of larger matrices."""
    rows, columns = x.shape
    if not x.is_cuda or not HAS_TRITON:
        torch.div(amax.clamp(min=1e-30), largest, out=scale)
        q.copy_((x.float() * (largest / amax.clamp(min=1e-30))).clamp(-largest, largest).to(q.dtype))
        if qt is not None:
            qt.copy_(F.pad(q.float(), (0, 0, 0, qt.shape[1] - rows)).T.to(q.dtype))
        return
    padded = rows if qt is None else qt.shape[1]
    with device_guard(x):
        _cast_kernel[(cdiv(padded, 64), cdiv(columns, 128))](
            x, amax, scale, q, qt, rows, columns, padded, q.stride(0), 0 if qt is None else qt.stride(0), largest,
            BLOCK_R=64, BLOCK_C=128, num_warps=4,
        )  # fmt: skip


def _amax(parts: Sequence[Tensor]) -> Tensor:
    amax = torch.zeros((), dtype=torch.float32, device=parts[0].device)
    for x in parts:
        if x.numel() and x.is_cuda and HAS_TRITON:
            with device_guard(x):
                programs = min(cdiv(x.numel(), 8192), 8 * multiprocessors(x))
                _amax_kernel[(programs,)](x, amax, x.numel(), BLOCK=8192, num_warps=8)
        elif x.numel():
            amax = torch.maximum(amax, x.abs().amax().float())
    return amax


@torch.library.custom_op("llama_kernels::fp8_cast", mutates_args=())
def _cast(parts: list[Tensor], e5m2: bool, transposed: bool, by_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    parts, dtype = [x.contiguous() for x in parts], E5M2 if e5m2 else E4M3
    q, qt, scale = _cast_results(parts, e5m2, transposed, by_rows)
    amax, start = _amax(parts), 0
    for x in parts:
        here = slice(start, start + x.shape[0 if by_rows else 1])
        start = here.stop
        if x.numel():
            qt_part = None if not transposed else qt[:, here] if by_rows else qt[here]
            _cast_into(x, amax, scale, q[here] if by_rows else q[:, here], qt_part, LARGEST[dtype])
    return q, qt, scale


@_cast.register_fake
def _cast_results(parts: list[Tensor], e5m2: bool, transposed: bool, by_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = E5M2 if e5m2 else E4M3
    rows = sum(x.shape[0] for x in parts) if by_rows else parts[0].shape[0]
    columns = parts[0].shape[1] if by_rows else sum(x.shape[1] for x in parts)
    padded = (rows + 15) // 16 * 16  # the product over rows wants a multiple of 16
    q = parts[0].new_empty(rows, columns, dtype=dtype)
    qt = parts[0].new_empty((columns, padded) if transposed else (0,), dtype=dtype)
    return q, qt, parts[0].new_ones((), dtype=torch.float32)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a (R, S) · bᵀ with b (C, S). `fast` is Hopper's short accumulator: not for gradients."""
    if not a.numel():
        return b.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
    if a.is_cuda:
        return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
    return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)


@dataclass(frozen=True)
class Fp8Weights:
    """Weights of layers that read the same x, rounded."""

    q: Tensor
    """(ΣN, K)."""
    qt: Tensor
    """(K, ΣN), or empty: for the gradient of x."""
    scale: Tensor
    """Float32 scalar: weights ≈ q · scale."""


def round_fp8(weights: Sequence[Tensor], transposed: bool = True) -> Fp8Weights:
    """Round weights (Nᵢ, K) to e4m3 with one scale, for `fp8_matmuls`; no gradient passes.

    Raises:
        ValueError: shapes that do not fit or are not divisible by 16.
    """
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != weights[0].shape[1]:
            raise ValueError(f"weights {[tuple(w.shape) for w in weights]} must be (N, K), of one K")
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            raise ValueError(f"weight {tuple(weight.shape)}: fp8 products want both dimensions divisible by 16")
    with torch.no_grad():
        return Fp8Weights(*_cast(list(weights), False, transposed, True))


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keep: bool, x: Tensor, qw: Tensor, qwt: Tensor, w_scale: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        qx, qxt, x_scale = _cast([x], False, keep, False)
        ctx.sizes, ctx.dtypes = [len(w) for w in weights], [w.dtype for w in weights]
        ctx.save_for_backward(qxt, x_scale, qwt, w_scale)
        return tuple(_product(qx, x_scale, part, w_scale, x.dtype, fast=True) for part in qw.split(ctx.sizes))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        qxt, x_scale, qwt, w_scale = ctx.saved_tensors
        q, qt, scale = _cast(list(dys), True, True, False)
        dx = _product(q, scale, qwt, w_scale, dys[0].dtype, fast=False) if ctx.needs_input_grad[1] else None
        del q
        dws = (
            _product(part, scale, qxt, x_scale, dtype, fast=False) if needed else None
            for part, dtype, needed in zip(qt.split(ctx.sizes), ctx.dtypes, ctx.needs_input_grad[5:], strict=True)
        )
        return None, dx, None, None, None, *dws


def fp8_matmuls(x: Tensor, weights: Sequence[Tensor], rounded: Fp8Weights | None = None) -> tuple[Tensor, ...]:
    """x · weightᵢᵀ in fp8 for each weight, forward and backward, with scales taken from the tensors themselves.

    Args:
        x: (..., K), bfloat16 or float16 on a GPU of compute capability 8.9 and more; the CPU rounds the same way and
            multiplies in float32.
        weights: (Nᵢ, K); K and every N divisible by 16.
        rounded: of `round_fp8(weights)`, where it is at hand; gradients go to `weights` all the same.

    Returns:
        (..., Nᵢ) each, in x's dtype. Rounding alone costs about 2⁻⁵ of a product's norm for e4m3, 2⁻⁴ for e5m2.

    Raises:
        ValueError: shapes that do not fit or are not divisible by 16, or a GPU without fp8.
    """
    if not weights or weights[0].dim() != 2 or x.dim() < 1 or x.shape[-1] != weights[0].shape[1]:
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"x {tuple(x.shape)} and weights {shapes} must be (..., K) and (N, K)")
    compiling = torch.compiler.is_compiling()
    if x.is_cuda and not compiling and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError(f"fp8 wants compute capability 8.9, this GPU has {torch.cuda.get_device_capability(x.device)}")
    keep = torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in weights))
    if rounded is None:
        rounded = round_fp8(weights, transposed=keep)
    rows = x.reshape(-1, x.shape[-1])
    ys: tuple[Tensor, ...] = _Products.apply(keep, rows, rounded.q, rounded.qt, rounded.scale, *weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def fp8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`fp8_matmuls` for a single weight: x (..., K), weight (N, K) → (..., N)."""
    return fp8_matmuls(x, [weight])[0]
