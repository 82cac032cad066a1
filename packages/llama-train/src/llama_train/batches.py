"""Rows of tokens to train on, as a function of the row's number alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .shuffle import mix, permute
from .tokens import TokenArray

IGNORED = -100
"""Target of a position that is not trained on (PyTorch's `ignore_index`)."""


@dataclass(frozen=True)
class Batch:
    """Inputs and what should follow them, (rows, sequence) int64 each; on the CPU until `to` moves it."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """Numbers that change from one document to the next, where a token sees its own alone; None: one for each row."""
    positions: Tensor | None = None
    """Of a part of the rows' tokens: where each stands. None: they follow from the rest."""
    counted: int | None = None
    """`count`, where it is known."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return self._with(lambda x: x.to(device, non_blocking=True), self.counted)

    def pinned(self) -> Batch:
        """The same batch in memory that a GPU can read by itself, its targets counted before they are there."""
        return self._with(Tensor.pin_memory, self.count)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the GPU's memory until what `stream` has been given so far is done; another stream allocated it."""
        for x in (self.tokens, self.targets, self.documents, self.positions):
            if x is not None:
                x.record_stream(stream)

    def _with(self, change: Callable[[Tensor], Tensor], counted: int | None) -> Batch:
        tokens, targets, documents, positions = (
            None if x is None else change(x) for x in (self.tokens, self.targets, self.documents, self.positions)
        )
        assert tokens is not None
        assert targets is not None
        return Batch(tokens, targets, documents, positions, counted)

    @property
    def count(self) -> int:
        """Positions with a target; of a part of the rows' tokens, those of the whole rows."""
        return self.counted if self.counted is not None else int((self.targets != IGNORED).sum())


class TrainingRows:
    """Endless rows of a token array in random order, every one once per epoch.

    The array is cut into rows of `sequence_length` inputs; each epoch starts the cuts at another place and has
    another order. Row number r depends on (seed, r) only: not on rows drawn before, and not on how many processes
    share the work.

    Args:
        tokens: all documents in one row of ids.
        sequence_length: inputs in a row.
        seed: chooses the order.
        bos_id: first id of each document. It is never a target: the end of one text says nothing about the next.

    Raises:
        ValueError: too few tokens for a row.
    """

    def __init__(self, tokens: TokenArray, sequence_length: int, seed: int, bos_id: int | None) -> None:
        # One token more than inputs is read, for the last target, and the start moves by up to a row less one.
        self.rows_per_epoch = len(tokens) // sequence_length - 1
        if self.rows_per_epoch < 1:
            raise ValueError(
                f"data.sequence_length is {sequence_length}; the {len(tokens)} training tokens allow at most "
                f"{len(tokens) // 2}: shorten it or add text"
            )
        self.tokens, self.sequence_length, self.seed, self.bos_id = tokens, sequence_length, seed, bos_id

    def rows(self, first: int, count: int) -> Batch:
        """Rows number `first` to `first + count - 1`, counted from 0."""
        numbers = np.arange(first, first + count)
        starts = np.concatenate([self._starts(numbers[numbers // self.rows_per_epoch == epoch], int(epoch))
                                 for epoch in np.unique(numbers // self.rows_per_epoch)])  # fmt: skip
        return _cut(self.tokens, starts, self.sequence_length, self.bos_id)

    def micro_batches(self, step: int, size: int, count: int, part: int = 0, parts: int = 1) -> list[Batch]:
        """Of step number `step`, counted from 1, the `count` batches of `size` rows that are one process's part.

        A step is `parts` times as many rows, which ones depends on their total alone; part number `part` (a
        data-parallel rank) gets neighbouring ones.
        """
        first = ((step - 1) * parts + part) * size * count
        return [self.rows(first + index * size, size) for index in range(count)]

    def _starts(self, numbers: np.ndarray, epoch: int) -> np.ndarray:
        places = permute(numbers % self.rows_per_epoch, self.rows_per_epoch, mix(self.seed, epoch, 0))
        return places * self.sequence_length + mix(self.seed, epoch, 1) % self.sequence_length


def held_out_batches(
    tokens: TokenArray, sequence_length: int, rows: int, bos_id: int | None, max_tokens: int | None = None
) -> Iterator[Batch]:
    """All of a token array once, in order, in batches of up to `rows` rows; the last row may be shorter.

    With `max_tokens`, about as many tokens, in rows spread evenly over the array.
    """
    starts = np.arange(0, max(len(tokens) - 1, 0), sequence_length)
    if max_tokens is not None:
        wanted = max(1, max_tokens // sequence_length)
        if wanted < len(starts):
            starts = starts[np.arange(wanted) * len(starts) // wanted]
    whole = starts[starts + sequence_length < len(tokens)]
    for first in range(0, len(whole), rows):
        yield _cut(tokens, whole[first : first + rows], sequence_length, bos_id)
    for start in starts[len(whole) :]:
        yield _cut(tokens, np.array([start]), len(tokens) - 1 - int(start), bos_id)


def _cut(tokens: TokenArray, starts: np.ndarray, length: int, bos_id: int | None) -> Batch:
    windows = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
    # clone: a single row is contiguous as it is, and would share its memory with the targets, which are changed below
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].clone()
    if bos_id is not None:
        targets[targets == bos_id] = IGNORED
    return Batch(inputs, targets)
