"""B35: a mesh-wide norm counts each parameter once, however many ranks hold it, and is the same on all of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from llama_core import Llama, LlamaConfig
from llama_parallel import ParallelConfig, build_mesh, clip_grad_norm_, nonfinite_gradients
from llama_parallel.parity import Task, differences, train_alone, train_on_ranks
from llama_parallel.testing import run_ranks

T0 = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


class Pieces(nn.Module):
    """One parameter of which each rank of tp holds a part, and one that all hold."""

    def __init__(self, mesh: Any, rank: int) -> None:
        super().__init__()
        part = torch.tensor([[3.0], [4.0]][rank])  # squares 9 and 16
        self.sharded = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh["tp"], [Shard(0)]))
        self.sharded.grad = DTensor.from_local(part, mesh["tp"], [Shard(0)])
        self.whole = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["tp"], [Replicate()]))
        self.whole.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh["tp"], [Replicate()])  # square 25


def test_b35_synthetic() -> None:
    def work(rank: int) -> tuple[float, list[float], list[float]]:
        mesh = build_mesh(ParallelConfig(tp=2))
        model = Pieces(mesh, rank)
        norm = clip_grad_norm_(model, 1.0, mesh)
        assert model.sharded.grad is not None
        assert model.whole.grad is not None
        return float(norm), model.sharded.grad.to_local().tolist(), model.whole.grad.to_local().tolist()

    (first, a, whole), (second, b, other) = run_ranks(work, 2)
    assert first == second == pytest.approx(math.sqrt(9 + 16 + 25), rel=1e-7)
    assert whole == other == pytest.approx([3 / math.sqrt(50), 4 / math.sqrt(50)], rel=1e-5)
    assert a + b == pytest.approx([3 / math.sqrt(50), 4 / math.sqrt(50)], rel=1e-5)


def test_what_another_stage_counts_is_left_out_and_still_clipped() -> None:
    def work(rank: int) -> tuple[float, list[float]]:
        mesh = build_mesh(ParallelConfig(tp=2))
        model = Pieces(mesh, rank)
        norm = clip_grad_norm_(model, 1.0, mesh, counted_elsewhere=["whole"])
        assert model.whole.grad is not None
        return float(norm), model.whole.grad.to_local().tolist()

    assert run_ranks(work, 2) == [(pytest.approx(5.0), pytest.approx([0.6, 0.8], rel=1e-5))] * 2


@pytest.mark.parametrize(
    "layout", [ParallelConfig(tp=2), ParallelConfig(dp_shard=2, tp=2), ParallelConfig(dp_replicate=2, tp=2)], ids=str
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_b35_model(layout: ParallelConfig, tied: bool) -> None:
    """Norm weights of 5, clip 0.05, SGD 0.1: the norm, and the weights after three clipped steps."""

    def fives(model: Llama) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("norm.weight"):
                    p.fill_(5.0)

    tokens = torch.randint(0, 128, (3, 4, 9), generator=torch.Generator().manual_seed(0))
    job = Task(T0.replace(tie_word_embeddings=tied), tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(),
               max_norm=0.05, prepare=fives)  # fmt: skip
    wanted = train_alone(job)
    gradients = wanted.gradients.values()
    of_norms = [g for name, g in wanted.gradients.items() if name.endswith("norm.weight")]
    whole, norms = (math.sqrt(sum(float(g.square().sum()) for g in part)) for part in (gradients, of_norms))
    assert wanted.norms[0] == pytest.approx(whole)
    assert math.hypot(whole, norms) / whole - 1 > 1e-5  # counted twice, the norm weights would be seen
    records = run_ranks(train_on_ranks, layout.num_processes, job, layout)
    assert len({tuple(record.norms) for record in records}) == 1
    for record in records:
        assert max(differences(record, wanted).values()) < 1e-10
    held: dict[Any, str] = {}
    for record in records:
        for name, (offsets, digest) in record.parts.items():
            assert held.setdefault((name, offsets), digest) == digest


def test_ranks_without_anything_to_count_take_part() -> None:
    def work(rank: int) -> float:
        mesh = build_mesh(ParallelConfig(dp_replicate=2))
        model = nn.Linear(2, 2, bias=False)
        model.weight.grad = torch.ones(2, 2)  # a plain tensor is alike on all replicas
        return float(clip_grad_norm_(model, math.inf, mesh))

    assert run_ranks(work, 2) == [2.0, 2.0]


def test_infinite_gradients_are_named_with_their_rank() -> None:
    def work(rank: int) -> tuple[list[str], bool, list[str]]:
        mesh = build_mesh(ParallelConfig(tp=2))
        model = Pieces(mesh, rank)
        none = nonfinite_gradients(model, mesh)
        if rank == 1:
            assert model.sharded.grad is not None
            model.sharded.grad.to_local()[0] = float("nan")
        lines = nonfinite_gradients(model, mesh)
        return none, math.isfinite(float(clip_grad_norm_(model, 1.0, mesh))), lines

    line = "rank 1: sharded has 1 of 1 elements not finite"
    assert run_ranks(work, 2) == [([], False, [line])] * 2


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_norm_that_is_not_positive_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match=r"max_norm = .*: must be above 0"):
        clip_grad_norm_(nn.Linear(1, 1), max_norm, None)  # type: ignore[arg-type]
