"""Steps of one engine on several ranks: rank 0 tells what to run, and all run it.

A plan names each sequence by its slot and holds what has changed since the last one: the tokens to compute and the
blocks that are new. On a GPU a token may not have reached rank 0's host yet; the device hands it on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .block_pool import BlockTable
from .runner import ModelRunner
from .scheduler import Work

if TYPE_CHECKING:
    from .ranks import Ranks


@dataclass(frozen=True)
class Row:
    """A `Work` without its sequence."""

    slot: int
    start: int
    count: int
    samples: bool
    guesses: tuple[int, ...]
    known: list[int]
    """Tokens from `start` on; fewer than `count` where the newest has not arrived."""
    blocks: list[int]
    """Of the sequence's table, those behind the first `kept`."""
    kept: int
    """0 also says that the table is another one."""


@dataclass(frozen=True)
class Copies:
    """Blocks to copy, (from, to)."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True)
class Scores:
    """Logits that are wanted of rows of the last step."""

    rows: slice


class LeadingRunner(ModelRunner):
    """Rank 0's runner: tells the other ranks, then runs its part.

    Args:
        ranks: this rank's.
        arguments: of `ModelRunner`.
    """

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ranks = ranks
        self._sent: dict[int, tuple[BlockTable, int]] = {}
        self._broken = False

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._tell(Copies(list(pairs)))
        super().copy(pairs)

    def run(self, batch: list[Work]) -> tuple[Tensor, Tensor]:
        self._tell([self._row(work) for work in batch])
        try:
            if any(_is_late(work) for work in batch):
                self.ranks.from_first(self.newest)
            return super().run(batch)
        except BaseException:  # the others have gone on, or wait for us: there is no way back
            self._broken = True
            raise

    def logits_of(self, hidden_TE: Tensor, rows: slice) -> Tensor:
        self._tell(Scores(rows))
        return super().logits_of(hidden_TE, rows)

    def _tell(self, message: Any) -> None:
        if self._broken:
            raise RuntimeError("an error has left the ranks of this model out of step; start them anew")
        self.ranks.tell(message)

    def _row(self, work: Work) -> Row:
        sequence = work.sequence
        table, kept = self._sent.get(sequence.slot, (None, 0))
        kept = kept if table is sequence.table else 0
        self._sent[sequence.slot] = sequence.table, len(sequence.table.blocks)
        known = sequence.ids[work.start : work.start + work.count - len(work.guesses)]
        return Row(
            sequence.slot, work.start, work.count, work.samples, work.guesses, known, sequence.table.blocks[kept:], kept
        )


@dataclass
class Mirror:
    """Of a sequence, what its runner reads, on a rank that only computes."""

    slot: int
    table: BlockTable = field(default_factory=BlockTable)
    ids: list[int] = field(default_factory=list)


def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Run what rank 0 tells, until it tells None."""
    mirrors: dict[int, Mirror] = {}
    hidden = torch.empty(0)
    while (message := ranks.hear()) is not None:
        if isinstance(message, Copies):
            runner.copy(message.pairs)
        elif isinstance(message, Scores):
            runner.logits_of(hidden, message.rows)
        else:
            batch = [_work(row, mirrors) for row in message]
            if any(_is_late(work) for work in batch):
                ranks.from_first(runner.newest)
            hidden, _ = runner.run(batch)


def _work(row: Row, mirrors: dict[int, Mirror]) -> Work:
    mirror = mirrors.get(row.slot)
    if mirror is None or not row.kept:
        mirror = mirrors[row.slot] = Mirror(row.slot)
    mirror.table.blocks[row.kept :] = row.blocks
    # What the cache holds already is never read again: its ids may be anything.
    mirror.ids[row.start :] = []
    mirror.ids += [0] * (row.start - len(mirror.ids)) + row.known
    return Work(mirror, row.start, row.count, row.samples, row.guesses)  # type: ignore[arg-type]


def _is_late(work: Work) -> bool:
    """Whether its newest token has not arrived on the host."""
    return work.start + work.count - len(work.guesses) > len(work.sequence.ids)


def lead_or_follow(leader: object, runner: ModelRunner, ranks: Ranks) -> Callable[[], object]:
    """On rank 0: what lets the others end, once; it is called by itself when `leader` or the program ends. The other
    ranks do not come back from here.

    Raises:
        SystemExit: on the other ranks, when rank 0 is done.
        RuntimeError: on them, from what went wrong.
    """
    if ranks.is_first:
        return weakref.finalize(leader, _end, ranks)
    try:
        follow(runner, ranks)
    except Exception as error:  # not an error of the user's, whatever its type: it is to be seen with its traceback
        raise RuntimeError(f"rank {ranks.axis.rank} of {ranks.axis.size} has failed") from error
    ranks.leave()
    raise SystemExit(0)


def _end(ranks: Ranks) -> None:
    with contextlib.suppress(RuntimeError):  # they are gone already
        ranks.tell(None)
        ranks.leave()
