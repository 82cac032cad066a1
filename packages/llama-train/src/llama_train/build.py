"""From settings to objects: device, dtype, operations, model."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, cast

import torch

from llama_core import (
    Llama,
    LlamaConfig,
    Ops,
    RopeConfig,
    compile_layers,
    init_weights,
    preset,
    set_activation_checkpointing,
)
from llama_core.parameter_shapes import parameter_shapes

from .attention_choice import choose_attend
from .config import ModelConfig, TrainConfig
from .fp8 import use_fp8
from .lora import add_adapters
from .start import start_shape

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def resolve(config: TrainConfig) -> TrainConfig:
    """The settings with "auto" replaced by what this machine has.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError("device is 'cuda'; this machine has no GPU that PyTorch can use: leave it out, or say 'cpu'")
    device = config.device if config.device != "auto" else "cuda" if has_gpu else "cpu"
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return replace(config, device=device, dtype=dtype)


def model_config(
    config: ModelConfig, *, vocab_size: int, sequence_length: int, bos_id: int | None, eos_id: int | None
) -> LlamaConfig:
    """The model's shape. Vocabulary and special tokens are those of the tokenizer, or of the model to start from.

    Raises:
        ValueError: an unknown preset, a number missing, or numbers that do not fit together.
    """
    if config.start_from is not None:
        return start_shape(config, sequence_length)
    not_of_shape = ("preset", "start_from", "rope_factor")
    given = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in not_of_shape}
    given = {key: value for key, value in given.items() if value is not None}
    theta = given.pop("rope_theta", None)
    tokens: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": bos_id, "eos_token_id": eos_id}
    if config.preset is not None:
        base = preset(config.preset)
        rope = base.rope if theta is None else replace(base.rope, rope_theta=theta)
        return base.replace(**given, **tokens, rope=rope)
    missing = [f"model.{name}" for name in _NEEDED if name not in given]
    if missing:
        raise ValueError(f"the model's shape is not given: set model.preset, or {', '.join(missing)}")
    given.setdefault("max_position_embeddings", sequence_length)
    rope = RopeConfig() if theta is None else RopeConfig(rope_theta=theta)
    return LlamaConfig(**given, **tokens, rope=rope)


def count_parameters(shape: LlamaConfig) -> int:
    """Of the whole model, a tied head counted once."""
    return sum(math.prod(size) for size in parameter_shapes(shape).values())


def choose_ops(kernels: str, device: torch.device) -> Ops:
    """llama_kernels' operations for a GPU with kernels = "auto"; the plain ones otherwise."""
    if kernels == "auto" and device.type == "cuda":
        import llama_kernels  # here: a CPU run needs no Triton

        # The same fields in another class, since neither package imports the other; test_kernels compares them.
        return cast(Ops, llama_kernels.ops(device))
    return Ops()


def build_model(shape: LlamaConfig, config: TrainConfig, device: torch.device) -> Llama:
    """A model on the device, in the dtype asked for, ready to train: with fresh weights, or, where model.start_from is
    set, with memory that `load_start` fills.

    Raises:
        ValueError: the attention that is named cannot serve this model here.
    """
    attend, _ = choose_attend(
        config.attention, shape, config.data.sequence_length, device, getattr(torch, config.dtype)
    )
    with torch.device("meta"):
        model = Llama(shape, ops=choose_ops(config.kernels, device), attend=attend)
    model = model.to(getattr(torch, config.dtype))
    add_adapters(model, config)
    model.to_empty(device=device)
    if config.model.start_from is None:
        init_weights(model, seed=config.seed)
    if config.fp8:
        # Compiled layers cannot ask whether a weight has changed since.
        use_fp8(model.model.layers, remember=config.data.gradient_accumulation_steps > 1 and not config.compile)
    set_activation_checkpointing(model, config.activation_checkpointing)
    if config.compile:
        compile_layers(model)
    return model
