"""Which layers each pipeline stage has, and a model cut down to those of one rank.

Stage s of pp · v rests on rank s mod pp: with v virtual stages a rank has v pieces of the model, pp stages apart
(Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). Parameters keep their names in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llama_core import Llama, LlamaConfig

_LOOKUP = 50
"""The embedding multiplies nothing; a lookup and the writing of its gradient take about a fiftieth of the head's time
(Llama 3 8B at 8192 tokens: 1 GB written beside 26 TFLOP)."""


def balance_layers(config: LlamaConfig, stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one, such that the slowest is as fast as can be.

    Counted are multiplications by weights per token: of a layer, and of the output head, which for a small model with a
    large vocabulary is worth several layers. `ParallelPlan.layers_per_stage` is there for who knows better.

    Raises:
        ValueError: fewer layers than stages.
    """
    if config.num_hidden_layers < stages:
        raise ValueError(f"{config.num_hidden_layers} layers are fewer than {stages} pipeline stages")
    heads = 2 * config.num_attention_heads + 2 * config.kv_heads
    layer = config.hidden_size * (heads * config.head_width + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    costs = [layer] * stages
    costs[0] += head // _LOOKUP
    costs[-1] += head
    layers = [1] * stages
    for _ in range(config.num_hidden_layers - stages):  # all layers cost alike, so the cheapest stage takes the next
        cheapest = costs.index(min(costs))
        costs[cheapest] += layer
        layers[cheapest] += 1
    return tuple(layers)


def check_layers(layers: Sequence[int], config: LlamaConfig, stages: int) -> None:
    """ValueError unless `layers` says for each of `stages` how many layers it has, and none is left out."""
    whole = all(isinstance(count, int) and count >= 1 for count in layers)
    if len(layers) != stages or not whole or sum(layers) != config.num_hidden_layers:
        raise ValueError(
            f"layers_per_stage = {tuple(layers)}: {stages} numbers of at least 1 are wanted, "
            f"{config.num_hidden_layers} together"
        )


def stage_layers(config: LlamaConfig, stages: int, layers: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage, by their number in the whole model.

    Args:
        config: the whole model.
        stages: pp · virtual stages.
        layers: how many each has; None: `balance_layers`.

    Raises:
        ValueError: too few layers, or `layers` that do not add up.
    """
    if layers is None:
        layers = balance_layers(config, stages)
    check_layers(layers, config, stages)
    ends = [sum(layers[: index + 1]) for index in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, layers, strict=True))


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
