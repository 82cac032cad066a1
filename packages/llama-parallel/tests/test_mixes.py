"""Three and four kinds of parallelism at once, on 8 and 16 ranks, against one process in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan
from llama_parallel.layout import describe
from llama_parallel.parity import Task, differences, train_alone, train_on_ranks
from llama_parallel.testing import run_ranks

# As in test_parallel.py: sums are taken in another order, by which results differ by about 1e-14.
TOLERANCE = 1e-10

T0 = LlamaConfig(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
PACKED: dict[str, Any] = {"packed": True}
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
PLAN = ParallelPlan()
ULYSSES = replace(PLAN, context="ulysses")
INTERLEAVED = replace(PLAN, schedule="interleaved_1f1b")
ZERO = replace(PLAN, schedule="zero_bubble")
GPIPE = replace(PLAN, schedule="gpipe")


def task(accumulation: int, packed: bool = False, **changes: Any) -> Task:
    """Two steps of 4 rows for each micro-batch number; row r has 2 r unmasked tokens, so the first has none."""
    rows, length, steps = 4 * accumulation, 16, 2
    generator = torch.Generator().manual_seed(1)
    model = T0.replace(**changes)
    tokens = torch.randint(0, model.vocab_size, (steps, rows, length + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in range(rows):
        targets[:, row, : max(0, length - 2 * row)] = -100
    documents = None
    if packed:
        documents = (torch.randint(0, 5, (steps, rows, length), generator=generator) == 0).long().cumsum(-1)
    return Task(model, tokens[..., :-1].contiguous(), targets, accumulation, documents=documents)


@pytest.mark.parametrize(
    ("layout", "plan", "accumulation", "changes"),
    [
        # 8 ranks, three kinds
        (ParallelConfig(dp_shard=2, tp=2, pp=2), ZERO, 2, TIED),
        (ParallelConfig(dp_shard=2, tp=2, cp=2), PLAN, 1, BIASED | PACKED),
        (ParallelConfig(dp_shard=2, cp=2, pp=2), INTERLEAVED, 2, FOUR | PACKED),
        (ParallelConfig(tp=2, cp=2, pp=2), GPIPE, 2, TIED | BIASED),
        (ParallelConfig(dp_replicate=2, cp=2, pp=2), ULYSSES, 2, PACKED),
        (ParallelConfig(dp_replicate=2, tp=2, pp=2), INTERLEAVED, 2, FOUR | TIED),
        # 16 ranks, three and four kinds
        (ParallelConfig(dp_shard=2, tp=2, pp=2, cp=2), PLAN, 2, TIED | PACKED),
        (ParallelConfig(dp_replicate=2, tp=2, pp=2, cp=2), replace(ULYSSES, schedule="zero_bubble"), 2, TIED),
        (ParallelConfig(dp_replicate=2, dp_shard=2, tp=2, pp=2), PLAN, 1, BIASED),
        (ParallelConfig(dp_shard=2, tp=2, pp=4), PLAN, 2, FOUR | TIED),
        (ParallelConfig(tp=4, cp=2, pp=2), PLAN, 2, PACKED),  # fewer key/value heads than ranks of tp
    ],
    ids=lambda value: describe(value) if isinstance(value, ParallelConfig) else None,
)
def test_mixes_equal_one_process(
    layout: ParallelConfig, plan: ParallelPlan, accumulation: int, changes: dict[str, Any]
) -> None:
    job = task(accumulation, **changes)
    wanted = train_alone(job)
    held: dict[tuple[str, tuple[int, ...]], str] = {}
    for record in run_ranks(train_on_ranks, layout.num_processes, job, layout, plan, timeout=120):
        for name, weight in wanted.initial.items():
            assert torch.equal(record.initial[name], weight), f"initial {name}"
        wrong = {key: value for key, value in differences(record, wanted).items() if value > TOLERANCE}
        assert not wrong
        for name, (offsets, digest) in record.parts.items():
            assert held.setdefault((name, offsets), digest) == digest, f"replicas of {name} differ"
