"""Adapters of a run: put into its model before it is shared out, and taken out of it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llama_core import Llama
from llama_core.lora import Adapter, LoraConfig, adapter_of, apply_lora, merge_lora
from llama_core.model import DecoderLayer

from .config import TrainConfig


def lora_config(config: TrainConfig) -> LoraConfig:
    """The section [lora] in PEFT's terms."""
    settings = config.lora
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        base_model_name_or_path=config.model.start_from,
    )


def add_adapters(model: Llama, config: TrainConfig, dtype: torch.dtype | None = None) -> None:
    """Freeze a model on the meta device and put adapters into it; without [lora] nothing is done.

    Args:
        model: whole, before it is shared over processes.
        config: of the run.
        dtype: of the adapters; that of the model by default.

    Raises:
        ValueError: a name of lora.target_modules that fits no layer.
    """
    if not config.lora.rank:
        return
    names = apply_lora(model, lora_config(config), dtype=dtype)
    for target in config.lora.target_modules:
        if not any(name == target or name.endswith("." + target) for name in names):
            layers = sum(isinstance(layer, DecoderLayer) for layer in model.model.layers)
            raise ValueError(f"lora.target_modules has {target!r}; the model of {layers} layers has none of that name")


def check_lora(config: TrainConfig) -> None:
    """ValueError for a layout that cannot train adapters."""
    settings = config.parallel
    if not config.lora.rank:
        return
    if settings.tp > 1:
        raise ValueError(
            f"lora.rank is {config.lora.rank} and parallel.tp {settings.tp}: tensor-parallel layers overlap their own "
            "products with what they send, and have no place for an adapter; use dp_shard, which shares the frozen "
            "weights too"
        )
    if settings.pp > 1 and settings.schedule == "zero_bubble":
        raise ValueError(
            f"lora.rank is {config.lora.rank} and parallel.schedule 'zero_bubble', which puts off the gradients of "
            "weights: adapters leave next to none to put off; use 1f1b"
        )


def take_adapters(model: Llama, config: TrainConfig) -> Adapter:
    """The adapters of a whole model, which is merged with them in place."""
    found = adapter_of(model, lora_config(config))
    adapter = Adapter(found.config, {name: (a.cpu(), b.cpu()) for name, (a, b) in found.weights.items()})
    merge_lora(model)
    return adapter


@contextmanager
def nothing_dropped(model: Llama, config: TrainConfig) -> Iterator[None]:
    """While the context lasts, adapters use all of their inputs: for measuring and sampling."""
    if not (config.lora.rank and config.lora.dropout):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
