"""Weights of few bits as compressed-tensors stores them: integers or fp8 with scales, and a zero point perhaps.

    w[n, k] = scale[n, g] · (q[n, k] − zero[n, g]),  g = k // group

Format: https://github.com/vllm-project/compressed-tensors. Packed integers are q + 2^(bits−1), the first in the lowest
bits of a 32-bit word, along the inputs; zero points likewise, along the outputs. Without a zero point it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .file_bytes import Scratch
from .stored_tensor import PartOf, StoredTensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes (N, K) from 0 to 2^bits − 1, K a multiple of 32 / bits → words (N, K · bits / 32) int32."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes.to(torch.int64).unflatten(1, (-1, each)) << shifts).sum(2)
    signed: Tensor = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_words`, as int32."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes: Tensor = (words.unsqueeze(2) >> shifts) & (2**bits - 1)
    return codes.flatten(1)


@dataclass(frozen=True)
class RoundedTensor:
    """A weight (N, K) that lies rounded in a file. Read as a `StoredTensor`, it is decoded."""

    values: StoredTensor
    """(N, K) int8 or float8, or packed words (N, K · bits / 32) int32."""
    scale: StoredTensor
    """(N, groups); one group is all inputs."""
    zero_point: StoredTensor | None = None
    """Packed words (N · bits / 32, groups) int32."""
    bits: int = 8
    granule: int = 8

    @property
    def is_packed(self) -> bool:
        return self.values.dtype == torch.int32

    @property
    def is_float(self) -> bool:
        return self.values.dtype.is_floating_point

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.values.shape
        return rows, columns * (32 // self.bits if self.is_packed else 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        q = read_all(self.values, start, stop)
        if self.is_packed:
            q = unpack_words(q, self.bits)
        scale = read_all(self.scale, start, stop).float()
        zero: Tensor | float = float(2 ** (self.bits - 1)) if self.is_packed else 0.0
        if self.zero_point is not None:
            zero = self.read_zero_points(start, stop).float().unsqueeze(2)
        wide = (q.float().unflatten(1, (scale.shape[1], -1)) - zero) * scale.unsqueeze(2)
        out.copy_(wide.flatten(1))

    def read_zero_points(self, start: int, stop: int) -> Tensor:
        """Rows of the zero points (rows, groups) as codes, int32."""
        assert self.zero_point is not None
        each = 32 // self.bits
        first = start // each
        words = read_all(self.zero_point, first, -(-stop // each))
        return unpack_words(words.T, self.bits).T[start - first * each : stop - first * each]

    def part(self, dim: int, start: int, stop: int) -> StoredTensor:
        """Rows or columns of it; still rounded where they begin and end between words and groups, or else decoded."""
        each = 32 // self.bits if self.is_packed else 1
        one, group, zero = self.scale.shape[1] == 1, self.group, self.zero_point
        unit = (each if zero is not None else 1) if dim == 0 else each if one else max(each, group)
        if start % unit or stop % unit:
            return PartOf(self, dim, start, stop)
        if dim == 0:
            scale: StoredTensor = PartOf(self.scale, 0, start, stop)
            zero = None if zero is None else PartOf(zero, 0, start // each, stop // each)
            return RoundedTensor(PartOf(self.values, 0, start, stop), scale, zero, self.bits)
        groups = (start // group, stop // group)
        scale = self.scale if one else PartOf(self.scale, 1, *groups)
        zero = zero if one or zero is None else PartOf(zero, 1, *groups)
        return RoundedTensor(PartOf(self.values, 1, start // each, stop // each), scale, zero, self.bits)


def read_all(
    stored: StoredTensor, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Rows of a stored tensor as they are, in memory of their own."""
    stop = stored.shape[0] if stop is None else stop
    out = torch.empty((stop - start, *stored.shape[1:]), dtype=stored.dtype, device=device)
    stored.read_rows(start, stop, out, Scratch())
    return out
