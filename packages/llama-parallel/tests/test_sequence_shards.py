from typing import Any

import pytest
import torch
from torch import Tensor

from llama_parallel import ParallelConfig, build_mesh, shard_sequence, unshard_sequence
from llama_parallel.sequence_shards import pieces_of_ranks, shard_positions, share_unit
from llama_parallel.testing import RankError, run_ranks


def test_a_zigzag_gives_every_rank_the_same_causal_work() -> None:
    pieces = pieces_of_ranks(4, "ring")
    assert pieces == [(0, 7), (1, 6), (2, 5), (3, 4)]
    keys_seen = [sum(piece + 0.5 for piece in own) for own in pieces]  # all pieces before, and half its own
    assert set(keys_seen) == {8.0}
    assert pieces_of_ranks(4, "ulysses") == [(0,), (1,), (2,), (3,)]
    assert pieces_of_ranks(1, "ring") == [(0,)]
    assert [share_unit(4, context) for context in ("ring", "ulysses")] == [8, 4]


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_shards_and_back(context: str) -> None:
    rows = torch.arange(2 * 16 * 3).view(2, 16, 3)

    def work(rank: int) -> tuple[Any, ...]:
        mesh = build_mesh(ParallelConfig(cp=4))
        own = shard_sequence(rows, mesh, context)
        along_last = shard_sequence(rows.movedim(1, 2), mesh, context, dim=2)
        assert torch.equal(along_last.movedim(2, 1), own)
        leaf = own.double().requires_grad_()
        whole = unshard_sequence(leaf, mesh, context)
        (whole * rows).sum().backward()  # alike on all ranks: each keeps its part of the gradient
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, own.double())
        return own, unshard_sequence(own, mesh, context), shard_positions(4, mesh, context)

    for rank, (own, whole, positions) in enumerate(run_ranks(work, 4)):
        wanted = [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        if context == "ulysses":
            wanted = list(range(4 * rank, 4 * rank + 4))
        assert positions.tolist() == [wanted]
        assert torch.equal(own, rows[:, wanted])
        assert torch.equal(whole, rows)


def test_one_rank_has_it_all() -> None:
    def work(rank: int) -> Tensor:
        mesh = build_mesh(ParallelConfig())
        tokens = torch.arange(7).view(1, 7)
        assert shard_sequence(tokens, mesh, "ring") is tokens
        assert unshard_sequence(tokens, mesh, "ring") is tokens
        return shard_positions(7, mesh, "ring")

    assert torch.equal(run_ranks(work, 1)[0], torch.arange(7).view(1, 7))


@pytest.mark.parametrize(
    ("context", "length", "message"),
    [
        ("ring", 6, "a sequence of 6 tokens does not divide over cp 2: with ring its length must be a multiple of 4"),
        ("ring", 0, "a sequence of 0 tokens"),
        ("ulysses", 7, "a sequence of 7 tokens does not divide over cp 2: .* must be a multiple of 2"),
        ("spiral", 8, "context = 'spiral': must be 'ring' or 'ulysses'"),
    ],
)
def test_what_does_not_divide_is_refused(context: str, length: int, message: str) -> None:
    tokens = torch.zeros(1, length)
    with pytest.raises(RankError, match=message):
        run_ranks(lambda rank: shard_sequence(tokens, build_mesh(ParallelConfig(cp=2)), context), 2)
