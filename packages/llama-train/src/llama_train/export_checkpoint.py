"""From a checkpoint of a run to a model, on one process: the run's settings and tokenizer, the checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from llama_core import Llama, LlamaConfig, Tokenizer, load_tokenizer, save_model
from llama_core.lora import save_adapter

from .build import model_config
from .checkpoint import Checkpoint, find_checkpoint, list_checkpoints, load_checkpoint, newest_checkpoint
from .cli_export import ExportConfig
from .config import TrainConfig
from .config_file import load_config
from .data.prepared_folder import TOKENIZER
from .lora import take_adapters
from .run_folder import RunFolder
from .start import data_of, load_start
from .trainer import empty_whole

_STORED = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(options: ExportConfig, note: Callable[[str], None]) -> Path:
    """Write a model.

    Args:
        options: which run, step and format.
        note: receives a line for each thing worth telling.

    Returns:
        Where it is.

    Raises:
        ValueError: no such run or step, a damaged checkpoint, or what the format cannot hold.
        CheckpointError: the target is taken, or the model that the run started from is gone.
    """
    folder = RunFolder(Path(options.run))
    if not folder.config.is_file():
        raise ValueError(f"{folder.path} is no run folder: it has no {folder.config.name}")
    config = load_config(folder.config)
    if options.dtype != "auto":  # from the master weights, rounded once
        config = replace(config, dtype="bfloat16" if options.dtype == "bfloat16" else "float32")
    if (options.adapter or options.merge) and not config.lora.rank:
        raise ValueError(f"--{'adapter' if options.adapter else 'merge'}: {folder.path} is no run with [lora]")
    checkpoint = _checkpoint(folder, options.step, note)
    tokenizer = _tokenizer(config, folder)
    model = load_whole(config, checkpoint, _shape(config, tokenizer))
    target = _target(options, folder, checkpoint)
    adapter = take_adapters(model, config) if config.lora.rank else None
    if options.adapter:
        assert adapter is not None
        save_adapter(adapter, target, options.overwrite)
        return target
    if options.format == "meta":
        note("note       Meta's format has no place for this tokenizer: take it from an export in another one")
    save_model(
        model,
        target,
        options.format,
        dtype=_STORED.get(options.dtype, options.dtype),
        overwrite=options.overwrite,
        tokenizer=None if options.format == "meta" else tokenizer,
    )
    return target


def load_whole(config: TrainConfig, checkpoint: Checkpoint, shape: LlamaConfig) -> Llama:
    """The model of a run as it was at a checkpoint, adapters beside their weights, on the CPU in the run's dtype."""
    model = empty_whole(shape, config, "cpu")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if config.lora.rank:
        load_start(config, weights)
    trained = {name: weight for name, weight in weights.items() if model.get_parameter(name).requires_grad}
    load_checkpoint(checkpoint, {f"model.{name}": weight for name, weight in trained.items()})
    return model.eval()


def _checkpoint(folder: RunFolder, step: int | None, note: Callable[[str], None]) -> Checkpoint:
    found = list_checkpoints(folder.checkpoints)
    if step is not None:
        for checkpoint in found:
            if checkpoint.step == step:
                return find_checkpoint(checkpoint.path)
        steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise ValueError(f"--step is {step}; the checkpoints of {folder.path} are of step {steps}")
    newest, passed_over = newest_checkpoint(folder.checkpoints)
    for line in passed_over:
        note(f"warning    {line}")
    if newest is None:
        raise ValueError(f"{folder.path} has no whole checkpoint yet")
    return newest


def _tokenizer(config: TrainConfig, folder: RunFolder) -> Tokenizer:
    """The run's: of its own text, of what it started from, of its prepared sources, or of an earlier export."""
    places = [folder.data / TOKENIZER, data_of(config).tokenizer]
    places += [Path(source) / TOKENIZER for source in config.data.sources[:1]] + [folder.export]
    for place in places:
        if place is not None and (Path(place).exists() or place == config.model.start_from):
            return load_tokenizer(place)
    raise ValueError(
        f"the tokenizer of {folder.path} is in none of {', '.join(str(p) for p in places if p is not None)}"
    )


def _shape(config: TrainConfig, tokenizer: Tokenizer) -> LlamaConfig:
    return model_config(
        config.model,
        vocab_size=tokenizer.vocab_size,
        sequence_length=config.data.sequence_length,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )


def _target(options: ExportConfig, folder: RunFolder, checkpoint: Checkpoint) -> Path:
    if options.out is not None:
        return Path(options.out)
    step = checkpoint.path.name
    if options.adapter:
        return folder.path / f"adapter-{step}"
    return folder.path / (f"{step}.gguf" if options.format == "gguf" else f"{options.format}-{step}")
