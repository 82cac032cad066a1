"""Sampling: case B19, each filter against its definition, and rows that know nothing of one another."""

import math

import pytest
import torch

from llama_core.sampling import filter_logits, sample

INF = float("inf")


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# --- case B19: temperature zero crashes or samples at random


def test_b19_zero_is_the_argmax_for_every_seed() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert {sample(logits, 0.0, generator=generators(seed)).item() for seed in range(100)} == {1}


def test_b19_zero_beside_a_warm_row() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    draws = [sample(logits, [0.0, 0.8], generator=generators(7, seed)).tolist() for seed in range(100)]
    assert {row0 for row0, _ in draws} == {1}
    assert {row1 for _, row1 in draws} == {0, 1, 2}


def test_b19_tiny_temperature_is_safe() -> None:
    logits = torch.tensor([[50.0, -50.0, 49.9]])
    for temperature in (1e-8, 1e-38, 1e-300, 5e-324):
        assert not filter_logits(logits, temperature).isnan().any()
        assert [sample(logits, temperature, generator=generators(seed)).item() for seed in range(20)] == [0] * 20


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_b19_bad_temperature_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match=r"temperature must be a finite number of at least 0; got"):
        sample(torch.zeros(1, 3), bad)


def test_b19_zero_is_identical_whatever_else_is_set() -> None:
    logits = torch.randn(5, 50, generator=generators(0)[0])
    expected = logits.argmax(-1).tolist()
    for seed, top_k, top_p, min_p in [(1, 0, 1.0, 0.0), (2, 3, 0.1, 0.9), (3, -1, 0.5, 1.0)]:
        assert sample(logits, 0.0, top_k, top_p, min_p, generators(seed)[0]).tolist() == expected
        kept = filter_logits(logits, 0.0, top_k, top_p, min_p)
        assert kept.isfinite().sum(-1).tolist() == [1] * 5
        assert kept.argmax(-1).tolist() == expected


def test_zero_takes_the_first_of_equals() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 2.0]]), 0.0).tolist() == [1]


# --- the filters, by a slow definition on one row


def slow_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities by the definitions, in float64 Python."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = order[: top_k if top_k > 0 else None]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if mass >= top_p and nucleus:
            break
        nucleus.append(i)
        mass += weights[i] / total
    kept = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, -1, 0.6, 0.0),
    (1.5, 0, 1.0, 0.2),
    (0.9, 7, 0.8, 0.1),
    (2.0, 1, 1.0, 0.0),
    (1.0, 999, 1e-9, 0.0),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_filters_equal_their_definition(settings: tuple[float, int, float, float]) -> None:
    logits = torch.randn(1, 23, generator=generators(3)[0]) * 2
    expected = slow_distribution(logits[0].double().tolist(), *settings)
    # float32 softmax over 23 tokens: rounding of a few 1e-7
    torch.testing.assert_close(
        filter_logits(logits, *settings)[0].softmax(-1), torch.tensor(expected), atol=1e-6, rtol=0
    )


def test_rows_with_their_own_settings_equal_single_rows() -> None:
    logits = torch.randn(len(SETTINGS), 23, generator=generators(4)[0]).mul(3).round().div(3)  # with equal values
    columns = list(zip(*SETTINGS))
    together = filter_logits(logits, *columns)
    alone = torch.cat([filter_logits(logits[i : i + 1], *SETTINGS[i]) for i in range(len(SETTINGS))])
    assert torch.equal(together, alone)
    seeds = range(len(SETTINGS))
    drawn = sample(logits, *columns, generator=generators(*seeds)).tolist()
    assert drawn == [sample(logits[i : i + 1], *SETTINGS[i], generator=generators(i)).item() for i in seeds]


def test_tensor_settings_are_taken() -> None:
    logits = torch.randn(2, 9, generator=generators(5)[0])
    assert torch.equal(
        filter_logits(logits, torch.tensor([0.5, 1.0]), torch.tensor([3, 0])), filter_logits(logits, [0.5, 1.0], [3, 0])
    )


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]])
    expected = filter_logits(logits, 1.0, 4, 0.99).softmax(-1)[0]
    draws = sample(logits.expand(20_000, 5), 1.0, 4, 0.99, generator=generators(0)[0])
    observed = draws.bincount(minlength=5) / 20_000
    assert observed[3] == 0  # top-k removed it
    # five standard deviations of a binomial: 5 · sqrt(0.25 / 20000) = 0.018
    assert (observed - expected).abs().max() < 0.018


def test_the_same_seed_draws_the_same() -> None:
    logits = torch.randn(1, 1000, generator=generators(6)[0])
    draws = [[sample(logits, generator=generator).item() for _ in range(20)] for generator in generators(1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_tokens_equal_to_the_last_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 1.0]])
    assert filter_logits(logits, top_k=2).isfinite().tolist() == [[True, True, False, True]]
    assert filter_logits(logits, top_p=0.6).isfinite().tolist() == [[True, True, False, True]]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]).expand(500, 5)
    assert set(sample(logits, generator=generators(0)[0]).tolist()) == {1, 3}


def test_half_precision_logits() -> None:
    logits = torch.randn(3, 40, generator=generators(8)[0]).bfloat16()
    assert torch.equal(filter_logits(logits, 0.8, 5), filter_logits(logits.float(), 0.8, 5))


# --- refusals


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_k", -2, "at least 1; got -2"),
        ("top_k", 1.5, "integer: .* got 1.5"),
        ("top_p", 0.0, r"in \(0, 1\]; got 0.0"),
        ("top_p", 1.1, r"in \(0, 1\]; got 1.1"),
        ("min_p", -0.1, r"in \[0, 1\]; got -0.1"),
        ("min_p", 1.1, r"in \[0, 1\]; got 1.1"),
        ("temperature", [1.0, 1.0, 1.0], "one number or 2, one for each row; got 3"),
        ("generator", [None], "2, one for each row; got 1"),
    ],
)
def test_bad_settings_are_errors_that_name_the_range(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{words}"):
        sample(torch.zeros(2, 4), **{name: value})  # type: ignore[arg-type]


def test_logits_of_the_wrong_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(rows, vocabulary\), got \(4,\)"):
        sample(torch.zeros(4))


# --- a broken model: no id is better than a wrong one


@pytest.mark.parametrize("temperature", [0.0, 1.0, [0.0, 1.0]])
@pytest.mark.parametrize("row", [[math.nan, 1.0, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF]])
def test_logits_without_a_finite_largest_are_an_error(row: list[float], temperature: float | list[float]) -> None:
    # Drawn from, each of these rows once gave id 3, past the vocabulary; at temperature 0 an arbitrary one.
    logits = torch.tensor([[1.0, 3.0, 2.0], row])
    with pytest.raises(ValueError, match=r"largest logit of row 1 is (nan|inf|-inf); it must be a finite number"):
        sample(logits, temperature)
    with pytest.raises(ValueError, match="row 1"):
        filter_logits(logits, temperature)


def test_no_rows_draw_nothing() -> None:
    for temperature in (0.0, 1.0):
        assert sample(torch.zeros(0, 3), temperature).tolist() == []
