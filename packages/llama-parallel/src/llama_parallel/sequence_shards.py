"""Which tokens of a sequence a context-parallel rank holds.

A sequence is cut into pieces. For Ulysses rank r of n holds piece r of n. For the ring it holds pieces r and 2n - 1 - r
of 2n, a zigzag: a causal query in a late piece has many keys, one in an early piece few, and so all ranks have the same
work. In either case a rank's tokens keep their order.

    ring, n = 4:    | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |          ulysses, n = 4:    |   0   |   1   |   2   |   3   |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import Axis, gather

CONTEXTS = ("ring", "ulysses")


def pieces_of_ranks(size: int, context: str) -> list[tuple[int, ...]]:
    """The pieces that each of `size` ranks holds.

    Raises:
        ValueError: a context other than "ring" or "ulysses".
    """
    if context not in CONTEXTS:
        raise ValueError(f"context = {context!r}: must be 'ring' or 'ulysses'")
    if context == "ulysses" or size == 1:
        return [(rank,) for rank in range(size)]
    return [(rank, 2 * size - 1 - rank) for rank in range(size)]


def share_unit(size: int, context: str) -> int:
    """What the length of a sequence must be a multiple of: the number of its pieces."""
    return sum(len(pieces) for pieces in pieces_of_ranks(size, context))


def shards_of_ranks(x: Tensor, size: int, context: str, dim: int = 1) -> list[Tensor]:
    """What each of `size` ranks holds of whole rows x, whose sequence is at `dim`. ValueError if it does not divide."""
    unit = share_unit(size, context)
    if x.shape[dim] % unit or not x.shape[dim]:
        raise ValueError(
            f"a sequence of {x.shape[dim]} tokens does not divide over cp {size}: "
            f"with {context} its length must be a multiple of {unit}"
        )
    pieces = x.chunk(unit, dim)
    return [torch.cat([pieces[index] for index in own], dim) for own in pieces_of_ranks(size, context)]


def shard_sequence(x: Tensor, mesh: DeviceMesh, context: str, dim: int = 1) -> Tensor:
    """This rank's tokens of what belongs to whole rows: tokens, targets, positions, document numbers.

    Args:
        x: (B, S), or any shape with S at `dim`.
        mesh: of `build_mesh`.
        context: "ring" or "ulysses".
        dim: where the sequence is.

    Returns:
        (B, S / cp); x itself with cp = 1.

    Raises:
        ValueError: a sequence that does not divide into 2 · cp pieces (ring) or cp (Ulysses).
    """
    axis = Axis.of(mesh, "cp")
    return x if axis.size == 1 else shards_of_ranks(x, axis.size, context, dim)[axis.rank]


def unshard_sequence(x: Tensor, mesh: DeviceMesh, context: str, dim: int = 1) -> Tensor:
    """The whole rows again, on every rank of cp: the inverse of `shard_sequence`, one all-gather.

    Its gradient is the rank's own part: what all ranks compute from the whole, they compute alike.
    """
    axis = Axis.of(mesh, "cp")
    held = [piece for pieces in pieces_of_ranks(axis.size, context) for piece in pieces]
    if axis.size == 1:
        return x
    pieces = gather(x, axis, dim).chunk(len(held), dim)
    return torch.cat([pieces[held.index(index)] for index in range(len(held))], dim)


def shard_positions(length: int, mesh: DeviceMesh, context: str, device: torch.device | str = "cpu") -> Tensor:
    """(1, length) int64: where in the whole row each of a rank's `length` tokens stands."""
    whole = torch.arange(length * mesh["cp"].size(), device=device).unsqueeze(0)
    return shard_sequence(whole, mesh, context)
