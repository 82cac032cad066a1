"""What cannot be generated is an error of that request alone, which names the value and the limit: from Python at once,
through AsyncLLM while others run. Files of prompts have the same table in test_batch_file.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from llama_core import Llama, Tokenizer
from llama_infer import LLM, AsyncLLM, SamplingParams

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompt 0 is empty; at least 1 token is needed"),
    ([1] * 64, {}, "prompt 0 has 64 tokens; the context is 64, so a prompt may have at most 63"),
    ("x" * 99, {}, "prompt 0 has 100 tokens; the context is 64, so a prompt may have at most 63"),
    ([{"role": "user", "content": "x" * 99}], {}, "the context is 64, so a prompt may have at most 63"),
    ([1, -1], {}, "prompt 0 holds -1; token ids are Python integers from 0 to 258"),
    ([1, 259], {}, "prompt 0 holds 259; token ids are Python integers from 0 to 258"),
    ([1, 2.0], {}, "prompt 0 holds 2.0; token ids are Python integers from 0 to 258"),
    ([1, True], {}, "prompt 0 holds True; token ids are Python integers from 0 to 258"),
    (5.5, {}, "a text"),
    (None, {}, "a text"),
    ("a\ud800", {}, "half of a surrogate pair"),
    ("a", {"stop_token_ids": (272,)}, "stop_token_ids hold 272; token ids are from 0 to 271"),
    ("a", {"logit_bias": {999: 1.0}}, "logit_bias hold 999; token ids are from 0 to 271"),
    ("a", {"structured_outputs": {"regex": "("}}, "prompt 0: structured_outputs: regex '(': "),
    ("a", {"structured_outputs": {"json": {"type": "foo"}}}, "Invalid type: foo"),
]
NO_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": -3}, "max_tokens must be at least 1, got -3"),
    ({"max_tokens": 2.5}, "max_tokens must be at least 1, got 2.5"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens 4, got 5"),
    ({"temperature": -0.1}, "temperature must be a finite number of at least 0, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be a finite number of at least 0, got nan"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
    ({"top_k": -2}, "top_k must be 0 or -1 (off), or at least 1, got -2"),
    ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"n": 2, "temperature": 0.0}, "n must be 1 at temperature 0"),
    ({"stop": ("",)}, "stop must hold texts of at least 1 character, got ''"),
    ({"seed": -1}, "seed must be from 0 to 2**63 - 1, got -1"),
    ({"logprobs": -1}, "logprobs must be at least 0, got -1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2], got 0"),
]


@pytest.fixture(scope="module", params=["plain", "guesses", "draft"])
def llm(request: pytest.FixtureRequest, model: Llama, tokenizer: Tokenizer, make_model: Callable[..., Llama]) -> LLM:
    settings = {"plain": {}, "guesses": {"speculative_tokens": 3}, "draft": {"draft": make_model(seed=4)}}
    return LLM(model, tokenizer=tokenizer, **settings[request.param])


@pytest.mark.parametrize(("prompt", "settings", "words"), REFUSED, ids=range(len(REFUSED)))
def test_at_once_from_python(llm: LLM, prompt: Any, settings: dict[str, Any], words: str) -> None:
    params = SamplingParams(**settings)
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    generate = llm.chat if chat else llm.generate
    with pytest.raises(ValueError, match=re.escape(words)):
        generate([prompt], params)
    with pytest.raises(ValueError, match=re.escape(words)):
        llm.stream(prompt, params)
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting


@pytest.mark.parametrize(("settings", "words"), NO_PARAMETERS, ids=range(len(NO_PARAMETERS)))
def test_parameters_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(**settings)


def test_alone_among_others(llm: LLM) -> None:
    """Good requests and all of the bad ones at once through AsyncLLM."""
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    expected = llm.generate("hello", greedy)[0].token_ids

    async def go() -> tuple[list[Any], list[Any]]:
        async with AsyncLLM(llm) as many:
            good = [asyncio.create_task(many.generate("hello", greedy)) for _ in range(5)]
            bad = [asyncio.create_task(many.generate(p, SamplingParams(**s))) for p, s, _ in REFUSED]
            good += [asyncio.create_task(many.generate("hello", greedy)) for _ in range(5)]
            return await asyncio.gather(*good), await asyncio.gather(*bad, return_exceptions=True)

    good, bad = asyncio.run(go())
    assert [output.token_ids for output in good] == [expected] * 10
    for error, (prompt, _, words) in zip(bad, REFUSED, strict=True):
        assert isinstance(error, ValueError), (prompt, error)
        assert words in str(error)
    llm.engine.scheduler.pool.check()


def test_the_last_place_of_the_context(llm: LLM) -> None:
    """63 tokens leave room for 1, 60 for 4 of the 9 that are asked for: the reason says that it was cut (case B24)."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for length, new in ((63, 1), (60, 4), (55, 9), (50, 9)):
        output = llm.generate([[7] * length], params)[0]
        assert (len(output.token_ids), output.finish_reason) == (new, "length")
