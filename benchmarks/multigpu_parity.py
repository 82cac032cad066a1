"""Every layout that fits some GPUs against one process: small shapes, float64, real links."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from multigpu_jobs import Rank

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan
from llama_parallel.layout import describe
from llama_parallel.parity import Task, differences, train_alone, train_on_ranks
from llama_parallel.schedules import SCHEDULES

TOLERANCE = 1e-10
"""As in llama-parallel's tests: in float64 another order of sums changes results by about 1e-14."""

MODEL = LlamaConfig(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One layout, and how it is used."""

    layout: ParallelConfig
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    packed: bool = False
    tied: bool = False

    @property
    def name(self) -> str:
        plan, words = self.plan, [describe(self.layout)]
        if self.layout.pp > 1:
            words.append(plan.schedule)
        if self.layout.cp > 1:
            words.append(plan.context)
        if not plan.sequence_parallel:
            words.append("without sequence parallelism")
        if plan.overlap_tp:
            words.append("overlapped")
        if plan.activation_checkpointing != "none":
            words.append(f"{plan.activation_checkpointing} checkpointing")
        return ", ".join([*words, *(["packed documents"] * self.packed), *(["tied"] * self.tied)])


@dataclass(frozen=True)
class Found:
    """The largest difference of a case, and of what."""

    name: str
    worst: float
    where: str
    seconds: float

    @property
    def right(self) -> bool:
        return self.worst <= TOLERANCE


def cases(gpus: int) -> list[Case]:
    """All kinds alone, then what fits of mixtures of two in each dimension."""
    if gpus == 1:
        return [Case(ParallelConfig())]
    ring, ulysses = ParallelPlan(context="ring"), ParallelPlan(context="ulysses")
    n, found = gpus, []
    found += [Case(ParallelConfig(dp_replicate=n)), Case(ParallelConfig(dp_shard=n))]
    found += [Case(ParallelConfig(tp=n)), Case(ParallelConfig(tp=n), ParallelPlan(sequence_parallel=False))]
    found.append(Case(ParallelConfig(tp=n), ParallelPlan(overlap_tp=True)))
    found += [Case(ParallelConfig(cp=n), plan, packed) for plan in (ring, ulysses) for packed in (False, True)]
    pipelines = [ParallelPlan(schedule=name) for name in SCHEDULES if n < 8 or name != "interleaved_1f1b"]
    found += [Case(ParallelConfig(pp=n), plan) for plan in pipelines]
    found += [Case(ParallelConfig(pp=n), tied=True), Case(ParallelConfig(tp=n), tied=True)]
    found.append(Case(ParallelConfig(dp_shard=n), ParallelPlan(activation_checkpointing="selective")))
    zero = ParallelPlan(schedule="zero_bubble")
    if n in (4, 8):
        half = n // 2
        found += [
            Case(ParallelConfig(dp_replicate=2, dp_shard=half)),
            Case(ParallelConfig(dp_replicate=half, tp=2)),
            Case(ParallelConfig(dp_shard=half, tp=2), ParallelPlan(activation_checkpointing="full")),
            Case(ParallelConfig(dp_shard=2, cp=half), ring, packed=True),
            Case(ParallelConfig(tp=2, cp=half), ulysses),
            Case(ParallelConfig(tp=half, pp=2), zero, tied=True),
            Case(ParallelConfig(dp_shard=half, pp=2), ParallelPlan(schedule="interleaved_1f1b")),
        ]
    if n == 8:
        found += [
            Case(ParallelConfig(dp_shard=2, tp=2, pp=2), zero),
            Case(ParallelConfig(dp_shard=2, tp=2, cp=2), ring, packed=True),
            Case(ParallelConfig(dp_replicate=2, dp_shard=2, tp=2)),
            Case(ParallelConfig(cp=2, tp=2, pp=2), ring, packed=True),
        ]
    return found


def task(case: Case, gpus: int) -> Task:
    """Two steps; row r has as many unmasked tokens as 4 r: ranks and micro-batches differ, and the first row has none.

    As many micro-batches as a pipeline over all GPUs wants, one row each.
    """
    count = max(2, 2 * case.layout.pp)
    rows, length, steps = case.layout.dp * count, 4 * gpus * max(1, 4 // gpus), 2
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MODEL.vocab_size, (steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in range(rows):
        targets[:, row, : max(0, length - 4 * row)] = -100
    documents = None
    if case.packed:
        documents = (torch.randint(0, 5, (steps, rows, length), generator=generator) == 0).long().cumsum(-1)
    model = MODEL.replace(tie_word_embeddings=case.tied)
    return Task(model, tokens[..., :-1].contiguous(), targets, count, documents=documents)


def compare(rank: Rank, todo: list[Case]) -> None:
    """Say what is found of each case as soon as it is."""
    for case in todo:
        begun, job = time.perf_counter(), task(case, rank.size)
        record = train_on_ranks(rank.number, job, case.layout, case.plan, str(rank.device))
        if rank.number == 0:
            wrong = differences(record, train_alone(job, rank.device))
            where = max(wrong, key=lambda key: wrong[key])
            rank.say(Found(case.name, wrong[where], where, time.perf_counter() - begun))
