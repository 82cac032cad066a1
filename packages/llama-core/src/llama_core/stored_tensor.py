"""Tensors that still lie in files, and the ways to build one out of others.

Every format hands its tensors over as `StoredTensor`: rows of dimension 0 that can be read into given memory. A join
of shards, a part, and the reordering of rotary pairs are the same thing around another one, so no format repeats them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from .file_bytes import Scratch


class StoredTensor(Protocol):
    """One tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """What its values are stored as; float32 for quantised types."""

    @property
    def granule(self) -> int:
        """Rows are best read in multiples of this many."""

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        """Copy rows [start, stop) of dimension 0 into `out`, on whatever device and of whatever dtype that is."""


@dataclass(frozen=True)
class TensorRows:
    """A tensor that is in memory (or mapped) already."""

    tensor: Tensor
    granule: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        out.copy_(self.tensor[start:stop])


@dataclass(frozen=True)
class PairedRows:
    """Query or key rows in the order of interleaved rotary pairs, read in that of rotated halves.

    Meta and GGUF rotate neighbours (2j, 2j + 1) of a head of width d, Hugging Face rotates (j, j + d/2): within a
    head, stored row 2j + s is row s·d/2 + j of the model.
    """

    stored: StoredTensor
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def granule(self) -> int:
        return self.head_dim

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        # whole heads: the rows of one head come from all over that head
        first, last = start // self.head_dim * self.head_dim, -(-stop // self.head_dim) * self.head_dim
        rows = scratch.take((last - first, *self.shape[1:]), self.dtype, slot="pairs")
        self.stored.read_rows(first, last, rows, scratch)
        halves = rows.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2)  # (heads, 2, d/2, ...)
        if (first, last) == (start, stop) and out.is_contiguous():
            out.unflatten(0, halves.shape[:3]).copy_(halves)
        else:
            out.copy_(halves.flatten(0, 2)[start - first : stop - first])


@dataclass(frozen=True)
class JoinedRows:
    """Shards of one tensor, joined along dimension 0 or 1."""

    parts: Sequence[StoredTensor]
    dim: int
    granule: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        if self.dim == 1:
            for part, columns in zip(self.parts, out.split([part.shape[1] for part in self.parts], dim=1)):
                part.read_rows(start, stop, columns, scratch)
            return
        ends = list(accumulate(part.shape[0] for part in self.parts))
        row = start
        while row < stop:
            index = bisect_right(ends, row)
            begin, end = ends[index] - self.parts[index].shape[0], min(ends[index], stop)
            self.parts[index].read_rows(row - begin, end - begin, out[row - start : end - start], scratch)
            row = end


@dataclass(frozen=True)
class PartOf:
    """Rows (dimension 0) or columns (1) [start, stop) of another tensor: what one of several processes holds of it."""

    whole: StoredTensor
    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.whole.shape)
        shape[self.dim] = self.stop - self.start
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def granule(self) -> int:
        return self.whole.granule

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        if self.dim == 0:
            self.whole.read_rows(self.start + start, self.start + stop, out, scratch)
            return
        rows = scratch.take((stop - start, *self.whole.shape[1:]), self.dtype, slot="part")
        self.whole.read_rows(start, stop, rows, scratch)
        out.copy_(rows[:, self.start : self.stop])
