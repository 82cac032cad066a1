"""What makes generation on a CPU fast: oneDNN's matrix products, and operations that make fewer passes over memory.

A float32 product in torch on a CPU goes to MKL, which on CPUs that are not Intel's leaves half of their vector width
unused, and for a single row one of two cores. oneDNN comes inside torch and picks its code by what the CPU can do. Two
cores of an AMD EPYC (Zen 5), a 576 → 3072 layer: 1 row 442 → 197 µs, 16 rows 701 → 357 µs, 1024 rows 20.0 → 8.0 ms.

The definitions of the operations are llama_core's plain ones; these are for inference only (they write in place).
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Llama, Ops, set_linear_product


def has_onednn() -> bool:
    """Whether this torch multiplies float32 by oneDNN; on x86 only, where it was measured to pay."""
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()


def use_onednn(model: Llama) -> None:
    """Have a float32 model on a CPU multiply by oneDNN. Other models, and other CPUs, stay as they are."""
    weight = next(model.parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn():
        set_linear_product(model, onednn_linear if _operator() is not None else onednn_linear_by_layout)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` by oneDNN: x (..., in), weight (out, in), bias (out,) or None → (..., out). float32, no gradients.

    Calls the operator that torch.compile itself uses on CPUs. It is no promise of torch's; a torch without it takes
    `onednn_linear_by_layout`, which is.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def onednn_linear_by_layout(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by a public way: tensors in torch's "mkldnn" layout are multiplied by oneDNN. Each product copies its
    activations into that layout and back, about 20 µs more."""
    out = F.linear(x.to_mkldnn(), weight).to_dense()
    return out if bias is None else out.add_(bias)


def _operator() -> object:
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def cpu_ops() -> Ops:
    """Operations for inference on a CPU."""
    return Ops(rope=rope, swiglu=swiglu)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`llama_core.ops.rope` of q and k at once: x·(cos, cos) + (x₂, x₁)·(-sin, sin), with x = (x₁, x₂)."""
    x = torch.cat((q, k), dim=2)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    cos = torch.cat((cos, cos), dim=-1).unsqueeze(2)
    sin = torch.cat((-sin, sin), dim=-1).unsqueeze(2)
    turned = x.roll(cos.shape[-1] // 2, dims=-1).mul_(sin).addcmul_(x, cos).to(q.dtype)
    queries, keys = turned.split([q.shape[2], k.shape[2]], dim=2)
    return queries, keys


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`llama_core.ops.swiglu`, one new tensor instead of two."""
    return F.silu(gate).mul_(up)
