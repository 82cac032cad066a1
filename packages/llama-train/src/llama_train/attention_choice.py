"""The key `attention`: which kernel computes attention in training, and whether it can."""

from __future__ import annotations

import torch
from torch import Tensor

from llama_core import Attend, LlamaConfig, causal_attend, plain_attend

Choice = tuple[Attend, str]

# Names of llama_kernels.attention's backends; the other choices are llama_core's own functions.
_OF_KERNELS: dict[str, str | None] = {"auto": None, "flash": "flash", "triton": "triton"}


def choose_attend(attention: str, shape: LlamaConfig, length: int, device: torch.device, dtype: torch.dtype) -> Choice:
    """The attention that the key asks for, and the name of what will compute it, to be shown at the start.

    Args:
        attention: "auto" is the fastest of llama_kernels on a GPU and torch's scaled_dot_product_attention on a CPU;
            "sdpa" is the latter everywhere; "flash" and "triton" are those kernels; "plain" is the formula.
        shape: the model's heads. length: tokens in a row of the batch. device, dtype: of the activations.

    Raises:
        ValueError: the kernel that is named cannot serve this model on this device, with its reason.
    """
    if attention == "plain":
        return plain_attend, "plain"
    if attention == "sdpa" or (attention == "auto" and device.type != "cuda"):
        return causal_attend, "sdpa"
    import llama_kernels  # here: most CPU runs need none of it

    backend = _OF_KERNELS[attention]
    try:
        name = llama_kernels.attention_backend(
            device,
            dtype,
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_width,
            length=length,
            backend=backend,
        )
    except ValueError as error:
        raise ValueError(f"attention is {attention!r}, which cannot be had here: {error}") from None
    return _through_kernels(backend), name


def _through_kernels(backend: str | None) -> Attend:
    """An `Attend` over llama_kernels.attention. The choice by shape is made there, anew for every shape."""
    import llama_kernels

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = llama_kernels.attention(q, k, v, causal=True, backend=backend)
        return out

    return attend
