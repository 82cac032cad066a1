"""Masks over logits for the rows of guided sequences; the other rows of a batch stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scheduler import Work


@dataclass(frozen=True)
class AllowedTokens:
    """Which tokens may be drawn in some rows of a batch."""

    rows: list[int]
    bits: Tensor
    """(len(rows), bytes) uint8 on the host: bit i & 7 of byte i >> 3 is set for an id that may come."""

    def mask(self, logits_RV: Tensor) -> Tensor:
        """The logits with -inf for what may not be drawn; a new tensor."""
        device, vocabulary = logits_RV.device, logits_RV.shape[1]
        bits, rows = self.bits, torch.tensor(self.rows)
        if device.type == "cuda":
            bits, rows = bits.pin_memory(), rows.pin_memory()
        bits, rows = bits.to(device, non_blocking=True), rows.to(device, non_blocking=True)
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        allowed = (bits.unsqueeze(2) & powers).flatten(1)[:, :vocabulary] != 0
        return logits_RV.index_copy(0, rows, logits_RV[rows].masked_fill(~allowed, float("-inf")))


def allowed_tokens(drawing: Sequence[Work], vocabulary: int) -> AllowedTokens | None:
    """Of the rows that a batch draws from (one for each work, and one for each of its guesses); None where nobody is
    guided.

    Args:
        vocabulary: rows of the model's embedding. Where it has more than the tokenizer has tokens, they are not drawn.
    """
    rows: list[int] = []
    masks: list[bytes] = []
    row = 0
    for work in drawing:
        guide, params = work.sequence.guide, work.sequence.params
        if guide is not None:
            rows += range(row, row + 1 + len(work.guesses))
            masks += guide.allowed(work.guesses, work.sequence.may_end and not params.ignore_eos)
        row += 1 + len(work.guesses)
    if not rows:
        return None
    width = -(-vocabulary // 8)
    fitted = [_drawable(bits, width) for bits in masks]
    return AllowedTokens(rows, torch.frombuffer(bytearray(b"".join(fitted)), dtype=torch.uint8).view(len(rows), width))


def _drawable(bits: bytes, width: int) -> bytes:
    """A set of ids cut or filled to a width. One without any, which is the row behind a guess that completes the
    output or does not fit it, becomes all: something must be drawn there, and nobody takes it."""
    bits = bits[:width].ljust(width, b"\0")
    return bits if bits.strip(b"\0") else b"\xff" * width
