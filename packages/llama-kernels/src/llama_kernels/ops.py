"""The set of operations for a device, with the fields of `llama_core.Ops` (neither package imports the other)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import HAS_TRITON
from llama_kernels.linear_cross_entropy import linear_cross_entropy
from llama_kernels.rms_norm import add_rms_norm, rms_norm
from llama_kernels.rope import rope
from llama_kernels.swiglu import swiglu
from llama_kernels.swiglu_linear import swiglu_linear


@dataclass(frozen=True)
class Ops:
    """What a model computes with; each field has the signature of the function of that name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    swiglu_linear: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


def ops(device: torch.device | str) -> Ops:
    """The fastest operations for tensors on `device`: Triton kernels on a GPU, plain torch elsewhere.

    `linear_cross_entropy` is the chunked one everywhere: full logits never exist on a CPU either.

    >>> ops("cpu").rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    tensor([[0.8485, 1.1314]])
    """
    if HAS_TRITON and torch.device(device).type == "cuda":
        return Ops(rms_norm, add_rms_norm, rope, swiglu, linear_cross_entropy, swiglu_linear)
    return Ops(reference.rms_norm, reference.add_rms_norm, reference.rope, reference.swiglu, linear_cross_entropy)
