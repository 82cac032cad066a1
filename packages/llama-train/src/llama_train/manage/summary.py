"""One run in a row: what it was, how it stands, what it reached and how fast it went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from llama_train.config import ModelConfig, TrainConfig

from .history import Record, read_history
from .run_files import METRICS, last_checkpoint, settings_of
from .run_state import State, run_state

WARMUP_LINES = 3
"""Training lines at the beginning whose speed does not count: compilation, caches, the allocator. picotron drops as
many steps."""


@dataclass(frozen=True)
class Summary:
    """The row of a run. None: not known."""

    name: str
    """The folder, from where the search began."""
    state: State
    reason: str
    """Of a failure, in a line."""
    model: str
    layout: str
    processes: int | None
    device: str | None
    dtype: str | None
    rows_per_step: int | None
    sequence_length: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    step: int
    """Of the last line."""
    steps: int | None
    """Of the whole run."""
    tokens: int | None
    saved_step: int | None
    """Of the newest checkpoint."""
    seconds: float
    """Of training, pauses left out."""
    tokens_per_second: float | None
    """The median of the lines after the first WARMUP_LINES; of all lines where there are no more than those."""
    tokens_per_second_per_process: float | None
    mfu: float | None
    """0 to 1, the median of the same lines, by picotron's formula."""
    memory: int | None
    """The highest peak, bytes."""
    loss: float | None
    """The mean of the last lines: a tenth of all, at least one and at most 20."""
    held_out_loss: float | None
    """The last one."""
    best_held_out_loss: float | None
    damaged_lines: int

    @property
    def progress(self) -> str:
        """Steps made, of how many; a run that was stopped has saved later than its last line."""
        return f"{max(self.step, self.saved_step or 0)}/{self.steps if self.steps is not None else '?'}"


COLUMNS = tuple(item.name for item in fields(Summary))


def summarize(run: Path, root: Path) -> Summary:
    """The row of one run folder; `root` is where its name begins."""
    history = read_history(run / METRICS)
    config = settings_of(run)
    state, reason = run_state(run, history)
    processes = None if config is None else processes_of(config)
    speed = steady(history.train, "tokens_per_second")
    own = steady(history.train, "tokens_per_second_per_device")
    if own is None and speed is not None and processes is not None:
        own = speed / processes
    tail = history.curve("loss")[-min(20, max(1, len(history.train) // 10)) :]
    held_out = [loss for _, loss in history.curve("held_out")]
    memory = [value for _, value in history.curve("memory")]
    data = None if config is None else config.data
    return Summary(
        name=str(run.relative_to(root)) if run != root and run.is_relative_to(root) else run.resolve().name,
        state=state,
        reason=reason,
        model="?" if config is None else describe_model(config.model),
        layout="?" if config is None else describe_layout(config),
        processes=processes,
        device=None if config is None else config.device,
        dtype=None if config is None else config.dtype,
        rows_per_step=None if config is None else config.rows_per_step,
        sequence_length=None if data is None else data.sequence_length,
        micro_batch_size=None if data is None else data.micro_batch_size,
        gradient_accumulation_steps=None if data is None else data.gradient_accumulation_steps,
        step=history.last_step,
        steps=None if config is None else config.schedule.total,
        tokens=int(history.train[-1].get("tokens", 0)) if history.train else None,
        saved_step=last_checkpoint(run),
        seconds=history.seconds[-1] if history.train else 0.0,
        tokens_per_second=speed,
        tokens_per_second_per_process=own,
        mfu=steady(history.train, "mfu"),
        memory=int(max(memory)) if memory else None,
        loss=statistics.fmean(loss for _, loss in tail) if tail else None,
        held_out_loss=held_out[-1] if held_out else None,
        best_held_out_loss=min(held_out) if held_out else None,
        damaged_lines=history.damaged,
    )


def steady(records: Sequence[Record], key: str) -> float | None:
    """The median over the lines after warm-up that have a number; None where no line has one."""
    after = records[WARMUP_LINES:] or records
    values = [record[key] for record in after if key in record]
    return statistics.median(values) if values else None


def processes_of(config: TrainConfig) -> int:
    """Of a resolved layout; an open dp_shard (0) counts as one."""
    sizes = config.parallel
    return sizes.dp_replicate * max(1, sizes.dp_shard) * sizes.cp * sizes.tp * sizes.pp


def describe_layout(config: TrainConfig) -> str:
    """The sizes above 1, as "dp_shard 2 tp 2"; "one process"."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    sizes = [(name, getattr(config.parallel, name)) for name in names]
    return " ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one process"


def describe_model(model: ModelConfig) -> str:
    """Where the weights or the shape come from, and what was changed."""
    words = [Path(value).name for key, value in vars(model).items() if key != "preset" and isinstance(value, str)]
    if model.preset is not None:
        words.insert(0, model.preset)
    units = {"hidden_size": "wide", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    words += [f"{getattr(model, key)} {unit}" for key, unit in units.items() if getattr(model, key) is not None]
    return ", ".join(words) or "?"
