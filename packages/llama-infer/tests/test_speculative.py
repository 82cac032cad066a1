"""The check of proposals alone: what comes out is distributed as the model says, whatever the draft says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llama_infer import SamplingParams
from llama_infer.sequence import Sequence
from llama_infer.speculative import Proposals, distribution, draw, uniforms

GRID = 200
"""Values of each of the two random numbers: a probability is met to about one in so many, and often nearer."""


def outcome(logits_V: Tensor, q_V: Tensor, params: SamplingParams) -> Tensor:
    """The exact chances of what `checked` gives: over all proposals, and a grid of both random numbers."""
    found = torch.zeros_like(q_V, dtype=torch.float64)
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    numbers = [(0.0, accept, again) for accept in points.tolist() for again in points.tolist()]
    for proposed in q_V.nonzero().flatten().tolist():
        count = len(numbers)
        proposals = Proposals(
            list(range(count)),
            [Sequence([1], params, 9)] * count,
            torch.full((count,), proposed),
            q_V.expand(count, -1),
            numbers,
        )
        drawn = proposals.checked(logits_V.expand(count, -1))
        found += q_V[proposed].double() * torch.bincount(drawn, minlength=len(q_V)) / count
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.7}])
def test_the_result_has_the_models_distribution(seed: int, settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    logits_V, other_V = torch.randn(2, 6, generator=generator) * 2
    p_V = distribution(logits_V.unsqueeze(0), [Sequence([1], params, 9)])[0]
    for q_V in (
        other_V.softmax(-1),
        distribution(other_V.unsqueeze(0), [Sequence([1], params, 9)])[0],  # some of its zeros are not the model's
        p_V,
        torch.nn.functional.one_hot(p_V.argmin(), 6).float(),  # always the least probable
        torch.full((6,), 1 / 6),
    ):
        # The acceptance of each token errs by at most half a grid step, so does each draw of what is refused.
        assert (outcome(logits_V, q_V, params) - p_V.double()).abs().max() < 1.5 / GRID


def test_a_wrong_rule_would_be_seen() -> None:
    """Drawing again from p, not from what is left of it, is off by more than the tolerance above."""
    p_V, q_V = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.2, 0.6])
    least = torch.minimum(p_V, q_V)
    wrong = least + (1 - least.sum()) * p_V
    assert (wrong - p_V).abs().max() > 0.05
    assert (outcome(p_V.log(), q_V, SamplingParams()) - p_V).abs().max() < 1.5 / GRID


def test_a_draft_that_equals_the_model_is_always_right() -> None:
    logits_V = torch.tensor([0.3, -1.0, 2.0, 0.3])
    sequence = Sequence([1], SamplingParams(), 9)
    q_V = distribution(logits_V.unsqueeze(0), [sequence])[0]
    for proposed in range(4):
        proposals = Proposals([0], [sequence], torch.tensor([proposed]), q_V.unsqueeze(0), [(0.0, 1 - 2.0**-53, 0.5)])
        assert proposals.checked(logits_V.unsqueeze(0)).item() == proposed


def test_greedy_takes_the_models_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    sequences = [Sequence([1], SamplingParams(temperature=0.0), 9)] * 2
    one_hot = torch.nn.functional.one_hot(torch.tensor([2, 0]), 3).float()
    for chances in (None, one_hot):
        proposals = Proposals([0, 1], sequences, torch.tensor([2, 0]), chances, [(0.5, 0.5, 0.5)] * 2)
        assert proposals.checked(logits).tolist() == [1, 0]


def test_random_numbers_belong_to_a_place_of_a_seed() -> None:
    numbers = [uniforms(seed, place) for seed in range(40) for place in range(40)]
    flat = torch.tensor(numbers, dtype=torch.float64)
    assert len(set(numbers)) == 1600
    assert flat.min() >= 0
    assert flat.max() < 1
    # 4800 numbers: the mean of uniform ones errs by 1 / sqrt(12 · 4800) = 0.0042, their squares' by 0.0043.
    assert abs(flat.mean() - 1 / 2) < 4 * 0.0042
    assert abs(flat.square().mean() - 1 / 3) < 4 * 0.0043
    assert abs(torch.corrcoef(flat.T) - torch.eye(3)).max() < 4 / 40  # 1 / sqrt(1600)
    assert uniforms(3, 7) == uniforms(3, 7)


def test_draws_follow_the_weights_and_never_what_has_none() -> None:
    weights = torch.tensor([0.0, 0.2, 0.0, 0.8, 0.0])
    points = torch.arange(1000, dtype=torch.float64) / 1000
    drawn = draw(weights.expand(1000, -1), points)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 200, 0, 800, 0]
    assert draw(weights.unsqueeze(0), torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 3
