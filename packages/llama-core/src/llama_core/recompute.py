"""Activation checkpointing: spend arithmetic in the backward pass to keep fewer activations.

Chen et al. 2016 (https://arxiv.org/abs/1604.06174); the selective form follows Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198): keep what is dear to compute, recompute what is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .model import DecoderLayer, Llama

MODES = ("none", "selective", "full")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")


def set_activation_checkpointing(model: Llama, mode: str) -> None:
    """Choose what each layer keeps for its backward pass; takes effect at the next forward pass.

    Args:
        model: changed in place; parameter names stay.
        mode: "none" keeps every activation; "selective" keeps matrix products and attention and recomputes norms,
            rotary positions and SwiGLU; "full" keeps each layer's input and recomputes the layer.

    Raises:
        ValueError: another mode.
    """
    if mode not in MODES:
        raise ValueError(f"activation checkpointing {mode!r} is unknown; choose one of {', '.join(MODES)}")
    run: Callable[..., Tensor] | None = None
    if mode == "full":
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # no dropout, so no generator to keep
    elif mode == "selective":
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts)
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer):
            layer.recompute = run


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_dear)


def _keep_dear(context: Any, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().rsplit(".", 1)[0]
    dear = name in _PRODUCTS or "attention" in name  # every library calls its attention operator so
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
