"""RMSNorm, alone and after a residual addition (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4).

    rstd = 1 / sqrt(mean(x²) + eps)             y = x · rstd · w
    c    = mean(dy · w · x) · rstd²             dx = rstd · (dy · w − c · x)            dw = Σ_rows dy · x · rstd

The work is moving bytes: each tensor is read once and each result written once. rstd is not saved: backward needs x
anyway, and the two row sums it takes (x² and dy·w·x) are independent. dw is summed in float32, each program over its
own rows in registers, then over programs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import (
    as_rows,
    cdiv,
    device_guard,
    multiprocessors,
    next_power_of_2,
    runs_triton,
    shared_memory,
    tl,
    triton,
)
from llama_kernels.operators import operator


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, x_stride, residual_stride, rows, eps,
    E: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]  # int64: rows · E passes 2³¹ (#12, #13)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < E)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * E + column, total, mask=inside)
        x = total.to(tl.float32)  # normalise what the next layer will read
    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / E
    rstd = tl.rsqrt(tl.where(row < rows, mean_square + eps, 1.0))
    weight = tl.load(weight_ptr + column, mask=column < E, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * E + column, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, dx_ptr, dw_ptr, dy_stride, dtotal_stride, x_stride, rows, eps,
    E: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < E, other=0.0).to(tl.float32)
    dw = tl.zeros((R, BLOCK), tl.float32)
    for first in tl.range(program * R, rows, tl.num_programs(0) * R, num_stages=STAGES):
        row = (first + tl.arange(0, R)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < E)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, axis=1, keep_dims=True) / E
        rstd = tl.rsqrt(tl.where(row < rows, mean_square + eps, 1.0))  # padded rows: eps 0 makes 0 · ∞ in dw
        c = tl.sum(dy * weight * x, axis=1, keep_dims=True) / E * rstd * rstd
        dx = rstd * (dy * weight - c * x)
        if dtotal_ptr is not None:  # the residual stream's own gradient is added after, not before, the norm's (#17)
            dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * E + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += dy * x * rstd
    tl.store(dw_ptr + program.to(tl.int64) * E + column, tl.sum(dw, axis=0, keep_dims=True), mask=column < E)


def _forward_tile(width: int) -> tuple[int, int, int]:
    """Rows per program, padded width, warps. On an H200, 16 bytes per thread and access were near a plain copy."""
    block = next_power_of_2(width)
    rows = max(1, 2048 // block)
    return rows, block, min(max(rows * block // 512, 1), 16)


def _backward_tile(width: int, element_size: int, x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows per step, padded width, warps, loads in flight, programs per multiprocessor.

    Few programs with many rows each, their next rows on the way through shared memory while this step computes, were
    fastest on an H200 (0.90 of a copy at width 4096, against 0.75 without loads in flight).
    """
    block = next_power_of_2(width)
    rows = max(2 if block <= 4096 else 1, 2048 // block)
    warps = min(max(rows * block // 1024, 1), 16)
    shared = shared_memory(x)
    step = 3 * rows * block * element_size  # dy, x and perhaps dtotal
    stages = 3 if 3 * step <= shared else 2 if 2 * step <= shared else 1
    return rows, block, warps, stages, max(1, 8 // warps)


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    if x.numel():  # a grid of no programs is a launch error (#27)
        x_rows, residual_rows = as_rows(x), None if residual is None else as_rows(residual)
        rows, width = x_rows.shape
        tile_rows, block, warps = _forward_tile(width)
        with device_guard(x):
            _forward_kernel[(cdiv(rows, tile_rows),)](
                x_rows, residual_rows, weight.contiguous(), y, total, x_rows.stride(0),
                0 if residual_rows is None else residual_rows.stride(0), rows, eps,
                E=width, R=tile_rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return y, total


def _launch_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    dy_rows, x_rows, dtotal_rows = as_rows(dy), as_rows(x), None if dtotal is None else as_rows(dtotal)
    rows, width = x_rows.shape
    tile_rows, block, warps, stages, programs = _backward_tile(width, x.element_size(), x)
    programs = min(cdiv(rows, tile_rows), programs * multiprocessors(x))
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with device_guard(x):
        _backward_kernel[(programs,)](
            dy_rows, dtotal_rows, x_rows, weight.contiguous(), dx, dw, dy_rows.stride(0),
            0 if dtotal_rows is None else dtotal_rows.stride(0), x_rows.stride(0), rows, eps,
            E=width, R=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype)


@operator("llama_kernels::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_forward(x, None, weight, eps)[0]


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@operator("llama_kernels::add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = _launch_forward(x, residual, weight, eps)
    assert total is not None
    return y, total


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator("llama_kernels::rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _launch_backward(dy, dtotal, x, weight, eps)


@_rms_norm_backward.register_fake
def _(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_for_rms_norm(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward_of_rms_norm(ctx, dy):
    dx, dw = _rms_norm_backward(dy, None, *ctx.saved_tensors, ctx.eps)
    return dx, dw, None


def _save_for_add_rms_norm(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # the last layer's residual stream goes nowhere: no zeros for it
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)


def _backward_of_add_rms_norm(ctx, dy, dtotal):
    total, weight = ctx.saved_tensors
    if dy is None:
        return dtotal, dtotal, None, None
    dx, dw = _rms_norm_backward(dy, dtotal, total, weight, ctx.eps)
    return dx, dx, dw, None


_rms_norm.register_autograd(_backward_of_rms_norm, setup_context=_save_for_rms_norm)
_add_rms_norm.register_autograd(_backward_of_add_rms_norm, setup_context=_save_for_add_rms_norm)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be (..., E) and (E,)")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, one pass over memory.

    Args:
        x: (..., E), any strides.
        weight: (E,), x's dtype or wider.
        eps: added to the mean square.

    Returns:
        (..., E) in x's dtype, contiguous; statistics and the weight's gradient are summed in float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, weight)
    if not runs_triton(x):
        return reference.rms_norm(x, weight, eps)
    out: Tensor = _rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = x + residual; returns (rms_norm(total), total), in one pass over memory.

    Args:
        x, residual: (..., E), the same shape and dtype, any strides.
        weight: (E,).
        eps: added to the mean square.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} must be alike"
        )
    if not runs_triton(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    out: tuple[Tensor, Tensor] = _add_rms_norm(x, residual, weight, eps)
    return out
