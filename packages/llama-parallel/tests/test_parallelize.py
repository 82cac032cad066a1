"""Every layout equals one process in float64: initial bits, losses, gradients, norms, weights after three steps."""

from typing import Any

import pytest
import torch

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan
from llama_parallel.layout import describe
from llama_parallel.parity import Record, Task, differences, train_alone, train_on_ranks
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
