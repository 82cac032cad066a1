from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from llama_core import Llama
from llama_train.batches import IGNORED, Batch
from llama_train.evaluate import Evaluation, evaluate


def test_case_b30_3_every_token_counts_once(t0: Callable[..., Llama]) -> None:
    """llama-cookbook#133 (3): batches of 4, 0 and 2 labels give (sum over 6 tokens)/6."""
    model = t0()
    batches = []
    for seed, unmasked in enumerate((4, 0, 2)):
        generator = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(0, 128, (2, 1, 8), generator=generator)
        targets[:, unmasked:] = IGNORED
        batches.append(Batch(tokens, targets))
    total = 0.0
    for batch in batches:
        log_probabilities = model.logits(model(batch.tokens)).log_softmax(-1).detach()
        for place in range(batch.count):
            total -= float(log_probabilities[0, place, batch.targets[0, place]])
    result = evaluate(model, batches)
    assert result.tokens == 6
    assert result.loss == pytest.approx(total / 6, abs=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(model, batches[1:2])


def test_figures() -> None:
    result = Evaluation(math.log(64), 10)
    assert result.perplexity == pytest.approx(64)
    assert result.fraction_of_chance(4096) == pytest.approx(0.5)
    assert Evaluation(1e6, 1).perplexity == math.inf
