"""Every pipeline equals one process in float64: initial bits, losses, gradients, norms, weights after three steps."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig, causal_attend
from llama_parallel import MicroBatch, ParallelConfig, ParallelPlan, accumulate_gradients
from llama_parallel.layout import describe
from llama_parallel.parity import (
    Record,
    Task,
    _everywhere,
    _gradients,
    differences,
    make_parallel,
    relative,
    shares,
    train_alone,
    train_on_ranks,
)
from llama_parallel.testing import RankError, run_ranks

# As in test_parallel.py: sums are taken in another order, by which results differ by about 1e-14.
TOLERANCE = 1e-10

FIVE = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
PP2, PP4 = ParallelConfig(pp=2), ParallelConfig(pp=4)
GPIPE, ONE, ZERO = ParallelPlan(schedule="gpipe"), ParallelPlan(), ParallelPlan(schedule="zero_bubble")
INTERLEAVED = ParallelPlan(schedule="interleaved_1f1b")


def task(rows: int = 4, length: int = 8, steps: int = 3, packed: bool = False, **changes: Any) -> Task:
    """Row r has as many unmasked tokens as 2 r: ranks and micro-batches differ, and the first row has none."""
    options = {name: changes.pop(name) for name in ("accumulation", "max_norm", "prepare") if name in changes}
    model = FIVE.replace(**changes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in range(rows):
        targets[:, row, : max(0, length - 2 * row)] = -100
    documents = None
    if packed:
        beginnings = torch.randint(0, 3, (steps, rows, length), generator=generator) == 0
        documents = beginnings.long().cumsum(-1)
    return Task(model, tokens[..., :-1].contiguous(), targets, documents=documents, **options)


def check(job: Task, layout: ParallelConfig, plan: ParallelPlan | None = None) -> list[Record]:
    wanted = train_alone(job)
    records: list[Record] = run_ranks(train_on_ranks, layout.num_processes, job, layout, plan)
    for record in records:
        assert record.initial.keys() == wanted.initial.keys()
        for name, weight in wanted.initial.items():
            assert torch.equal(record.initial[name], weight), f"initial {name}"
        wrong = {key: value for key, value in differences(record, wanted).items() if value > TOLERANCE}
        assert not wrong
    held: dict[tuple[str, tuple[int, ...]], str] = {}
    for record in records:  # what several ranks hold (the two ends a tied matrix, too) they hold alike to the bit
        for name, (offsets, digest) in record.parts.items():
            assert held.setdefault((name, offsets), digest) == digest, f"replicas of {name} differ"
    assert {name for name, _ in held} == set(wanted.weights)
    assert max(abs(w - wanted.initial[n]).max() for n, w in wanted.weights.items()) > 1e-3  # it did learn
    return records


def name_of(value: object) -> str | None:
    if isinstance(value, ParallelPlan):
        return value.schedule
    return describe(value) if isinstance(value, ParallelConfig) else None


@pytest.mark.parametrize("plan", [GPIPE, ONE, INTERLEAVED, ZERO], ids=name_of)
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (PP2, {}),
        (ParallelConfig(pp=2, dp_shard=2), TIED),
        (ParallelConfig(pp=2, tp=2), BIASED | TIED),
    ],
    ids=name_of,
)
def test_schedules(plan: ParallelPlan, layout: ParallelConfig, changes: dict[str, Any]) -> None:
    check(task(rows=8, accumulation=4, **changes), layout, plan)


@pytest.mark.parametrize(
    ("layout", "plan", "accumulation", "changes"),
    [
        (PP4, ONE, 4, TIED),  # five layers over four stages
        (PP4, INTERLEAVED, 4, BIASED | {"num_hidden_layers": 9}),
        (PP4, ZERO, 8, {}),
        (PP2, replace(ZERO, virtual_stages=2), 4, TIED),
        (PP2, replace(ONE, layers_per_stage=(1, 4)), 2, {}),
        (PP2, replace(INTERLEAVED, virtual_stages=2, layers_per_stage=(1, 2, 1, 1)), 2, {}),
        (ParallelConfig(pp=2, dp_replicate=2), GPIPE, 4, TIED),
        (ParallelConfig(pp=2, dp_replicate=2), ZERO, 2, {}),
        (ParallelConfig(pp=2, dp_replicate=2, dp_shard=2), ONE, 2, TIED),
        (ParallelConfig(pp=2, dp_shard=2), replace(ONE, reshard_after_forward=True), 4, {}),
        (ParallelConfig(pp=2, tp=2), replace(ONE, sequence_parallel=False), 2, {}),
        (ParallelConfig(pp=2, tp=4), ONE, 2, TIED),  # fewer key/value heads than ranks
        (PP2, replace(ONE, activation_checkpointing="full"), 2, {}),
        (ParallelConfig(pp=2, tp=2), replace(ZERO, activation_checkpointing="full"), 2, BIASED),
        (ParallelConfig(pp=2, dp_shard=2), replace(INTERLEAVED, activation_checkpointing="selective"), 2, {}),
        (PP2, replace(ZERO, activation_checkpointing="selective"), 2, {}),
    ],
    ids=name_of,
)
def test_stages_and_plans(
    layout: ParallelConfig, plan: ParallelPlan, accumulation: int, changes: dict[str, Any]
) -> None:
    check(task(rows=8, steps=2, accumulation=accumulation, **changes), layout, plan)


def test_eight_ranks() -> None:
    check(task(rows=8, accumulation=2, steps=2, **TIED), ParallelConfig(pp=2, dp_shard=2, tp=2))


@pytest.mark.parametrize("plan", [GPIPE, ONE, INTERLEAVED, ZERO], ids=name_of)
def test_fewer_micro_batches_than_stages(plan: ParallelPlan) -> None:
    check(task(steps=2, accumulation=1), PP2, plan)


@pytest.mark.parametrize("plan", [ONE, INTERLEAVED], ids=name_of)
@pytest.mark.parametrize("layout", [PP2, ParallelConfig(pp=2, tp=2)], ids=describe)
def test_packed_documents_and_their_positions_reach_every_stage(layout: ParallelConfig, plan: ParallelPlan) -> None:
    check(task(steps=2, accumulation=2, packed=True), layout, plan)


@pytest.mark.parametrize("plan", [GPIPE, ONE], ids=name_of)
@pytest.mark.parametrize("accumulation", [4, 1])
@pytest.mark.parametrize(
    "layout", [ParallelConfig(pp=2, dp_replicate=2), ParallelConfig(pp=2, dp_shard=2)], ids=name_of
)
def test_b32_replicas_do_not_drift_apart(layout: ParallelConfig, accumulation: int, plan: ParallelPlan) -> None:
    """Gradients are summed over replicas in every stage, the last included; ranks seeded differently start alike."""
    job = task(rows=8, accumulation=accumulation, num_hidden_layers=2)
    wanted = train_alone(job)

    def work(rank: int) -> Record:
        torch.manual_seed(rank)
        return train_on_ranks(rank, job, layout, plan)

    records = run_ranks(work, 4)
    for one, other in (records[:2], records[2:]):  # the two replicas of a stage
        for name in one.weights:
            assert torch.equal(one.weights[name], other.weights[name]), name
    for record in records:
        assert max(differences(record, wanted).values()) < TOLERANCE


@pytest.mark.parametrize("plan", [GPIPE, ONE, INTERLEAVED, ZERO], ids=name_of)
@pytest.mark.parametrize(
    "layout", [PP2, ParallelConfig(pp=2, dp_shard=2), ParallelConfig(pp=2, dp_replicate=2)], ids=name_of
)
def test_b33_a_second_call_leaves_the_first_alone(layout: ParallelConfig, plan: ParallelPlan) -> None:
    """Two calls of four micro-batches each: gradients add up, none is divided again; tied ends are summed once."""
    job = task(rows=8, steps=2, accumulation=4, **TIED)
    masked = torch.full_like(job.targets[0], -100)

    def work(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for then in ((job.tokens[1], job.targets[1]), (job.tokens[1], masked)):
            parallel = make_parallel(job, layout, plan)
            for tokens, targets in ((job.tokens[0], job.targets[0]), then):
                accumulate_gradients(parallel, shares(parallel, tokens, targets, job.accumulation))
            found.append(_everywhere(parallel, _gradients(parallel.model)))
        return found

    first = train_alone(replace(job, tokens=job.tokens[:1], targets=job.targets[:1])).gradients
    second = train_alone(replace(job, tokens=job.tokens[1:], targets=job.targets[1:])).gradients
    for both, alone in run_ranks(work, layout.num_processes):
        for name in first:
            assert relative(both[name], first[name] + second[name]) < TOLERANCE, name
            assert relative(alone[name], first[name]) < TOLERANCE, name


def test_b33_eight_micro_batches_are_one_batch_of_eight_rows() -> None:
    job = task(rows=8, length=16, accumulation=8)
    for row in range(8):
        job.targets[:, row, : 15 - row] = -100  # 1 … 8 labels
    check(job, PP2)


def test_b35_norm_and_clipping_over_tp_and_pp() -> None:
    def prepare(model: Llama) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("norm.weight"):
                    p.fill_(5.0)

    job = task(max_norm=0.05, prepare=prepare, num_hidden_layers=2, **TIED)
    records = check(job, ParallelConfig(pp=2, tp=2))
    assert min(records[0].norms) > 0.5
    assert len({tuple(record.norms) for record in records}) == 1


def test_no_unmasked_token_at_all() -> None:
    job = task(steps=1, accumulation=2)
    job.targets[:] = -100

    def work(rank: int) -> tuple[list[float], list[float]]:
        record = train_on_ranks(rank, job, PP2)
        return record.losses, record.norms

    assert run_ranks(work, 2) == [([0.0], [0.0])] * 2


def test_steps_may_change_their_shape() -> None:
    """torch's buffers have one size; another number or length of micro-batches gets new ones."""
    jobs = [task(rows=4, accumulation=2), task(rows=4, length=12, accumulation=4), task(rows=4, accumulation=2)]

    def work(rank: int) -> list[float]:
        parallel = make_parallel(jobs[0], PP2)
        results = []
        for job in jobs:
            batches = shares(parallel, job.tokens[0], job.targets[0], job.accumulation)
            results.append(float(accumulate_gradients(parallel, batches)[0]))
        return results

    wanted = [train_alone(replace(job, tokens=job.tokens[:1], targets=job.targets[:1])).losses[0] for job in jobs]
    assert run_ranks(work, 2) == [pytest.approx(wanted, rel=TOLERANCE)] * 2


def test_what_cannot_run_says_so() -> None:
    def work(rank: int) -> list[str]:
        said = []
        parallel = make_parallel(task(), PP2, INTERLEAVED)
        short, long = (MicroBatch(x, x) for x in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 8).long()))
        for batches in ([short, long], [short] * 5, []):
            with pytest.raises(ValueError) as error:
                accumulate_gradients(parallel, batches)
            said.append(str(error.value))
        for plan in (
            replace(ZERO, compile=True),
            replace(ONE, virtual_stages=2),
            replace(INTERLEAVED, virtual_stages=3),
        ):
            with pytest.raises(ValueError) as error:
                make_parallel(task(), PP2, plan)
            said.append(str(error.value))
        return said

    for said in run_ranks(work, 2):
        assert "micro-batches of shapes [(1, 4), (1, 8)]" in said[0]
        assert "cannot run 5 micro-batches" in said[1]
        assert "no micro-batch" in said[2]
        assert "zero_bubble does not go with compile" in said[3]
        assert "1f1b has one stage on each rank" in said[4]
        assert "5 layers are fewer than 6 pipeline stages" in said[5]


# torch 2.15's own tracer looks at .grad of every tensor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers() -> None:
    plan = ParallelPlan(compile=True, compile_options={"backend": "aot_eager"})
    check(task(steps=1, accumulation=2, num_hidden_layers=2), PP2, plan)


@pytest.mark.parametrize("plan", [ONE, INTERLEAVED, ZERO], ids=name_of)
def test_mixed_precision(plan: ParallelPlan) -> None:
    """A smoke test: bfloat16's 2⁻⁹ for each of about ten roundings in a row."""
    job = replace(task(rows=8, steps=1, accumulation=2, **TIED), dtype=torch.float32)
    wanted = train_alone(job)
    mixed = replace(plan, compute_dtype=torch.bfloat16)
    for record in run_ranks(train_on_ranks, 4, job, ParallelConfig(pp=2, dp_shard=2), mixed):
        assert record.losses[0] == pytest.approx(wanted.losses[0], rel=0.02)
        for name, gradient in wanted.gradients.items():
            assert float((record.gradients[name] - gradient).norm() / gradient.norm()) < 0.1, name


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_a_stage_that_fails_ends_all(end: str) -> None:
    """In the middle of a schedule, while its neighbours wait for what it would send."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 4 and q.requires_grad:
            if end == "dies":
                os._exit(7)
            raise FloatingPointError("layer 4 has had enough")
        return causal_attend(layer, q, k, v)

    plan = ParallelPlan(attend=attend)
    expected = r"rank 3 of 4 (died with exit code 7|raised[\s\S]*FloatingPointError: layer 4 has had enough)"
    with pytest.raises(RankError, match=expected):
        run_ranks(train_on_ranks, 4, task(accumulation=4), PP4, plan)
