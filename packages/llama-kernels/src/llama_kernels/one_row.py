"""What the kernels for one row of x share: how they begin, what they take in, and how they finish.

A decode step of one sequence is a chain of products, each of which reads its weights once and little else. Two things
keep memory from resting between them. What stands between two products is done by the products themselves: the norm on
the way in, SwiGLU or the residual on the way out. And each kernel starts before the one ahead of it has ended
(programmatic dependent launch, compute capability 9.0 on): it loads its first weights, which nobody writes, and only
then waits for its x.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_kernels.compat import tl, triton


def overlaps(x: Tensor) -> bool:
    """Whether kernels on x may start before the one ahead has ended."""
    return x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keywords of a launch; every kernel launched with them calls `wait_for_previous` before it reads or writes."""
    return {"PDL": True, "launch_pdl": True} if overlaps(x) else {"PDL": False}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel's programs may take places that are free."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until all kernels ahead have ended and what they wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def inverse_rms(x_ptr, eps, K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of the row; 1 where there is no norm."""
    if NORM:
        k = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    else:
        return 1.0


@triton.jit
def take_in(x_ptr, norm_ptr, at, real, inverse, NORM: tl.constexpr):
    """x at some places as float32, normed and rounded to x's dtype as `rms_norm` does."""
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    if NORM:
        weight = tl.load(norm_ptr + at, mask=real, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * inverse * weight).to(x_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def finish(y, up, residual_ptr, y_ptr, n, outputs, GATED: tl.constexpr, ADD: tl.constexpr):
    """Store the outputs n: y, silu(y) · up, or y + residual."""
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y += tl.load(residual_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < outputs)
