"""Guesses from the text: the newest place, the longest match, no more than is asked for."""

import pytest

from llama_infer.prompt_lookup import guesses


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # the newest place
        ([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], 1, [8]),  # the longest match before the newest
        ([3, 3, 3], 2, [3]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_guesses(ids: list[int], most: int, expected: list[int]) -> None:
    assert guesses(ids, most) == expected
