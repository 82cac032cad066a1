"""Rows of several sources by weight, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llama_train.batches import Batch
from llama_train.shuffle import mix, permute

from .rows import CutRows, PackedRows, Row, cut_row
from .token_set import TokenSet

BLOCK = 1024
"""Rows among which every source has its share, to within one row of all blocks together."""


class Mixture:
    """Endless rows of several sources. Row number r depends on (seed, r) and the weights only.

    Rows are dealt in blocks: of the first b blocks, source i has b · BLOCK · weight i, rounded through the running sum
    of the weights so that the shares add up; within a block the order is random. Every source goes through its own
    rows, epoch after epoch.

    Args:
        sources: one or more.
        weights: parts of the rows, one per source; only their proportions count.
        seed: chooses the order.
        mask_documents: whether batches carry the documents' numbers, so that no token sees another document.

    Raises:
        ValueError: weights that are not positive, or less than one row in a block.
    """

    def __init__(
        self, sources: Sequence[CutRows | PackedRows], weights: Sequence[float], seed: int, mask_documents: bool
    ) -> None:
        assert len(sources) == len(weights) >= 1
        total = sum(weights)
        for source, weight in zip(sources, weights):
            if not weight * BLOCK >= total:
                raise ValueError(
                    f"the weight of {source.tokens.name} is {weight}; at least 1/{BLOCK} of the sum {total} is wanted"
                )
        self.sources, self.seed, self.mask_documents = sources, seed, mask_documents
        self._bounds = np.cumsum([0.0, *weights]) / total
        self._bounds[-1] = 1.0
        shares = np.diff(self._bounds)
        self.rows_per_epoch = max(1, round(min(s.rows_per_epoch / share for s, share in zip(sources, shares))))
        """Rows after which the first source begins anew."""

    def place(self, number: int) -> tuple[int, int]:
        """Row `number` as (source, row of that source)."""
        if len(self.sources) == 1:
            return 0, number
        block, within = divmod(number, BLOCK)
        within = int(permute(np.array([within]), BLOCK, mix(self.seed, block, 2))[0])
        before, after = self._dealt(block), self._dealt(block + 1)
        bounds = np.cumsum(after - before)
        source = int(np.searchsorted(bounds, within, side="right"))
        first = int(bounds[source - 1]) if source else 0
        return source, int(before[source]) + within - first

    def _dealt(self, blocks: int) -> np.ndarray:
        return np.diff(np.floor(self._bounds * (blocks * BLOCK) + 0.5).astype(np.int64))

    def rows(self, first: int, count: int) -> Batch:
        """Rows number `first` to `first + count - 1`, counted from 0."""
        places = [self.place(number) for number in range(first, first + count)]
        return _batch([self.sources[source].row(number) for source, number in places], self.mask_documents)

    def micro_batches(self, step: int, size: int, count: int, part: int = 0, parts: int = 1) -> list[Batch]:
        """As of `TrainingRows`."""
        first = ((step - 1) * parts + part) * size * count
        return [self.rows(first + index * size, size) for index in range(count)]


def set_batches(
    tokens: TokenSet, length: int, rows: int, mask_documents: bool, max_tokens: int | None = None
) -> Iterator[Batch]:
    """All documents once, in order, in rows of `length`; the last row is filled up.

    With `max_tokens`, about as many, in rows spread evenly.
    """
    starts = np.arange(0, max(len(tokens) - 1, 0), length)
    if max_tokens is not None and (wanted := max(1, max_tokens // length)) < len(starts):
        starts = starts[np.arange(wanted) * len(starts) // wanted]
    for first in range(0, len(starts), rows):
        yield _batch(
            [cut_row(tokens, start, length) for start in starts[first : first + rows].tolist()], mask_documents
        )


def _batch(rows: Sequence[Row], mask_documents: bool) -> Batch:
    tokens, targets, documents = (
        torch.from_numpy(np.stack([getattr(row, name) for row in rows])) for name in ("tokens", "targets", "documents")
    )
    return Batch(tokens, targets, documents if mask_documents else None)
