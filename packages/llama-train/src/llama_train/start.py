"""The model that a run begins with, `model.start_from`: its shape, its tokenizer, its weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llama_core import CheckpointError, LlamaConfig
from llama_core.checkpoint import EMBEDDING, HEAD, Checkpoint, check, check_tied_head, fill, stored_dtype
from llama_core.load import open_checkpoint
from llama_core.lora import draw_adapter
from llama_parallel.shards import local_part, read_shards

from .config import DataConfig, ModelConfig, TrainConfig
from .locate import locate
from .metrics import human
from .shuffle import mix
from .world import ALONE, World

if TYPE_CHECKING:
    from .console import Reporter
    from .trainer import Trainer

_NO_SHAPE = ("start_from", "rope_factor", "preset")


def start_shape(config: ModelConfig, sequence_length: int) -> LlamaConfig:
    """The shape of the model to start from; headers are read, no weight.

    Raises:
        CheckpointError: there is no model, or one that lacks something or has too much.
        ValueError: a key of [model] says something else, or rows are longer than the model reads.
    """
    checkpoint = _open(config)
    try:
        check(checkpoint)
        shape = checkpoint.config
    finally:
        checkpoint.close()
    wrong = []
    for name in (item.name for item in fields(config) if item.name not in _NO_SHAPE):
        given, found = getattr(config, name), shape.rope.rope_theta if name == "rope_theta" else getattr(shape, name)
        if name == "head_dim":
            found = shape.head_width
        if given is not None and given != found:
            wrong.append(f"model.{name} is {given!r}, its {name} is {found!r}")
    if wrong:
        raise ValueError(f"model.start_from is {config.start_from!r}: {'; '.join(wrong)}: leave these keys out")
    if sequence_length > shape.max_position_embeddings:
        raise ValueError(
            f"data.sequence_length is {sequence_length}; the model of model.start_from, {config.start_from!r}, reads "
            f"at most {shape.max_position_embeddings} tokens (max_position_embeddings)"
        )
    return shape


def data_of(config: TrainConfig) -> DataConfig:
    """The settings of [data], with the tokenizer of the model to start from where none is named."""
    tokenizer = config.data.tokenizer or config.model.start_from
    return config.data if tokenizer is None else replace(config.data, tokenizer=locate(tokenizer))


def check_vocabulary(config: TrainConfig, shape: LlamaConfig, vocab_size: int) -> None:
    """ValueError where the tokenizer has ids that the model to start from has no row for."""
    if config.model.start_from is not None and vocab_size > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size:,} ids, the model of model.start_from, {config.model.start_from!r}, has "
            f"rows for {shape.vocab_size:,}: leave data.tokenizer out and the model's own is taken"
        )


def begin(config: TrainConfig, trainer: Trainer, world: World, reporter: Reporter, *, resumes: bool) -> None:
    """Give a trainer the weights of `model.start_from`, if the run has one, before a checkpoint is loaded.

    Args:
        config, trainer, world, reporter: of the run.
        resumes: whether a checkpoint will be loaded. It holds all that is trained, so with adapters the frozen weights
            are still wanted, and without none.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    if config.model.start_from is None:
        return
    if config.lora.dropout:
        torch.manual_seed(mix(config.seed, world.process.rank) % 2**63)  # torch's dropout knows no other generator
    if resumes and not config.lora.rank:
        return
    weights = trainer.weights()
    begun = time.perf_counter()
    world.all_do(lambda: load_start(config, weights, world))
    trainer.loaded()
    reporter.note(f"start      {locate(config.model.start_from)}, read in {time.perf_counter() - begun:.1f} s")
    if config.lora.rank:
        adapters = [tensor.numel() for name, tensor in weights.items() if _is_adapter(name)]
        reporter.note(
            f"adapters   rank {config.lora.rank} on {len(adapters) // 2} layers, {human(sum(adapters))} parameters are "
            "trained, all others frozen"
        )


@torch.no_grad()
def load_start(config: TrainConfig, weights: Mapping[str, Tensor], world: World = ALONE) -> None:
    """Fill a trainer's weights from `model.start_from`: the same on every layout, bit for bit.

    Each process reads its own shards and nothing else, in the dtype in which its weights rest. Adapters are drawn.

    Args:
        config: of the run.
        weights: all parameters by name, float32 master weights where there are any; DTensors where shared.
        world: the processes, each of which makes this call.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    adapters = {name: tensor for name, tensor in weights.items() if _is_adapter(name)}
    stored = {name: tensor for name, tensor in weights.items() if name not in adapters}
    checkpoint = _open(config.model)
    try:
        if world.is_main and checkpoint.config.tie_word_embeddings and HEAD in checkpoint.tensors:
            table = torch.empty(checkpoint.tensors[EMBEDDING].shape, dtype=stored_dtype(checkpoint))
            fill(checkpoint, {EMBEDDING: table})
            check_tied_head(checkpoint, table)
        if world.size == 1:
            fill(checkpoint, stored)  # on several threads
        else:
            read_shards(checkpoint, stored)
    finally:
        checkpoint.close()
    for name, tensor in adapters.items():
        local, shape, offsets = local_part(tensor)
        draw_adapter(local, name, config.seed, shape, offsets)


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _open(config: ModelConfig) -> Checkpoint:
    assert config.start_from is not None
    path = locate(config.start_from)
    try:
        return open_checkpoint(path, config.rope_factor)
    except CheckpointError as error:
        raise CheckpointError(f"model.start_from is {config.start_from!r}: {error}") from None
