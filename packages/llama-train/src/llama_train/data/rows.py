"""Rows of a fixed length from documents: by cutting, or by best-fit packing. A row is a function of its number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_train.shuffle import mix, permute

from .best_fit import best_fit
from .token_set import TokenSet

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """(S,) int64 each: inputs, what should follow them (-100: does not count), and numbers of documents."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]


class CutRows:
    """All documents one behind the other, cut every `length` tokens; each epoch begins its cuts at another place.

    An epoch leaves out less than two rows, others each time. The first token of a document is no target.

    Args:
        tokens: the documents.
        length: inputs in a row.
        seed: chooses places and order.

    Raises:
        ValueError: too few tokens for a row.
    """

    def __init__(self, tokens: TokenSet, length: int, seed: int) -> None:
        self.rows_per_epoch = len(tokens) // length - 1
        if self.rows_per_epoch < 1:
            raise ValueError(
                f"data.sequence_length is {length}; the {len(tokens)} training tokens of {tokens.name} allow at most "
                f"{len(tokens) // 2}: shorten it or add text"
            )
        self.tokens, self.length, self.seed = tokens, length, seed

    def row(self, number: int) -> Row:
        """Row `number`, counted from 0 through all epochs."""
        epoch, place = divmod(number, self.rows_per_epoch)
        place = _permuted(place, self.rows_per_epoch, mix(self.seed, epoch, 0))
        return cut_row(self.tokens, place * self.length + mix(self.seed, epoch, 1) % self.length, self.length)


def cut_row(tokens: TokenSet, start: int, length: int) -> Row:
    """The row that begins at token `start`; what lies behind the last token is filled up."""
    window = tokens.window(start, min(start + length + 1, len(tokens)))
    ids, number = window.ids, window.documents
    targets = np.where((number[1:] == number[:-1]) & window.counted[1:], ids[1:], IGNORED)
    return _filled(ids[:-1], targets, number[:-1] - number[0], length)


class PackedRows:
    """Whole documents, put together so that few places stay empty; those longer than a row are cut into rows.

    Every token that counts is a target once in an epoch: parts of a long document share the token at the cut, and the
    last token of a document needs no place. Parts without any target (a prompt that fills a row) are left out.

    Args:
        tokens: the documents.
        length: inputs in a row.
        seed: chooses the order.

    Raises:
        ValueError: no target at all, or not one row full of them.
    """

    def __init__(self, tokens: TokenSet, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        parts = -(-(tokens.lengths - 1) // length)  # a document of one token has no target
        documents = np.repeat(np.arange(len(parts)), parts)
        within = np.arange(len(documents)) - np.repeat(np.cumsum(parts) - parts, parts)
        self._starts = tokens.starts[documents] + within * length
        self._lengths = np.minimum(tokens.lengths[documents] - 1 - within * length, length)
        used = self._with_targets()
        self.left_out = int((~used).sum())
        """Parts of documents that have nothing to learn."""
        self._starts, self._lengths = self._starts[used], self._lengths[used]
        if int(self._lengths.sum()) < length:
            raise ValueError(
                f"data.sequence_length is {length}; the documents of {tokens.name} together have {self._lengths.sum()} "
                "places with something to learn: shorten it or add text"
            )
        bins = best_fit(self._lengths, length)
        self._order = np.argsort(bins, kind="stable")
        self._bounds = np.searchsorted(bins[self._order], np.arange(bins.max() + 2))
        self.rows_per_epoch = len(self._bounds) - 1
        self.fullness = float(self._lengths.sum() / (self.rows_per_epoch * length))
        """Part of the places that hold a token."""

    def _with_targets(self) -> NDArray[np.bool_]:
        if not self.tokens.is_masked:
            return np.ones(len(self._starts), dtype=np.bool_)
        used = np.empty(len(self._starts), dtype=np.bool_)
        for index, (start, length) in enumerate(zip(self._starts.tolist(), self._lengths.tolist())):
            used[index] = self.tokens.stored(start, length + 1)[1][1:].any()
        return used

    def row(self, number: int) -> Row:
        """Row `number`, counted from 0 through all epochs."""
        epoch, place = divmod(number, self.rows_per_epoch)
        return self.packed(_permuted(place, self.rows_per_epoch, mix(self.seed, epoch, 0)))

    def packed(self, place: int) -> Row:
        """One of the rows of an epoch, by its place before they are shuffled."""
        inputs, targets, documents = [], [], []
        for number, part in enumerate(self._order[self._bounds[place] : self._bounds[place + 1]].tolist()):
            ids, counted = self.tokens.stored(int(self._starts[part]), int(self._lengths[part]) + 1)
            inputs.append(ids[:-1])
            targets.append(np.where(counted[1:], ids[1:], IGNORED))
            documents.append(np.full(len(ids) - 1, number))
        return _filled(np.concatenate(inputs), np.concatenate(targets), np.concatenate(documents), self.length)


def _permuted(place: int, n: int, key: int) -> int:
    return int(permute(np.array([place]), n, key)[0])


def _filled(tokens: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64], length: int) -> Row:
    missing = length - len(tokens)
    if missing:
        tokens = np.pad(tokens, (0, missing))
        targets = np.pad(targets, (0, missing), constant_values=IGNORED)
        documents = np.pad(documents, (0, missing), constant_values=int(documents[-1]) + 1)
    return Row(tokens, targets, documents)
