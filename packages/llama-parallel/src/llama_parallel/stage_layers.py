"""Which layers each pipeline stage has.

Stage s of pp · v rests on rank s mod pp: with v virtual stages a rank has v pieces of the model, pp stages apart
(Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_core import LlamaConfig

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
