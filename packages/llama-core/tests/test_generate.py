"""generate_naive: the oracle, tested against things simpler still."""

import pytest
import torch
from torch import Tensor

from llama_core import Llama, preset
from llama_core.generate import generate_naive


def successor(tokens: Tensor) -> Tensor:
    """Logits under which each token is followed by the next number (of 10)."""
    return torch.nn.functional.one_hot((tokens + 1) % 10, 10).float() * 5


def test_greedy_follows_the_logits() -> None:
    assert generate_naive(successor, [3, 1], max_new_tokens=4) == [2, 3, 4, 5]


def test_any_of_several_end_ids_stops_and_is_kept() -> None:
    assert generate_naive(successor, [0], max_new_tokens=9, eos_ids=[7, 4]) == [1, 2, 3, 4]


def test_an_end_id_in_the_prompt_ends_nothing() -> None:
    assert generate_naive(successor, [4, 7], max_new_tokens=2, eos_ids=[7, 4]) == [8, 9]


def test_zero_new_tokens() -> None:
    assert generate_naive(successor, [1], max_new_tokens=0) == []


def test_every_step_sees_the_whole_sequence() -> None:
    seen: list[list[int]] = []

    def logits_fn(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return successor(tokens)

    generate_naive(logits_fn, [5, 6], max_new_tokens=3)
    assert seen == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]


def test_seed_decides_the_draw() -> None:
    def flat(tokens: Tensor) -> Tensor:
        return torch.zeros(1, tokens.shape[1], 1000)

    first, second, other = (generate_naive(flat, [0], max_new_tokens=8, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert first == second != other
    unseeded = [generate_naive(flat, [0], max_new_tokens=8, temperature=1.0) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_model_continues_its_own_argmax() -> None:
    model = Llama(preset("tiny"))
    prompt = [3, 14, 15, 92, 6]
    ids = generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=6)
    logits = model.logits(model(torch.tensor([prompt + ids])))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one token id, got none"):
        generate_naive(successor, [], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        generate_naive(successor, [1], max_new_tokens=-1)
    with pytest.raises(ValueError, match="temperature must be"):
        generate_naive(successor, [1], max_new_tokens=1, temperature=-0.5)
