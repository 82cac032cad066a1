"""What must be right before a run begins, and what it tells at its beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from llama_core import LlamaConfig, load_tokenizer
from llama_parallel import Process
from llama_parallel.layout import describe

from .attention_choice import choose_attend
from .build import count_parameters, model_config, resolve
from .config import TrainConfig
from .console import Reporter
from .fp8 import check_fp8
from .layout_choice import check_parallel, fill_in, sizes
from .lora import check_lora
from .metrics import human
from .out_of_memory import look_at_card, predict
from .prepare import PreparedData, measuring_batches, prepare
from .start import data_of
from .trainer import Trainer
from .world import World, local_size


def resolve_run(config: TrainConfig, process: Process) -> tuple[TrainConfig, torch.device, str]:
    """The settings with every "auto" replaced, this process's device, and the attention's name; nothing is started.

    A shape, a kernel or a layout that cannot work is told here, before any process talks to another and before the
    text is read; the tokenizer's own numbers come later.

    Raises:
        ValueError: settings that do not fit each other, the machine or the number of processes.
    """
    config = resolve(config)
    config = replace(config, parallel=fill_in(config.parallel, process.world_size))
    config = replace(config, schedule=config.schedule.resolved(config.rows_per_step * config.data.sequence_length))
    data = config.data
    shape = model_config(
        config.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length, bos_id=None, eos_id=None
    )
    device = torch.device(config.device)
    check_lora(config)
    check_fp8(config, shape)
    if process.world_size > 1:
        check_parallel(config, shape)
        if device.type == "cuda":
            if local_size() > torch.cuda.device_count():
                raise ValueError(
                    f"{local_size()} processes were started on a host with {torch.cuda.device_count()} GPUs: "
                    "torchrun --nproc-per-node as many as there are GPUs"
                )
            device = torch.device("cuda", process.local_rank)
    _, attention = choose_attend(config.attention, shape, data.sequence_length, device, getattr(torch, config.dtype))
    return config, device, attention


def prepare_once(config: TrainConfig, folder: Path, world: World, reporter: Reporter) -> PreparedData:
    """Read the text by rank 0; then by one process of every other host, which finds it done where the disk is shared.

    Raises:
        ValueError: as `prepare`; hosts whose own copies of the text differ; held-out text without any target.
    """
    settings = data_of(config)

    def work() -> PreparedData:
        return prepare(settings, folder, reporter.note)

    def check(data: PreparedData) -> None:
        batches = measuring_batches(data, config.data, rows=1)
        if not any(batch.count for batch in batches):  # the first one has some, as a rule
            raise ValueError("the held-out text has no token to predict; add text or raise data.held_out_fraction")

    if world.size == 1:
        data = work()
        check(data)
        return data
    world.main_does(lambda: check(work()))
    first_of_host = world.process.local_rank == 0
    world.all_do(lambda: prepare(settings, folder) if first_of_host else None)
    data = world.all_do(lambda: prepare(settings, folder))
    fingerprint = load_tokenizer(data.tokenizer).fingerprint
    digests = world.gather((fingerprint, len(data.train), len(data.held_out)))
    if any(digest != digests[0] for digest in digests):
        raise ValueError(f"hosts have different texts in {folder}: give them the same files, or one shared folder")
    return data


def tell(
    config: TrainConfig, shape: LlamaConfig, trainer: Trainer, epochs: float, world: World, reporter: Reporter
) -> None:
    """Model, layout, predicted memory, the arithmetic of a batch, and the schedule; a collective call."""
    rests = "" if trainer.rests_in == getattr(torch, config.dtype) else ", weights at rest in float32"
    products = ", the layers' products in fp8" if config.fp8 else ""
    reporter.note(
        f"model      {human(count_parameters(shape))} parameters, {config.dtype} on {config.device}{rests}{products}"
    )
    held = world.gather(trainer.held())
    if world.size > 1:
        least, most = min(count for count, _ in held), max(count for count, _ in held)
        span = human(most) if least == most else f"{human(least)} to {human(most)}"
        reporter.note(f"layout     {describe(sizes(config.parallel))}: {world.size} processes{_how(config)}")
        reporter.note(
            f"a rank     holds {span} parameters, up to {max(size for _, size in held) / 1e9:.3g} GB with gradients "
            "and moments"
        )
    reporter.note(f"memory     {_memory(config, trainer)}")
    data, length = config.data, config.data.sequence_length
    per_step, steps = config.rows_per_step * length, config.schedule.total
    ranks = "" if trainer.parts == 1 else f" × {trainer.parts} data-parallel ranks"
    reporter.note(
        f"batch      {data.micro_batch_size} × {length} tokens × {data.gradient_accumulation_steps}{ranks} "
        f"= {human(per_step)} a step; {steps} steps = {human(steps * per_step)} tokens, {epochs:.2f} epochs"
    )
    reporter.note(f"schedule   {_schedule(config)}")
    if config.optimizer.z_loss:
        reporter.note(f"loss       cross-entropy + {config.optimizer.z_loss:g} log²Z; held out, cross-entropy alone")


def _memory(config: TrainConfig, trainer: Trainer) -> str:
    """The planner's figure for the rank that needs most, and its parts."""
    predicted = predict(config, trainer)
    parts = {
        "weights": predicted.weights,
        "gradients": predicted.gradients,
        "optimizer": predicted.optimizer,
        "activations": predicted.activations,
        "buffers": predicted.buffers,
    }
    told = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size)
    card = look_at_card(config.device)
    of = "" if card is None else f" of the card's {card.total / 1e9:.4g} GB"
    return f"{predicted.total / 1e9:.3g} GB predicted{of}: {told}"


def _schedule(config: TrainConfig) -> str:
    settings, peak = config.schedule, config.optimizer.learning_rate
    last = settings.final_ratio * peak
    warmup = f"{settings.warmup_steps} steps of warm-up to {peak:.3g}, "
    if settings.shape != "wsd":
        return f"{warmup}then {settings.shape} to {last:.3g}"
    flat = settings.total - settings.warmup_steps - settings.cooldown_length
    return f"{warmup}{flat} at that, {settings.cooldown_length} of cool-down ({settings.cooldown}) to {last:.3g}"


def _how(config: TrainConfig) -> str:
    settings = config.parallel
    parts = []
    if settings.tp > 1 and settings.sequence_parallel:
        parts.append("sequence parallel")
    if settings.cp > 1:
        parts.append(f"{settings.context} attention")
    if settings.pp > 1:
        parts.append(f"schedule {settings.schedule}")
    return "".join(f", {part}" for part in parts)
