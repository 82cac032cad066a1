"""Every layout equals one process in float64: initial bits, losses, gradients, norms, weights after three steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core import Llama, LlamaConfig, preset
from llama_parallel import (
    MicroBatch,
    Parallel,
    ParallelConfig,
    ParallelPlan,
    accumulate_gradients,
    build_mesh,
    parallelize,
)
from llama_parallel.layout import describe
from llama_parallel.parity import (
    Record,
    Task,
    _gradients,
    differences,
    make_parallel,
    relative,
    shares,
    train_alone,
    train_on_ranks,
)
from llama_parallel.shards import local_parts
from llama_parallel.testing import run_ranks

# Sums over ranks are taken in another order than in one process: float64 has 2e-16, and gradients of three steps on
# this model differ by up to about 1e-14 of their largest element.
TOLERANCE = 1e-10

T0 = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
ODD: dict[str, Any] = {"vocab_size": 131}


def task(rows: int = 4, length: int = 8, steps: int = 3, accumulation: int = 1, **changes: Any) -> Task:
    model = T0.replace(**changes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in range(rows):  # as many unmasked tokens as the row's number: ranks differ, and the first rows have none
        targets[:, row, : max(0, length - 2 * row)] = -100
    return Task(model, tokens[..., :-1].contiguous(), targets, accumulation)


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
    for record in records:  # what several ranks hold, they hold alike to the bit
        for name, (offsets, digest) in record.parts.items():
            assert held.setdefault((name, offsets), digest) == digest, f"replicas of {name} differ"
    assert max(abs(w - wanted.initial[n]).max() for n, w in wanted.weights.items()) > 1e-3  # it did learn
    return records


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (ParallelConfig(tp=2), {}),
        (ParallelConfig(tp=2), BIASED | TIED),
        (ParallelConfig(tp=2), ODD),
        (ParallelConfig(tp=4), {}),  # fewer key/value heads than ranks
        (ParallelConfig(tp=4), BIASED | ODD | TIED),
        (ParallelConfig(tp=4), {"num_key_value_heads": 1} | BIASED),
        (ParallelConfig(dp_shard=2), {}),
        (ParallelConfig(dp_shard=2), BIASED | ODD | TIED),
        (ParallelConfig(dp_shard=4), {}),
        (ParallelConfig(dp_replicate=2), {}),
        (ParallelConfig(dp_replicate=4), TIED),
        (ParallelConfig(dp_replicate=2, dp_shard=2), {}),
        (ParallelConfig(dp_shard=2, tp=2), {}),
        (ParallelConfig(dp_shard=2, tp=2), BIASED | ODD | TIED),
        (ParallelConfig(dp_replicate=2, tp=2), BIASED),
        (ParallelConfig(), {}),
    ],
    ids=lambda value: describe(value) if isinstance(value, ParallelConfig) else ", ".join(value),
)
def test_layout_equals_one_process(layout: ParallelConfig, changes: dict[str, Any]) -> None:
    check(task(**changes), layout)


def test_eight_ranks() -> None:
    check(task(steps=1, **ODD, **BIASED), ParallelConfig(dp_replicate=2, dp_shard=2, tp=2))


@pytest.mark.parametrize(
    ("layout", "plan", "accumulation"),
    [
        (ParallelConfig(tp=2), ParallelPlan(sequence_parallel=False), 1),
        (ParallelConfig(tp=4), ParallelPlan(sequence_parallel=False, activation_checkpointing="full"), 1),
        (ParallelConfig(tp=2), ParallelPlan(activation_checkpointing="selective"), 2),
        (ParallelConfig(dp_shard=2, tp=2), ParallelPlan(activation_checkpointing="full"), 2),
        (ParallelConfig(dp_shard=2), ParallelPlan(activation_checkpointing="selective"), 4),
        (ParallelConfig(dp_shard=2), ParallelPlan(reshard_after_forward=False), 2),
        (ParallelConfig(dp_replicate=2), ParallelPlan(), 4),  # B32 without its pipeline
        (ParallelConfig(dp_replicate=2, dp_shard=2), ParallelPlan(), 2),
        (ParallelConfig(), ParallelPlan(compute_dtype=torch.float64), 4),
    ],
    ids=lambda value: describe(value) if isinstance(value, ParallelConfig) else None,
)
def test_plan_and_accumulation_change_nothing(layout: ParallelConfig, plan: ParallelPlan, accumulation: int) -> None:
    check(task(rows=8, steps=2, accumulation=accumulation, attention_bias=True), layout, plan)


# torch 2.15's own tracer looks at .grad of every tensor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers() -> None:
    """Each layer is one graph with its collectives in it; "aot_eager" traces like the default and needs no compiler."""
    plan = ParallelPlan(compile=True, compile_options={"backend": "aot_eager"}, activation_checkpointing="selective")
    check(task(steps=1, attention_bias=True), ParallelConfig(dp_shard=2, tp=2), plan)


@pytest.mark.parametrize(
    "layout", [ParallelConfig(dp_replicate=2), ParallelConfig(dp_shard=2), ParallelConfig(tp=2)], ids=describe
)
def test_b33_two_calls_add_up(layout: ParallelConfig) -> None:
    """What the first call summed over ranks is not summed again by the second."""
    job = task(steps=2)

    def work(rank: int) -> dict[str, Tensor]:
        parallel = make_parallel(job, layout)
        for tokens, targets in zip(job.tokens, job.targets, strict=True):
            accumulate_gradients(parallel, shares(parallel, tokens, targets))
        return _gradients(parallel.model)

    steps = (replace(job, tokens=job.tokens[at], targets=job.targets[at]) for at in (slice(0, 1), slice(1, 2)))
    first, second = (train_alone(step).gradients for step in steps)
    for found in run_ranks(work, 2):
        for name in first:
            assert relative(found[name], first[name] + second[name]) < TOLERANCE, name


def test_no_unmasked_token_at_all() -> None:
    job = task(steps=1)
    job.targets[:] = -100

    def work(rank: int) -> tuple[list[float], list[float]]:
        record = train_on_ranks(rank, job, ParallelConfig(dp_shard=2, tp=2))
        return record.losses, record.norms

    assert run_ranks(work, 4) == [([0.0], [0.0])] * 4


def test_gradients_need_a_micro_batch_and_a_head() -> None:
    parallel = Parallel(Llama(T0), None, ParallelPlan())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no micro-batch"):
        accumulate_gradients(parallel, [])
    parallel.model.lm_head = None
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="no output head"):
        accumulate_gradients(parallel, [MicroBatch(tokens, tokens)])


def test_a_missing_all_reduce_is_seen() -> None:
    """The comparison can fail: replicas that do not talk drift apart, and the first wrong gradient is named."""
    job = task()

    def work(rank: int) -> dict[str, float]:
        parallel = make_parallel(job, ParallelConfig(dp_replicate=2))
        parallel.set_gradient_sync(False)
        switched_off = replace(parallel, replication=None)  # out of reach of what would switch it on again
        accumulate_gradients(switched_off, shares(parallel, job.tokens[0], job.targets[0]))
        wanted = train_alone(job).gradients
        grads = {name: p.grad for name, p in parallel.model.named_parameters() if p.grad is not None}
        return {name: relative(grads[name], wanted[name]) for name in wanted}

    for off in run_ranks(work, 2):
        assert next(name for name, value in off.items() if value > TOLERANCE) == "model.embed_tokens.weight"
        assert max(off.values()) > 0.1


@pytest.mark.parametrize("layout", [ParallelConfig(dp_shard=8, tp=8), ParallelConfig(dp_shard=64)], ids=describe)
def test_a_70b_model_rests_in_even_parts_on_64_ranks(layout: ParallelConfig) -> None:
    """As one rank sees it, in a process group that only pretends, on the meta device: nothing is allocated or sent."""

    def work(rank: int) -> tuple[int, int]:
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=64)
        with torch.device("meta"):
            model = Llama(preset("llama-3-70b"))
        parallelize(model, build_mesh(layout), ParallelPlan(compute_dtype=torch.bfloat16))
        parts = [local.numel() for _, local, _, _ in local_parts(model)]
        return model.num_parameters(), sum(parts)

    ((whole, part),) = run_ranks(work, 1, backend=None)
    assert whole == 70_553_706_496
    # norms are whole on all ranks of tp: 161 of 8192 elements, in 8 shards instead of 64
    assert part == pytest.approx(whole / 64, rel=2e-4)
