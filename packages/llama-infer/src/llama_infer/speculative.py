"""Checking what a draft model proposes, so that the result is distributed as if there were no draft.

Leviathan, Kalman and Matias 2023 (https://arxiv.org/abs/2211.17192, algorithm 1): a token x that was drawn from the
draft's distribution q is accepted with probability min(1, p(x) / q(x)), p being the model's distribution; where it is
refused, the token is drawn from max(p - q, 0), normalised. What comes out has the distribution p:

    min(p, q)(x) + (1 - Σ min(p, q)) · max(p - q, 0)(x) / Σ max(p - q, 0) = p(x).

At temperature 0 both are one-hot, and x is accepted where it is the model's argmax.

Every token of a sequence is drawn this way, from three random numbers of its own that follow from the sequence's seed
and the token's place. So neither the number of proposals in a step nor who runs beside changes a draw.

Shape legend: P proposals, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_core import filter_logits

from .sequence import Sequence


@dataclass(frozen=True)
class Proposals:
    """What a draft has drawn for some rows of a batch."""

    rows: list[int]
    """P of the rows that the model draws from, in order."""
    sequences: list[Sequence]
    """Whose they are."""
    tokens: Tensor
    """(P,) int64."""
    probabilities: Tensor | None
    """(P, V) float32, what they were drawn from. None: each was the most probable, at temperature 0."""
    uniforms: list[tuple[float, float, float]]
    """Random numbers of each token, `uniforms`."""

    def checked(self, logits_PV: Tensor) -> Tensor:
        """(P,) tokens that are distributed as the model's logits say. They equal the proposals where these are
        accepted, and nowhere else."""
        if self.probabilities is None:
            return logits_PV.argmax(dim=-1)
        p_PV = distribution(logits_PV, self.sequences)
        q_PV = self.probabilities
        at_P1 = self.tokens.unsqueeze(1)
        _, accept, again = torch.tensor(self.uniforms, dtype=torch.float64, device=p_PV.device).unbind(1)
        accepted_P = accept * q_PV.gather(1, at_P1).squeeze(1).double() < p_PV.gather(1, at_P1).squeeze(1).double()
        rest_PV = (p_PV - q_PV).clamp_(min=0)
        # Where rounding leaves nothing, p and q are the same.
        rest_PV = torch.where(rest_PV.sum(dim=-1, keepdim=True) > 0, rest_PV, p_PV)
        return torch.where(accepted_P, self.tokens, draw(rest_PV, again))


def distribution(logits_PV: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """(P, V) float32 probabilities after temperature and filters of each row's sequence."""
    params = [sequence.params for sequence in sequences]
    return filter_logits(
        logits_PV,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    ).softmax(dim=-1)


def draw(weights_PV: Tensor, uniform_P: Tensor) -> Tensor:
    """(P,) ids: each row's cumulative sum inverted at a float64 number in [0, 1), as in `llama_core.sample`."""
    # float64: a float32 running sum over 128k probabilities is off by more than the rarest tokens weigh.
    sums_PV = weights_PV.cumsum(dim=-1, dtype=torch.float64)
    total_P1 = sums_PV[:, -1:]
    # Below the total: rounding up to it would point past the last token.
    point_P1 = torch.minimum(uniform_P.unsqueeze(1) * total_P1, torch.nextafter(total_P1, torch.zeros_like(total_P1)))
    return torch.searchsorted(sums_PV, point_P1, right=True).squeeze(1)


def uniforms(seed: int, place: int) -> tuple[float, float, float]:
    """Three numbers in [0, 1) for the token at a place of a sequence's output: for the draft's draw, for accepting it,
    for drawing again."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, place), digest_size=24).digest()
    first, second, third = (number >> 11 for number in struct.unpack("<QQQ", digest))
    return first * 2.0**-53, second * 2.0**-53, third * 2.0**-53
