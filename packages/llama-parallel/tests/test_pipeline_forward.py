"""Evaluation and samples through a pipeline, on every rank and for any length, and that they leave nothing stale."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig, PackedAttend, generate_naive, init_weights, positions_from_documents
from llama_parallel import (
    MicroBatch,
    Parallel,
    ParallelConfig,
    ParallelPlan,
    accumulate_gradients,
    build_mesh,
    clip_grad_norm_,
    full_logits,
    init_shards,
    mean_loss,
    nonfinite_gradients,
    parallelize,
)
from llama_parallel.layout import describe
from llama_parallel.testing import run_ranks

FOUR = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
TOKENS = torch.arange(14).view(2, 7)  # seven tokens divide over no two ranks
INTERLEAVED = ParallelPlan(schedule="interleaved_1f1b")
LAYOUTS = [
    (ParallelConfig(pp=2), ParallelPlan()),
    (ParallelConfig(pp=4), ParallelPlan()),
    (ParallelConfig(pp=2), INTERLEAVED),
    (ParallelConfig(pp=2, tp=2), ParallelPlan()),
    (ParallelConfig(pp=2, tp=2), replace(INTERLEAVED, sequence_parallel=False)),
    (ParallelConfig(pp=2, dp_shard=2), INTERLEAVED),
]


def alone() -> Llama:
    model = Llama(FOUR).double()
    init_weights(model, 3)
    return model


def make(layout: ParallelConfig, plan: ParallelPlan, shape: LlamaConfig = FOUR) -> Parallel:
    with torch.device("meta"):
        model = Llama(shape).double()
    parallel = parallelize(model, build_mesh(layout), plan)
    init_shards(model, 3, "cpu")
    return parallel


def batches(parallel: Parallel) -> list[MicroBatch]:
    """Of two shapes, packed, of which a data-parallel rank has its own; the second has nothing to predict."""
    first = parallel.mesh.get_local_rank("dp_shard")
    tokens = (torch.arange(24).view(3, 8) * 5 + 7 * first) % FOUR.vocab_size
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]).expand(3, 8)
    masked = torch.full((1, 4), -100)
    return [
        MicroBatch(tokens, (tokens + 1) % 131, positions_from_documents(documents), documents),
        MicroBatch(tokens[:1, :4], masked),
        MicroBatch(tokens[1:], tokens[1:]),
    ]


def loss_alone(model: Llama, parts: list[MicroBatch]) -> float:
    total, count = torch.zeros((), dtype=torch.float64), 0
    assert model.lm_head is not None
    for part in parts:
        attend = None if part.documents is None else PackedAttend(part.documents)
        hidden = model(part.tokens, part.positions, attend)
        total += model.ops.linear_cross_entropy(hidden, model.lm_head.weight, part.targets, reduction="sum")
        count += int((part.targets != -100).sum())
    return float(total.detach()) / count


@pytest.mark.parametrize(
    ("layout", "plan"), LAYOUTS, ids=lambda v: describe(v) if isinstance(v, ParallelConfig) else v.schedule
)
def test_logits_samples_and_losses_are_those_of_one_process(layout: ParallelConfig, plan: ParallelPlan) -> None:
    def work(rank: int) -> tuple[Any, ...]:
        parallel = make(layout, plan)
        logits = full_logits(parallel, TOKENS)
        ids = generate_naive(partial(full_logits, parallel), [1, 2, 3], max_new_tokens=4)
        loss, count = mean_loss(parallel, batches(parallel))
        return logits, ids, float(loss), int(count), batches(parallel)

    model = alone()
    with torch.no_grad():
        wanted = model.logits(model(TOKENS))
    samples = generate_naive(lambda tokens: model.logits(model(tokens)), [1, 2, 3], max_new_tokens=4)
    results = run_ranks(work, layout.num_processes)
    parts = [*results[0][4], *(results[layout.tp][4] if layout.dp_shard > 1 else [])]
    for logits, ids, loss, count, _ in results:
        torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-10)
        assert ids == samples
        assert loss == pytest.approx(loss_alone(model, parts), rel=1e-10)
        assert count == sum(int((part.targets != -100).sum()) for part in parts)


def test_losses_without_a_pipeline() -> None:
    def work(rank: int) -> tuple[float, list[MicroBatch]]:
        parallel = make(ParallelConfig(dp_shard=2), ParallelPlan())
        with pytest.raises(ValueError, match="there is no micro-batch"):
            mean_loss(parallel, [])
        return float(mean_loss(parallel, batches(parallel))[0]), batches(parallel)

    (first, one), (second, other) = run_ranks(work, 2)
    assert first == second == pytest.approx(loss_alone(alone(), one + other), rel=1e-10)


@pytest.mark.parametrize(
    "plan",
    [ParallelPlan(), INTERLEAVED, ParallelPlan(schedule="zero_bubble"), ParallelPlan(reshard_after_forward=True)],
    ids=lambda plan: plan.schedule,
)
def test_evaluation_between_steps_leaves_nothing_stale(plan: ParallelPlan) -> None:
    """FSDP keeps a stage's parameters gathered; those of before the optimizer's step must not be used after it."""

    def work(rank: int) -> list[float]:
        losses: list[float] = []
        for evaluate in (False, True):
            parallel = make(ParallelConfig(pp=2, dp_shard=2), plan)
            optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
            batch = [MicroBatch(TOKENS, TOKENS)] * 2
            for _ in range(3):
                if evaluate:
                    full_logits(parallel, TOKENS)
                    mean_loss(parallel, batch)
                loss, _ = accumulate_gradients(parallel, batch)
                losses.append(float(loss))
                if evaluate:
                    full_logits(parallel, TOKENS[:, :4])
                optimizer.step()
                optimizer.zero_grad()
        return losses

    for losses in run_ranks(work, 4):
        assert losses[:3] == losses[3:]
        assert losses[2] < losses[1] < losses[0]


def test_evaluation_without_resharding_leaves_nothing_stale_without_a_pipeline_either() -> None:
    def work(rank: int) -> tuple[float, float]:
        found = []
        for evaluate in (False, True):
            parallel = make(ParallelConfig(dp_shard=2), ParallelPlan(reshard_after_forward=False))
            optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
            batch = [MicroBatch(TOKENS, TOKENS)]
            accumulate_gradients(parallel, batch)
            if evaluate:
                mean_loss(parallel, batch)
            optimizer.step()
            found.append(float(accumulate_gradients(parallel, batch)[0]))
        return found[0], found[1]

    for without, with_evaluation in run_ranks(work, 2):
        assert without == with_evaluation


def test_a_gradient_that_is_not_finite_is_named_with_its_stage_everywhere() -> None:
    def work(rank: int) -> tuple[bool, list[str]]:
        parallel = make(ParallelConfig(pp=2), ParallelPlan())
        accumulate_gradients(parallel, [MicroBatch(TOKENS, TOKENS)])
        for name, p in parallel.model.named_parameters():
            if name == "model.layers.3.mlp.up_proj.weight":
                assert p.grad is not None
                p.grad[0, :2] = torch.tensor([float("nan"), float("inf")])
        norm: Tensor = clip_grad_norm_(parallel.model, float("inf"), parallel.mesh)
        return bool(norm.isfinite()), nonfinite_gradients(parallel.model, parallel.mesh)

    line = "rank 1: model.layers.3.mlp.up_proj.weight has 2 of 2048 elements not finite"
    assert run_ranks(work, 2) == [(False, [line])] * 2
