"""Which parameters a rank holds: their shapes after tensor parallelism, their shards, and the layers of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llama_core import LlamaConfig
from llama_parallel.stage_layers import balance_layers

Shape = tuple[int, int]
"""Rows and elements of a row; a vector has rows of one element."""


@lru_cache
def layer_parameters(model: LlamaConfig, tp: int) -> tuple[Shape, ...]:
    """Of one decoder layer on one tensor-parallel rank: q, k, v, o, gate, up, down, both norms, then biases.

    Key/value heads fewer than ranks rest whole on each (tensor_parallel.TensorParallelAttention).
    """
    width, inner = model.hidden_size, model.intermediate_size // tp
    queries = model.num_attention_heads // tp * model.head_width
    keys = kv_rows(model, tp)
    shapes = [(queries, width), (keys, width), (keys, width), (width, queries)]
    shapes += [(inner, width), (inner, width), (width, inner), (width, 1), (width, 1)]
    if model.attention_bias:
        shapes += [(queries, 1), (keys, 1), (keys, 1), (width, 1)]
    if model.mlp_bias:
        shapes += [(inner, 1), (inner, 1), (width, 1)]
    return tuple(shapes)


def kv_rows(model: LlamaConfig, tp: int) -> int:
    """Rows of k's (and v's) weight at rest on one rank."""
    return model.kv_heads * model.head_width // (tp if model.kv_heads % tp == 0 else 1)


def vocabulary_rows(model: LlamaConfig, tp: int) -> int:
    """Rows of embedding or head on a rank (all but the last have so many)."""
    return -(-model.vocab_size // tp)


@lru_cache
def elements(shapes: tuple[Shape, ...]) -> int:
    """Of all together."""
    return sum(rows * columns for rows, columns in shapes)


@lru_cache
def shard_elements(shapes: tuple[Shape, ...], shards: int) -> int:
    """On the rank that holds most: FSDP cuts each parameter along its rows, ⌈rows / shards⌉ each, and pads the rest."""
    return sum(-(-rows // shards) * columns for rows, columns in shapes)


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds, over all its model chunks."""

    layers: int
    embedding: bool
    head: bool

    def groups(self, model: LlamaConfig, tp: int) -> tuple[tuple[Shape, ...], ...]:
        """Parameters as FSDP gathers them: the embedding (unless the head on this stage shares it), each layer, and
        last what stays gathered (final norm and head)."""
        return _groups(self, model, tp)


@lru_cache
def _groups(stage: Stage, model: LlamaConfig, tp: int) -> tuple[tuple[Shape, ...], ...]:
    rows, width = vocabulary_rows(model, tp), model.hidden_size
    found: list[tuple[Shape, ...]] = []
    if stage.embedding and not (model.tie_word_embeddings and stage.head):
        found.append(((rows, width),))
    found += [layer_parameters(model, tp)] * stage.layers
    # a tied head on another stage than the embedding is a copy that both keep (tied_embedding.py)
    found.append(((width, 1), (rows, width)) if stage.head else ())
    return tuple(found)


@lru_cache
def stage_elements(stage: Stage, model: LlamaConfig, tp: int, shards: int = 1) -> int:
    """Of all parameters of a stage on one tensor-parallel rank, or of the largest of so many shards of them."""
    return sum(shard_elements(group, shards) for group in stage.groups(model, tp))


@lru_cache
def stages(model: LlamaConfig, pp: int, per_rank: int = 1) -> tuple[Stage, ...]:
    """What each of `pp` pipeline ranks holds: of pp · per_rank stages every pp-th (see stage_layers.py)."""
    layers = balance_layers(model, pp * per_rank)
    return tuple(Stage(sum(layers[rank::pp]), rank == 0, rank == pp - 1) for rank in range(pp))
