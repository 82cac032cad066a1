"""Loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from llama_core import Llama

from .batches import Batch
from .forward import forward


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` targets, in nats."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e^loss; infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def fraction_of_chance(self, vocab_size: int) -> float:
        """The loss as a part of ln(vocabulary), which is that of a model that has learnt nothing."""
        return self.loss / math.log(vocab_size)


@torch.no_grad()
def evaluate(model: Llama, batches: Iterable[Batch]) -> Evaluation:
    """Mean over every unmasked token of all batches, each token counted once whatever its batch.

    Raises:
        ValueError: no batch has a target.
    """
    assert model.lm_head is not None
    head = model.lm_head.weight
    total, tokens = torch.zeros((), dtype=torch.float64, device=head.device), 0
    for batch in batches:
        tokens += batch.count
        batch = batch.to(head.device)
        total += model.ops.linear_cross_entropy(forward(model, batch), head, batch.targets, reduction="sum")
    if tokens == 0:
        raise ValueError("the held-out text has no token to predict; add text or raise data.held_out_fraction")
    return Evaluation(float(total) / tokens, tokens)
