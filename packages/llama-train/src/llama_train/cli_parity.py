"""`llama-train parity`: a layout and one process train on the same batches; what differs, and by how much."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .config_checks import finite_and, require

if TYPE_CHECKING:
    from llama_core import LlamaConfig
    from llama_parallel import ParallelConfig, ParallelPlan
    from llama_parallel.parity import Record, Task

# Sums over ranks come in another order. float64 has 2e-16 and loses some 1e-14 of the largest element over three steps;
# float32 has 1e-7 and loses some 1e-5.
_TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
_MOST = 256
"""Processes that this command starts on one machine."""


@dataclass(frozen=True)
class ParityConfig:
    """Does a layout train the same model as one process? Three steps of a small one on both, from the same weights.

    Prints the largest difference of losses, and of every gradient and weight, relative to the largest element. Exits
    with 0 where all are within the tolerance, and with 1, naming the first parameter that differs, where they are not.
    On a CPU it starts the processes itself; under torchrun it uses those, and their GPUs.
    """

    world: int | None = None
    """Processes; unset means the product of the sizes below."""
    dp: int = 1
    """Data parallelism in shards (dp_shard)."""
    dp_replicate: int = 1
    """Data parallelism with whole copies."""
    tp: int = 1
    """Tensor parallelism."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallelism."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Of the pipeline."""
    context: Literal["ring", "ulysses"] = "ring"
    """How cp shares a sequence."""
    sequence_parallel: bool = True
    """Whether tp shares the sequence between products."""
    overlap_tp: bool = False
    """Whether what tp sends forward hides behind halves of products."""
    model: str = "tiny"
    """A preset of llama_core."""
    layers: int | None = None
    """Layers of it; unset means the preset's, or one for each pipeline stage if those are more."""
    dtype: Literal["float64", "float32"] = "float64"
    """In float64 a difference is a fault; float32 is a looser check."""
    steps: int = 3
    """Optimizer steps, by plain gradient descent, which hides nothing."""
    accumulation: int | None = None
    """Micro-batches of a step; unset means 2 for each pipeline stage."""
    sequence_length: int | None = None
    """Tokens in a row; unset means the least from 16 on that divides."""
    tolerance: float | None = None
    """Largest difference allowed; unset means 1e-10 in float64, 1e-4 in float32."""
    seed: int = 0
    """Of weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs under torchrun where there are some, and the CPU otherwise."""
    timeout: float = 600.0
    """Seconds for all of it."""

    def __post_init__(self) -> None:
        for name in ("world", "layers", "steps", "accumulation", "sequence_length"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
        require(self.tolerance is None or self.tolerance >= 0, "--tolerance", self.tolerance, "0 or more")
        require(finite_and(self.timeout, self.timeout > 0), "--timeout", self.timeout, "above 0")
        require(0 <= self.seed < 2**63, "--seed", self.seed, "0 to 2^63 - 1")


def main(arguments: list[str]) -> int:
    """Compare; 0 where nothing differs."""
    import tyro

    config = tyro.cli(ParityConfig, args=arguments, prog="llama-train parity")

    from llama_core import preset
    from llama_parallel import ParallelConfig, check_layout
    from llama_parallel.layout import describe
    from llama_parallel.schedules import stages_of_rank

    layout = ParallelConfig(config.dp_replicate, config.dp, config.cp, config.tp, config.pp)
    if config.world is not None:
        layout.check(config.world)
    starts = int(os.environ.get("WORLD_SIZE", "1")) == 1 and layout.num_processes > 1
    if starts and layout.num_processes > _MOST:
        raise ValueError(f"the sizes make {layout.num_processes} processes; on one CPU they must make 1 to {_MOST}")
    stages = config.pp * stages_of_rank(config.schedule, None) if config.pp > 1 else 1
    shape = preset(config.model)
    shape = shape.replace(num_hidden_layers=config.layers or max(shape.num_hidden_layers, stages))
    accumulation = config.accumulation or (2 * config.pp if config.pp > 1 else 2)
    unit = 2 * config.cp * config.tp
    length = config.sequence_length or -(-16 // unit) * unit
    check_layout(
        layout,
        shape,
        sequence_length=length,
        global_batch=layout.dp * accumulation,
        context=config.context,
        sequence_parallel=config.sequence_parallel,
        schedule=config.schedule,
        micro_batches=accumulation,
    )
    task = _task(config, shape, length, layout.dp * accumulation, accumulation)
    if starts:
        main_process, records, device = True, *_forked(config, layout, task)
    else:
        main_process, records, device = _launched(config, layout, task)
    if not main_process:
        return 0

    from llama_parallel.parity import train_alone

    from .parity_report import report

    print(f"layout     {describe(layout)}: {layout.num_processes} processes, {_how(config)}")
    print(
        f"task       {config.model}, {shape.num_hidden_layers} layers, {config.dtype}; {config.steps} steps of "
        f"{layout.dp * accumulation} rows of {length} tokens, {accumulation} micro-batches a data-parallel rank"
    )
    tolerance = _TOLERANCE[config.dtype] if config.tolerance is None else config.tolerance
    text, fault = report(records, train_alone(task, device), tolerance)
    print(text, flush=True)
    if fault is not None:
        print(f"llama-train: {fault}", file=sys.stderr)
        return 1
    return 0


def _how(config: ParityConfig) -> str:
    parts = [f"schedule {config.schedule}"] if config.pp > 1 else []
    parts += [f"{config.context} attention"] if config.cp > 1 else []
    return ", ".join(parts) or "one model in each"


def _task(config: ParityConfig, shape: LlamaConfig, length: int, rows: int, accumulation: int) -> Task:
    """Random tokens; rows have unequal numbers of unmasked targets, and some have none."""
    import torch

    from llama_parallel.parity import Task

    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(0, shape.vocab_size, (config.steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in range(rows):
        targets[:, row, : length - row % (length + 1)] = -100
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    # Weights of the usual 0.02 leave logits almost flat, and hide errors.
    wide = shape.replace(initializer_range=0.2)
    return Task(wide, tokens[..., :-1].contiguous(), targets, accumulation, seed=config.seed, dtype=dtype)


def _plan(config: ParityConfig) -> ParallelPlan:
    from llama_parallel import ParallelPlan

    return ParallelPlan(
        sequence_parallel=config.sequence_parallel,
        overlap_tp=config.overlap_tp,
        context=config.context,
        schedule=config.schedule,
    )


def _forked(config: ParityConfig, layout: ParallelConfig, task: Task) -> tuple[list[Record], str]:
    """One process on the CPU for each rank, forked from this one."""
    import torch

    from llama_parallel.parity import Record, train_on_ranks
    from llama_parallel.testing import RankError as Failure
    from llama_parallel.testing import run_ranks

    from .failures import RankError

    if config.device == "cuda":
        raise ValueError(
            "--device cuda needs one process for each GPU: torchrun --nproc-per-node N -m llama_train parity"
        )
    plan = _plan(config)
    torch.set_num_threads(1)

    def work(rank: int) -> Record:
        record = train_on_ranks(rank, task, layout, plan)
        return record if rank == 0 else Record(parts=record.parts)  # the rest is alike

    try:
        return run_ranks(work, layout.num_processes, timeout=config.timeout), "cpu"
    except Failure as error:
        raise RankError(str(error)) from None


def _launched(config: ParityConfig, layout: ParallelConfig, task: Task) -> tuple[bool, list[Record], str]:
    """The processes that torchrun started, or this one alone."""
    import torch

    from llama_parallel.parity import Record, train_alone, train_on_ranks

    from .layout_choice import which_process
    from .world import enter_world

    process, plan = which_process(), _plan(config)
    layout.check(process.world_size)
    gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", process.local_rank) if gpu else torch.device("cpu")
    if process.world_size == 1:
        return True, [train_alone(task, device)], str(device)
    with enter_world(process, device, config.timeout) as world:
        record = train_on_ranks(process.rank, task, layout, plan, str(device))
        parts = world.gather(record.parts)
        records = [record, *(Record(parts=of_rank) for of_rank in parts[1:])]
        return world.is_main, records, str(device)
