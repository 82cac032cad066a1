"""SamplingParams: vLLM's names, and refusals that name value and range."""

import dataclasses
import math

import pytest

from llama_infer import SamplingParams


def test_defaults_sample_from_the_whole_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.max_tokens is None


def test_single_values_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 7])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), (3, 7))
    assert SamplingParams(stop=["a", "b"], stop_token_ids=5).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1.0, "a finite number of at least 0, got -1.0"),
        ("temperature", math.nan, "got nan"),
        ("temperature", math.inf, "got inf"),
        ("temperature", "warm", "got 'warm'"),
        ("temperature", 10**400, "a finite number of at least 0"),  # beyond every float
        ("stop", "\udcff", "UTF-8"),
        ("top_k", -2, r"0 or -1 \(off\), or at least 1, got -2"),
        ("top_k", 1.5, "got 1.5"),
        ("top_k", True, "got True"),
        ("top_p", 0.0, r"in \(0, 1\], got 0.0"),
        ("top_p", 1.01, "got 1.01"),
        ("min_p", -0.1, r"in \[0, 1\], got -0.1"),
        ("seed", -1, r"from 0 to 2\*\*63 - 1, got -1"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("min_tokens", -1, "at least 0, got -1"),
        ("stop", "", "at least 1 character, got ''"),
        ("stop", ["a", ""], "at least 1 character, got ''"),
        ("stop", [3], "got 3"),
        ("stop_token_ids", [-1], "at least 0, got -1"),
    ],
)
def test_values_outside_the_range_are_errors(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must .*{words}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_fewer_at_most_than_at_least_is_an_error() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens 2, got 3"):
        SamplingParams(min_tokens=3, max_tokens=2)
