"""Every layout of so many GPUs, what each needs and takes, and which to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_core import LlamaConfig
from llama_parallel.config import ParallelConfig
from llama_parallel.layout import check_layout
from llama_parallel.schedules import SCHEDULES, micro_batch_faults

from .cost import Cost, predict_cost
from .hardware import H100, Hardware
from .memory import Memory, predict_memory
from .work import PRECISIONS, Work

CHECKPOINTING = ("none", "selective", "full")
GB = 1e9


@dataclass(frozen=True)
class Candidate:
    """One way to train, with what it is predicted to need and to take."""

    work: Work
    memory: Memory
    cost: Cost

    @property
    def layout(self) -> ParallelConfig:
        """Sizes of the mesh."""
        return self.work.layout

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words: bytes, seconds, tokens/s."""
        work = self.work
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        return {
            **{name: getattr(self.layout, name) for name in names},
            "micro_batch": work.micro_batch,
            "micro_batches": work.micro_batches,
            "activation_checkpointing": work.checkpointing,
            "schedule": work.schedule if self.layout.pp > 1 else None,
            "stages_per_rank": work.stages_per_rank,
            "memory": {**vars(self.memory), "total": self.memory.total},
            "step_seconds": self.cost.step,
            "seconds": {
                "compute": self.cost.compute,
                "exposed_communication": self.cost.exposed,
                "bubble": self.cost.bubble,
                "optimizer": self.cost.optimizer,
                "communication": dict(self.cost.communication),
            },
            "sent_bytes": dict(self.cost.sent),
            "tokens_per_second_per_gpu": self.cost.tokens_per_second,
            "mfu": self.cost.mfu,
        }


@dataclass(frozen=True)
class Plan:
    """What was asked, and the answers."""

    model: LlamaConfig
    gpus: int
    gpu_memory: float
    """GB of 10⁹ bytes."""
    sequence_length: int
    global_batch: int
    precision: str
    hardware: Hardware
    candidates: tuple[Candidate, ...]
    """All that fit, the fastest first; of each layout the best of its settings."""
    smallest: Candidate | None
    """The one that needs least memory, whether it fits or not; None: no layout of so many GPUs can run the model."""
    advice: tuple[str, ...]
    """Why the first is recommended; if none fits, what would."""

    @property
    def best(self) -> Candidate | None:
        """The recommended one; None: nothing fits."""
        return self.candidates[0] if self.candidates else None

    def to_dict(self, limit: int = 10) -> dict[str, Any]:
        """For JSON: the question, the first `limit` candidates, the advice."""
        return {
            "gpus": self.gpus,
            "gpu_memory": self.gpu_memory,
            "sequence_length": self.sequence_length,
            "global_batch": self.global_batch,
            "precision": self.precision,
            "fits": bool(self.candidates),
            "candidates": [candidate.to_dict() for candidate in self.candidates[:limit]],
            "smallest": None if self.smallest is None else self.smallest.to_dict(),
            "advice": list(self.advice),
        }


def plan(
    model: LlamaConfig,
    gpus: int,
    gpu_memory: float,
    sequence_length: int,
    global_batch: int,
    *,
    precision: str = "mixed",
    kernels: bool = True,
    hardware: Hardware = H100,
    checkpointing: Sequence[str] = CHECKPOINTING,
    schedules: Sequence[str] = SCHEDULES,
    micro_batch: int | None = None,
    reserve: float = 0.05,
    advised: bool = True,
) -> Plan:
    """Which layouts of `gpus` GPUs can train the model, what they need, how fast they are, and which to use.

    Args:
        model: its shape.
        gpus: how many.
        gpu_memory: of each, in GB of 10⁹ bytes.
        sequence_length: tokens of a row.
        global_batch: rows of one optimizer step.
        precision: one of PRECISIONS: "mixed", "master", "bfloat16", "float32".
        kernels: llama_kernels' operations, as on a GPU; otherwise the plain ones.
        hardware: rates of the GPU and its links.
        checkpointing: forms of activation checkpointing to consider.
        schedules: pipeline schedules to consider.
        micro_batch: rows at once; `None` considers powers of two.
        reserve: part of the memory that stays free: the driver's context, the communication library's buffers.
        advised: whether to say why, or what would fit instead, which takes a few more searches.

    Returns:
        Candidates that fit, the fastest first; without any, the one that needs least, and what would fit.

    Raises:
        ValueError: a number that is not above 0, or an unknown name.
    """
    for name, value in (("gpus", gpus), ("sequence_length", sequence_length), ("global_batch", global_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1")
    if not 0 < gpu_memory < float("inf"):
        raise ValueError(f"gpu_memory = {gpu_memory!r}: must be above 0 (GB)")
    for name, values, known in (
        ("precision", [precision], tuple(PRECISIONS)),
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("schedules", schedules, SCHEDULES),
    ):
        for word in values:
            if word not in known:
                raise ValueError(f"{name}: {word!r} is unknown; choose from {', '.join(known)}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch = {micro_batch}: must be at least 1")

    room = gpu_memory * GB * (1 - reserve)
    best: dict[ParallelConfig, Candidate] = {}
    smallest: tuple[float, Work] | None = None
    base = Work(model, ParallelConfig(), sequence_length, global_batch, precision=precision, kernels=kernels)
    for layout in layouts(model, gpus, sequence_length, global_batch, hardware.gpus_per_node):
        for work in _settings(replace(base, layout=layout), checkpointing, schedules, micro_batch):
            memory = predict_memory(work)
            if smallest is None or memory.total < smallest[0]:
                smallest = memory.total, work
            if memory.total > room:
                continue
            found = Candidate(work, memory, predict_cost(work, hardware))
            if layout not in best or _rank(found) < _rank(best[layout]):
                best[layout] = found
    candidates = tuple(sorted(best.values(), key=_rank))
    least = None if smallest is None else _candidate(smallest[1], hardware)
    result = Plan(model, gpus, gpu_memory, sequence_length, global_batch, precision, hardware, candidates, least, ())
    if not advised:
        return result
    from .advice import advise  # here: it searches again, with this function

    return replace(result, advice=advise(result, room))


def _candidate(work: Work, hardware: Hardware) -> Candidate:
    return Candidate(work, predict_memory(work), predict_cost(work, hardware))


def _rank(candidate: Candidate) -> tuple[float, float]:
    """The fastest first; among equally fast ones that which needs least memory."""
    return candidate.cost.step, candidate.memory.total


def layouts(
    model: LlamaConfig, gpus: int, sequence_length: int, global_batch: int, gpus_per_node: int
) -> Iterator[ParallelConfig]:
    """All layouts that `check_layout` accepts, tensor parallelism kept inside a host."""
    for tp in _divisors(gpus):
        if tp > gpus_per_node:
            continue
        for pp in _divisors(gpus // tp):
            if pp > model.num_hidden_layers:
                continue
            for cp in _divisors(gpus // tp // pp):
                data = gpus // tp // pp // cp
                for dp_shard in _divisors(data):
                    layout = ParallelConfig(dp_replicate=data // dp_shard, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp)
                    if _runs(layout, model, sequence_length, global_batch):
                        yield layout


def _runs(layout: ParallelConfig, model: LlamaConfig, sequence_length: int, global_batch: int) -> bool:
    if global_batch % layout.dp:
        return False  # the commonest reason, without the search for neighbours that check_layout's message needs
    try:
        check_layout(layout, model, sequence_length=sequence_length, global_batch=global_batch)
    except ValueError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _settings(
    work: Work, checkpointing: Sequence[str], schedules: Sequence[str], micro_batch: int | None
) -> Iterator[Work]:
    rows = work.global_batch // work.layout.dp
    sizes = [2**power for power in range(rows.bit_length())] if micro_batch is None else [micro_batch]
    pp = work.layout.pp
    for size in sizes:
        if rows % size:
            continue
        for mode in checkpointing:
            for schedule in schedules if pp > 1 else ("1f1b",):
                for chunks in _chunks(work, schedule, rows // size):
                    yield replace(work, micro_batch=size, checkpointing=mode, schedule=schedule, stages_per_rank=chunks)


def _chunks(work: Work, schedule: str, micro_batches: int) -> tuple[int, ...]:
    """Stages of a rank that a schedule can have with so many micro-batches."""
    pp = work.layout.pp
    if any(micro_batch_faults(schedule, pp, micro_batches)):
        return ()
    wanted = {"interleaved_1f1b": (2, 4)}.get(schedule, (1,))
    return tuple(count for count in wanted if pp * count <= work.model.num_hidden_layers)
