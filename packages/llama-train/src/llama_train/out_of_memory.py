"""What filled the memory, and which settings lower it: the message of a run that is out of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from llama_core import LlamaConfig
from llama_parallel.planner import Memory, Work, predict_memory

from .build import model_config
from .config import TrainConfig
from .layout_choice import keeps_float32, sizes
from .metrics import human
from .trainer import Trainer

_WORTH = 0.005  # of everything: what saves less is not named
_FRAGMENTED = 0.03  # of the card: from here on memory that the allocator holds and cannot use is worth a line


class OutOfMemory(RuntimeError):
    """The model or a step does not fit into memory."""


@dataclass
class Told:
    """What is known of the run so far; the loop fills it in."""

    trainer: Trainer | None = None


@dataclass(frozen=True)
class Card:
    """Bytes of a GPU."""

    total: int
    allocated: int
    """Held by tensors of this process."""
    reserved: int
    """Taken from the card by this process: allocated, and kept for what comes."""
    others: int
    """Taken by anything else."""


@contextmanager
def memory_told(config: TrainConfig) -> Iterator[Told]:
    """An allocation that fails is told as such, with what takes the memory and the settings that lower the need.

    Args:
        config: resolved.

    Raises:
        OutOfMemory: in place of the error of an allocation; other errors pass through.
    """
    told = Told()
    try:
        yield told
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        text = str(error)
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not short and "can't allocate memory" not in text and "not enough memory" not in text:
            raise
        raise OutOfMemory(explain(config, text, told.trainer, look_at_card(config.device))) from error


def look_at_card(device: str) -> Card | None:
    """The card in use; None on a CPU."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return Card(total, torch.cuda.memory_allocated(), reserved, max(0, total - free - reserved))


def explain(config: TrainConfig, text: str, trainer: Trainer | None, card: Card | None) -> str:
    """The whole message.

    Args:
        config: resolved.
        text: of the error.
        trainer: where there is one already.
        card: as it is now; None where nothing is known of it.
    """
    size = re.search(r"allocate ([\d.]+ ?\w+)", text)
    wanted = f" (asked for {_size(size[1])} more)" if size else ""
    lines = [f"out of memory on {config.device}{wanted}"]
    if card is not None:
        unused = _gb(card.reserved - card.allocated)
        lines.append(
            f"  of the card's {_gb(card.total)}: {_gb(card.allocated)} in tensors, {unused} reserved but unused, "
            f"{_gb(card.others)} taken by others"
        )
    work = work_of(config, trainer)
    predicted = _predict(work, config)
    measured = {} if trainer is None else _measure(trainer, card)
    lines.append(f"  {'':12}{'predicted':>12}{'now there':>12}")
    for part in (*(field.name for field in fields(predicted)), "total"):
        value = getattr(predicted, part)
        if value or part in measured:
            lines.append(f"  {part:12}{_gb(value):>12}{_gb(measured[part]) if part in measured else '':>12}")
    room = 0.0 if card is None else 0.97 * (card.total - card.others)
    lines.append("what lowers it, the cheapest first, with the prediction for all of it:")
    if card is not None and card.reserved - card.allocated > _FRAGMENTED * card.total:
        lines.append(
            f"  PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: costs nothing, and gives back much of "
            f"the {_gb(card.reserved - card.allocated)} reserved but unused"
        )
    for choice in _choices(config, work):
        total = _predict(choice.work, config).total
        if total < (1 - _WORTH) * predicted.total:
            fits = ", which fits" if total < room < predicted.total else ""
            lines.append(f"  {choice.settings}: {_gb(total)}{fits} ({choice.cost})")
    lines.append("  a smaller model")
    return "\n".join(lines)


def work_of(config: TrainConfig, trainer: Trainer | None = None) -> Work:
    """The run's step as the planner sees it."""
    data, settings = config.data, config.parallel
    shape: LlamaConfig
    if trainer is not None:
        shape = trainer.shape
    else:  # the tokenizer's own size of the vocabulary is not known yet
        shape = model_config(
            config.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length, bos_id=None, eos_id=None
        )
    layout = sizes(settings)
    precision: str = config.dtype
    if keeps_float32(config):
        precision = "mixed" if layout.num_processes > 1 else "master"
    return Work(
        model=shape,
        layout=layout,
        sequence_length=data.sequence_length,
        global_batch=config.rows_per_step,
        micro_batch=data.micro_batch_size,
        precision=precision,
        checkpointing=config.activation_checkpointing,
        schedule=settings.schedule,
        stages_per_rank=settings.virtual_stages or (2 if settings.schedule == "interleaved_1f1b" else 1),
        context=settings.context,
        sequence_parallel=settings.sequence_parallel,
        kernels=config.kernels == "auto" and config.device == "cuda",
    )


@dataclass(frozen=True)
class _Choice:
    settings: str
    work: Work
    cost: str


def _choices(config: TrainConfig, work: Work) -> list[_Choice]:
    """Changes of the settings, each by itself, the cheapest first."""
    data, found = config.data, []
    rows = work.micro_batch
    if rows > 1:
        part = next(factor for factor in range(2, rows + 1) if rows % factor == 0)
        found.append(
            _Choice(
                f"data.micro_batch_size = {rows // part}, data.gradient_accumulation_steps = "
                f"{part * data.gradient_accumulation_steps}",
                replace(work, micro_batch=rows // part),
                "the same step in smaller portions",
            )
        )
    for name, cost in (("selective", "some of the forward pass again"), ("full", "the forward pass twice")):
        if ("none", "selective", "full").index(name) > ("none", "selective", "full").index(work.checkpointing):
            setting = f'activation_checkpointing = "{name}"'
            found.append(_Choice(setting, replace(work, checkpointing=name), cost))
    if config.device == "cuda":
        found += _on_more_gpus(config, work)
    if config.optimizer.master_weights and config.dtype == "bfloat16":
        setting = "optimizer.master_weights = false"
        found.append(_Choice(setting, replace(work, precision="bfloat16"), "small updates are rounded away"))
    if work.sequence_length >= 2:
        half = work.sequence_length // 2
        found.append(_Choice(f"data.sequence_length = {half}", replace(work, sequence_length=half), "another task"))
    return found


def _on_more_gpus(config: TrainConfig, work: Work) -> list[_Choice]:
    """Twice as many, the same rows of a step."""
    layout, found = work.layout, []
    whole = config.data.rows_per_step
    precision = "mixed" if work.precision == "master" else work.precision
    if whole % 2 == 0:
        rows = work.micro_batch if config.data.gradient_accumulation_steps % 2 == 0 else work.micro_batch // 2
        shared = replace(layout, dp_shard=2 * layout.dp_shard)
        changed = replace(work, layout=shared, micro_batch=rows, precision=precision)
        setting = f"parallel.dp_shard = {shared.dp_shard} with {whole // 2} rows of a step on each"
        found.append(_Choice(setting, changed, f"{shared.num_processes} GPUs"))
    if (work.model.num_key_value_heads or work.model.num_attention_heads) % (2 * layout.tp) == 0:
        shared = replace(layout, tp=2 * layout.tp)
        changed = replace(work, layout=shared, precision=precision)
        found.append(_Choice(f"parallel.tp = {shared.tp}", changed, f"{shared.num_processes} GPUs"))
    shared = replace(layout, cp=2 * layout.cp)
    changed = replace(work, layout=shared, precision=precision)
    found.append(_Choice(f"parallel.cp = {shared.cp}", changed, f"{shared.num_processes} GPUs"))
    return found


def predict(config: TrainConfig, trainer: Trainer | None = None) -> Memory:
    """Peak of the rank that needs most, as the planner sees it.

    Args:
        config: resolved.
        trainer: where there is one already.
    """
    return _predict(work_of(config, trainer), config)


def _predict(work: Work, config: TrainConfig) -> Memory:
    memory = predict_memory(work) if config.device == "cuda" else predict_memory(work, workspace=0.0)
    if config.lora.rank:  # frozen weights have neither; the adapters' are next to nothing
        memory = replace(memory, gradients=0.0, optimizer=0.0)
    return memory


def _measure(trainer: Trainer, card: Card | None) -> dict[str, float]:
    """Bytes that are there at this moment, by the names of the prediction; the rest counts as activations."""

    def local(tensors: Iterator[Tensor]) -> float:
        return float(sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors))

    state = trainer.optimizer.state_dict()
    found = {
        "weights": local(iter(trainer.parameters.values())),
        "gradients": local(iter(trainer.optimizer.gradients())),
        "optimizer": local(iter(state.values())),
    }
    if card is not None:
        found["activations"] = max(0.0, card.allocated - sum(found.values()))
        found["total"] = float(card.allocated)
    return found


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size < 1e12 else f"{size / 1e12:.4g} TB"


def _size(text: str) -> str:
    match = re.fullmatch(r"([\d.]+) ?(\w+)", text)
    assert match is not None
    return f"{human(float(match[1]))}B" if match[2] == "bytes" else text
