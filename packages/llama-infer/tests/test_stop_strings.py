"""Stop strings against a definition on the whole text, for every way of cutting it."""

import random

import pytest

from llama_infer.stop_strings import StopStrings


def cut_at_first(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, looking at one character more at a time."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


def run(pieces: list[str], stops: list[str]) -> list[str]:
    stopper = StopStrings(stops)
    return [*(stopper.push(piece) for piece in pieces), stopper.flush()]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""]),
        (["one S", "TO", "P two"], ["STOP"], ["one ", "", "", ""]),
        (["one S", "TO", "NE"], ["STOP"], ["one ", "", "STONE", ""]),
        (["one S", "TO"], ["STOP"], ["one ", "", "STO"]),
        (["aab", "aac"], ["aaa", "baac"], ["aa", "", ""]),
        (["abc"], ["b", "abc"], ["a", ""]),
        (["x\n", "\n", "y"], ["\n\n"], ["x", "", "", ""]),
    ],
)
def test_pieces(pieces: list[str], stops: list[str], shown: list[str]) -> None:
    assert run(pieces, stops) == shown


def test_what_matched_is_known() -> None:
    stopper = StopStrings(["x", "bc"])
    assert stopper.push("abcd") == "a"
    assert stopper.matched == "bc"
    assert stopper.push("more") == ""


def test_random_texts_and_cuts_equal_the_definition() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=chance.randrange(12)))
        stops = ["".join(chance.choices("ab", k=chance.randrange(1, 5))) for _ in range(chance.randrange(1, 4))]
        pieces, rest = [], text
        while rest:
            size = chance.randrange(1, 4)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert "".join(run(pieces, stops)) == cut_at_first(text, stops), (pieces, stops)
