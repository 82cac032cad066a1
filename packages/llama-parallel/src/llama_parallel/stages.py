"""A model cut down to one rank's pipeline stages. Parameters keep their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llama_core import Llama


def cut(model: Llama, stages: Sequence[range], own: Sequence[int]) -> None:
    """Leave of a whole model what the stages `own` need: the rest becomes None, and names stay."""
    if 0 not in own:
        model.model.embed_tokens = None
    if len(stages) - 1 not in own:
        model.model.norm = None
        model.lm_head = None
    kept = {layer for index in own for layer in stages[index]}
    for layer in range(len(model.model.layers)):
        if layer not in kept:
            model.model.layers[layer] = None  # type: ignore[assignment]


def separate(model: Llama, stages: Sequence[range], own: Sequence[int]) -> tuple[Llama, ...]:
    """One model for each stage of a `cut` model, made of the same modules.

    With a single stage that is `model` itself. With several, `model` becomes their sum (`StagedLlama`): what trains,
    initialises, saves and loads uses it, what runs are its stages.
    """
    if len(own) == 1:
        return (model,)
    parts = []
    for index in own:
        with torch.device("meta"):
            part = Llama(model.config, model.ops, model.attend)
        base, whole = part.model, model.model
        base.embed_tokens = whole.embed_tokens if index == 0 else None
        last = index == len(stages) - 1
        base.norm, part.lm_head = (whole.norm, model.lm_head) if last else (None, None)
        base.rotary_emb = whole.rotary_emb
        for layer in range(len(base.layers)):
            base.layers[layer] = whole.layers[layer] if layer in stages[index] else None  # type: ignore[assignment]
        parts.append(part.train(model.training))
    model.__class__ = StagedLlama
    assert isinstance(model, StagedLlama)
    model.stages = tuple(parts)
    return model.stages


class StagedLlama(Llama):
    """Several pipeline stages of one rank as one set of parameters; it does not run itself."""

    stages: tuple[Llama, ...]  # in a tuple, not a submodule: each parameter has its one name

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("a model of several pipeline stages runs stage by stage, in its pipeline's schedule")

    def train(self, mode: bool = True) -> StagedLlama:
        for stage in self.stages:
            stage.train(mode)
        super().train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        for stage in self.stages:
            reshard(stage)
        return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StagedLlama:
        for stage in self.stages:  # FSDP looks after its parameters where a stage moves, not where the sum does
            stage._apply(fn, recurse)
        return self


def reshard(model: nn.Module) -> None:
    """Drop all parameters that FSDP has gathered: what a forward pass without backward leaves is soon out of date."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
