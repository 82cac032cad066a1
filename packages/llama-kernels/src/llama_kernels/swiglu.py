"""SwiGLU: silu(gate) · up (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6), with s = sigmoid(gate):

    y = gate · s · up        dgate = dy · up · s · (1 + gate · (1 − s))        dup = dy · gate · s

Three tensors move forward and five backward; the arithmetic is free. Gate and up may be column slices of one packed
projection: rows are addressed by their strides.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import as_rows, cdiv, device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.operators import operator


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, dy_stride, gate_stride, up_stride, width, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    tl.store(dgate_ptr + row * width + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * width + column, (dy * gate * s).to(dup_ptr.dtype.element_ty), mask=inside)
    if y_ptr is not None:
        tl.store(y_ptr + row * width + column, (gate * s * up).to(y_ptr.dtype.element_ty), mask=inside)


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One long row where every tensor is dense, so that blocks are full whatever the width; else rows with strides."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    return tuple(as_rows(x) for x in tensors)


def _grid(width: int, rows: int) -> tuple[int, tuple[int, int]]:
    block = min(next_power_of_2(width), 2048)
    return block, (cdiv(width, block), rows)


MAX_ROWS = 65_535  # CUDA's limit on the second dimension of a grid


def _in_slabs(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    rows = tensors[0].shape[0]
    if rows <= MAX_ROWS:
        return [tensors]
    return [tuple(x[start : start + MAX_ROWS] for x in tensors) for start in range(0, rows, MAX_ROWS)]


@operator("llama_kernels::swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        with device_guard(gate):
            for g, u, out in _in_slabs(_flat(gate, up, y)):
                block, grid = _grid(g.shape[1], g.shape[0])
                _forward_kernel[grid](g, u, out, g.stride(0), u.stride(0), g.shape[1], BLOCK=block, num_warps=4)
    return y


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _launch_backward(dy: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """dgate, dup and, with `again`, the forward result."""
    # Fresh tensors: gate and up are saved by the graph, and overwriting them breaks a second backward (#16).
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty_like(dgate)
    y = torch.empty_like(dgate) if again else None
    if dgate.numel():
        results = (dgate, dup) if y is None else (dgate, dup, y)
        with device_guard(gate):
            for d, g, u, dg, du, *out in _in_slabs(_flat(dy, gate, up, *results)):
                block, grid = _grid(g.shape[1], g.shape[0])
                _backward_kernel[grid](
                    d, g, u, dg, du, out[0] if out else None, d.stride(0), g.stride(0), u.stride(0), g.shape[1],
                    BLOCK=block, num_warps=4,
                )  # fmt: skip
    return dgate, dup, y


@operator("llama_kernels::swiglu_backward")
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _launch_backward(dy, gate, up, again=False)[:2]


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return _swiglu_backward(dy, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_save)


@operator("llama_kernels::swiglu_backward_again")
def _swiglu_backward_again(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = _launch_backward(dy, gate, up, again=True)
    assert y is not None
    return dgate, dup, y


@_swiglu_backward_again.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in one pass.

    Args:
        gate, up: (..., F), the same shape and dtype, any strides.

    Returns:
        (..., F) in their dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes that differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.dim():
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be alike")
    if not runs_triton(gate):
        return reference.swiglu(gate, up)
    out: Tensor = _swiglu(gate, up)
    return out
