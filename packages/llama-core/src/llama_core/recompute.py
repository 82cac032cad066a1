"""Activation checkpointing: spend arithmetic in the backward pass to keep fewer activations.

Chen et al. 2016 (https://arxiv.org/abs/1604.06174); the selective form follows Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198): keep what is dear to compute, recompute what is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .model import DecoderLayer, Llama

MODES = ("none", "selective", "full")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")


def set_activation_checkpointing(model: Llama, mode: str, keep: Collection[str] = ()) -> None:
    """Choose what each layer keeps for its backward pass; takes effect at the next forward pass.

    Args:
        model: changed in place; parameter names stay.
        mode: "none" keeps every activation; "selective" keeps matrix products and attention and recomputes norms,
            rotary positions and SwiGLU; "full" keeps each layer's input and recomputes the layer.
        keep: names of further operators ("library::operator") whose results "selective" keeps, such as communication.

    Raises:
        ValueError: another mode.
    """
    if mode not in MODES:
        raise ValueError(f"activation checkpointing {mode!r} is unknown; choose one of {', '.join(MODES)}")
    run: Callable[..., Tensor] | None = None
    # The second pass must drop what the first one dropped; only adapters drop anything (lora_layers.py).
    draws = any(getattr(module, "dropout", 0.0) > 0 for module in model.modules())
    if mode == "full":
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
    elif mode == "selective":
        contexts = partial(_selective_contexts, frozenset(keep))
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts)
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer):
            layer.recompute = run


def _selective_contexts(keep: frozenset[str]) -> Any:
    return create_selective_checkpoint_contexts(partial(_keep_dear, keep))


def _keep_dear(
    keep: frozenset[str], context: Any, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = operation.name().rsplit(".", 1)[0]
    dear = name in _PRODUCTS or name in keep or "attention" in name  # every library calls its attention operator so
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
