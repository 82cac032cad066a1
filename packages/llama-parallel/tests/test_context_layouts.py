"""Every layout with cp trains as one process does, in float64: losses, gradients, norms, weights after some steps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_core import LlamaConfig, generate_naive
from llama_parallel import (
    MicroBatch,
    ParallelConfig,
    ParallelPlan,
    accumulate_gradients,
    full_logits,
    shard_sequence,
)
from llama_parallel.layout import describe
from llama_parallel.parity import (
    Record,
    Task,
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

T0 = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 4}
RING, ULYSSES = ParallelPlan(), ParallelPlan(context="ulysses")


def task(rows: int = 2, length: int = 16, steps: int = 2, packed: bool = False, **changes: Any) -> Task:
    """Rows differ in their unmasked tokens. Their middle half, which is what rank 1 of a ring of two has, has none."""
    options = {name: changes.pop(name) for name in ("accumulation", "max_norm") if name in changes}
    model = T0.replace(**changes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    targets[..., length // 4 : 3 * length // 4] = -100
    for row in range(1, rows):
        targets[:, row, : min(row, length // 4)] = -100
    documents = None
    if packed:
        beginnings = (
            [3, 5],
            [length - 3],
            [length // 2],
            [],
        )  # the longest reaches across all ranks' borders, or ends there
        documents = torch.zeros(steps, rows, length, dtype=torch.int64)
        for step in range(steps):
            for row in range(rows):
                documents[step, row, beginnings[(step + row) % 4]] = 1
        documents = documents.cumsum(-1) % 2  # a number used again is another document
    return Task(model, tokens[..., :-1].contiguous(), targets, documents=documents, **options)


def check(job: Task, layout: ParallelConfig, plan: ParallelPlan) -> None:
    wanted = train_alone(job)
    records: list[Record] = run_ranks(train_on_ranks, layout.num_processes, job, layout, plan)
    held: dict[tuple[str, tuple[int, ...]], str] = {}
    for record in records:
        for name, weight in wanted.initial.items():
            assert torch.equal(record.initial[name], weight), f"initial {name}"
        wrong = {key: value for key, value in differences(record, wanted).items() if not value <= TOLERANCE}
        assert not wrong
        for name, (offsets, digest) in record.parts.items():
            assert held.setdefault((name, offsets), digest) == digest, f"replicas of {name} differ"
    assert max(abs(w - wanted.initial[n]).max() for n, w in wanted.weights.items()) > 1e-3  # it did learn


def name_of(value: object) -> str | None:
    if isinstance(value, ParallelConfig):
        return describe(value)
    if isinstance(value, ParallelPlan):
        return f"{value.context} {value.activation_checkpointing}"
    return ",".join(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("layout", "plan", "changes"),
    [
        (ParallelConfig(cp=2), RING, {"packed": True, "steps": 3}),
        (ParallelConfig(cp=2), ULYSSES, {"packed": True, "steps": 3}),
        (ParallelConfig(cp=4), RING, {"tie_word_embeddings": True}),
        (ParallelConfig(cp=4), RING, {"packed": True, "num_key_value_heads": 1}),
        (ParallelConfig(cp=4), ULYSSES, {"attention_bias": True}),  # fewer key/value heads than ranks
        (ParallelConfig(cp=4), ULYSSES, {"packed": True}),
        (ParallelConfig(dp_shard=2, cp=2), RING, {"rows": 4, "packed": True, "accumulation": 2}),
        (ParallelConfig(dp_shard=2, cp=2), ULYSSES, {"rows": 4, "accumulation": 2}),
        (ParallelConfig(dp_replicate=2, cp=2), RING, {"rows": 4, "max_norm": 0.5}),
        (ParallelConfig(cp=2, tp=2), RING, {"packed": True, "attention_bias": True}),
        (ParallelConfig(cp=2, tp=2), ULYSSES, {"packed": True, "tie_word_embeddings": True}),
        (ParallelConfig(cp=2, tp=2), ParallelPlan(sequence_parallel=False), {"length": 12}),
    ],
    ids=name_of,
)
def test_layout_equals_one_process(layout: ParallelConfig, plan: ParallelPlan, changes: dict[str, Any]) -> None:
    check(task(**changes), layout, plan)


@pytest.mark.parametrize(
    ("layout", "plan", "changes"),
    [
        (ParallelConfig(dp_shard=2, cp=2, tp=2), RING, {"rows": 4, "packed": True, "accumulation": 2}),
        (ParallelConfig(cp=2, tp=4), ULYSSES, EIGHT | {"packed": True}),  # 2 key/value heads for 8 ranks
        (ParallelConfig(cp=4, tp=2), RING, EIGHT | {"packed": True}),
    ],
    ids=name_of,
)
def test_eight_ranks(layout: ParallelConfig, plan: ParallelPlan, changes: dict[str, Any]) -> None:
    check(task(steps=1, **changes), layout, plan)


@pytest.mark.parametrize("context", ["ring", "ulysses"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(mode: str, context: str) -> None:
    plan = ParallelPlan(context=context, activation_checkpointing=mode)
    check(task(steps=1, packed=True, rows=4, accumulation=2), ParallelConfig(dp_shard=2, cp=2), plan)


# torch 2.15's own tracer looks at .grad of every tensor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_compiled_layers(context: str) -> None:
    options = {"backend": "aot_eager"}
    plan = ParallelPlan(context=context, compile=True, compile_options=options, activation_checkpointing="selective")
    check(task(steps=1, packed=True), ParallelConfig(cp=2), plan)


def test_no_positions_means_those_of_the_whole_row() -> None:
    """A caller who only cuts tokens and targets gets the gradients of whole rows."""
    job = task(steps=1)

    def work(rank: int) -> float:
        parallel = make_parallel(job, ParallelConfig(cp=2))
        tokens, targets = (shard_sequence(x[0], parallel.mesh, "ring") for x in (job.tokens, job.targets))
        loss, _ = accumulate_gradients(parallel, [MicroBatch(tokens, targets)])
        return float(loss)

    assert run_ranks(work, 2) == [pytest.approx(train_alone(job).losses[0], rel=1e-12)] * 2


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(dp_shard=2)], ids=describe)
def test_packed_documents_without_context_parallelism(layout: ParallelConfig) -> None:
    check(task(packed=True), layout, RING)


@pytest.mark.parametrize("plan", [RING, ULYSSES], ids=name_of)
def test_logits_and_samples(plan: ParallelPlan) -> None:
    """Seven tokens divide over no ranks; a prompt of three over four pieces neither."""
    job, tokens = task(), torch.arange(14).view(2, 7)

    def work(rank: int, layout: ParallelConfig) -> tuple[Tensor, list[int]]:
        parallel = make_parallel(job, layout, plan)
        with torch.no_grad():
            logits = full_logits(parallel, tokens)
        return logits, generate_naive(partial(full_logits, parallel), [1, 2, 3], max_new_tokens=4)

    ((wanted, ids),) = run_ranks(work, 1, ParallelConfig())
    for logits, found in run_ranks(work, 4, ParallelConfig(cp=2, tp=2)):
        assert relative(logits, wanted) < TOLERANCE
        assert found == ids


def test_shares_of_the_harness() -> None:
    """A rank's documents and positions are cut as its tokens are; positions start anew in each document."""
    job = task(packed=True, steps=1)

    def work(rank: int) -> tuple[Any, ...]:
        (batch,) = shares(
            make_parallel(job, ParallelConfig(cp=2)), *(x[0] for x in (job.tokens, job.targets)), 1, job.documents[0]
        )
        return batch.positions, batch.documents, batch.tokens

    positions, documents, tokens = run_ranks(work, 2)[0]
    own = [*range(4), *range(12, 16)]
    assert torch.equal(tokens, job.tokens[0][:, own])
    assert documents.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 0, 7, 8, 9, 10], [0, 1, 2, 3, 12, 0, 1, 2]]
    with pytest.raises(RankError, match="a sequence of 14 tokens does not divide over cp 4"):
        run_ranks(train_on_ranks, 4, task(length=14), ParallelConfig(cp=4))
