"""torch.compile, layer by layer: all layers have one shape, so one compilation serves them all."""

from __future__ import annotations

from typing import Any

from .model import DecoderLayer, Llama


def compile_layers(model: Llama, **options: Any) -> None:
    """Compile each decoder layer in place, as one graph; parameter names stay.

    Apply after activation checkpointing and before FSDP. The first call of the model compiles.

    Args:
        model: changed in place.
        options: passed to `torch.compile`; `fullgraph=True` by default, so that a graph break is an error.
    """
    options.setdefault("fullgraph", True)
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer):
            layer.compile(**options)
