"""Calls in what models write: every spelling, whole and in pieces, and everything that only looks like one."""

from __future__ import annotations

import json
import random

import pytest

from llama_infer.serve.tools import ToolStream, parse

NAMES = ("weather", "add", "shop.buy")
OSLO = ("weather", {"city": "Oslo"})
CALLS = [
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    ('  {"name": "weather", "arguments": {"city": "Oslo"}}\n', "", [OSLO]),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', "", [OSLO]),
    ('{"type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}}', "", [OSLO]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    (
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "add", "parameters": {"a": 1, "b": 2}}',
        "",
        [OSLO, ("add", {"a": 1, "b": 2})],
    ),
    ('[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "add"}]', "", [OSLO, ("add", {})]),
    ('<function=weather>{"city": "Oslo"}</function>', "", [OSLO]),
    ("<function=add></function>", "", [("add", {})]),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", [OSLO]),
    (
        'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "Let me look.",
        [OSLO, ("add", {"a": 1})],
    ),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', "", [OSLO]),  # the end came before the tag's
    ('[weather(city="Oslo"), shop.buy(what=["a", {"b": None}], n=-1)]', "", [
        OSLO, ("shop.buy", {"what": ["a", {"b": None}], "n": -1})]),
    ('{"name": "weather", "parameters": {"city": "Ŝanghajo 🦙"}}', "", [("weather", {"city": "Ŝanghajo 🦙"})]),
]  # fmt: skip
WORDS = [
    "",
    "It is 7 degrees.",
    '{"name": "rm", "parameters": {}}',
    '{"name": "weather", "parameters": [1]}',
    '{"name": "weather", "parameters": {"city": "Os',
    '{"name": "weather", "parameters": {"city": "Oslo"}} and more',
    'Like this: {"name": "weather", "parameters": {}}',
    '{"name": "weather", "parameters": {"x": NaN}}',
    "[1, 2, 3]",
    "[weather]",
    "[weather('Oslo')]",
    "[weather(city=open('x'))]",
    "[rm(x=1)]",
    "[weather(city={1, 2})]",
    "[" * 5000,
    '{"a":' * 5000,
    "<tool_call>nothing</tool_call>",
    "a <tool_box> of mine, and a < b",
    "<function=rm>{}</function>",
    "<function=add>{}</function> too",
    "<function=add>{</function>",
]


@pytest.mark.parametrize(("text", "words", "expected"), CALLS, ids=range(len(CALLS)))
def test_calls(text: str, words: str, expected: list[tuple[str, object]]) -> None:
    said, calls = parse(text, NAMES)
    assert said == words
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("text", WORDS, ids=range(len(WORDS)))
def test_words(text: str) -> None:
    assert parse(text, NAMES) == (text, [])


@pytest.mark.parametrize("text", [text for text, *_ in CALLS] + WORDS, ids=range(len(CALLS) + len(WORDS)))
def test_in_pieces_it_is_the_same(text: str) -> None:
    dice = random.Random(len(text))
    for most in (1, 3, 40):
        stream, shown, at = ToolStream(NAMES), "", 0
        while at < len(text):
            step = dice.randint(1, most)
            shown += stream.push(text[at : at + step])
            at += step
        words, calls = stream.finish()
        whole, expected = parse(text, NAMES)
        assert (shown + words).strip() == whole.strip()
        assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in expected]
        if calls:
            assert "<tool" not in shown


def test_words_are_shown_at_once() -> None:
    stream = ToolStream(NAMES)
    assert [stream.push(piece) for piece in ("It ", "is < 7", " <tool", "s>", " of")] == [
        "It ", "is < 7", " ", "<tools>", " of"]  # fmt: skip
    assert stream.finish() == ("", [])
