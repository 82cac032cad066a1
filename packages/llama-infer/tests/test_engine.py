"""The engine's own decisions against the oracle: long generations, prompts in parts, prompts begun before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from llama_core import Attend, Llama, generate_naive
from llama_infer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def naive(model: Llama, prompt: list[int], **settings: Any) -> list[int]:
    return generate_naive(lambda tokens: model.logits(model(tokens)), prompt, **settings)


@pytest.fixture
def bare(model: Llama) -> LLM:
    return LLM(model)


def test_generation_to_the_very_end_equals_the_oracle(make_model: Callable[..., Llama]) -> None:
    model = make_model(max_position_embeddings=300)
    output = LLM(model).generate([[1, 2, 3]], SamplingParams(temperature=0.0))[0]
    assert output.token_ids == naive(model, [1, 2, 3], max_new_tokens=297)  # past what its place was chosen for


def test_a_long_prompt_in_parts_equals_the_oracle(model: Llama) -> None:
    prompts = [list(range(1, 30)), [3, 1, 4], list(range(50, 64))]
    for output, prompt in zip(
        LLM(model, max_num_seqs=4, max_num_batched_tokens=12).generate(prompts, GREEDY), prompts, strict=True
    ):
        assert output.token_ids == naive(model, prompt, max_new_tokens=8)


# --- the prompt before is not computed again


class Counting(Llama):
    """A Llama that notes how many tokens each pass has."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        self.widths.append(tokens.shape[1])
        return super().forward(tokens, positions, attend)


@pytest.fixture
def counting(model: Llama) -> Counting:
    counting = Counting(model.config).eval().requires_grad_(False)
    counting.load_state_dict(model.state_dict())
    counting.widths = []  # type: ignore[assignment]
    return counting


def test_a_continued_prompt_starts_from_the_cache(counting: Counting, model: Llama) -> None:
    llm = LLM(counting)
    first = llm.generate([[1, 2, 3, 4, 5]], GREEDY)[0].token_ids
    longer = [1, 2, 3, 4, 5, *first, 9, 9]
    assert llm.generate([longer], GREEDY)[0].token_ids == naive(model, longer, max_new_tokens=8)
    # 5 + 7 tokens are held (the eighth was never fed), so the last of the first answer and the two new ones run
    assert counting.widths == [5, *[1] * 7, 3, *[1] * 7]
    counting.widths.clear()
    other = [1, 2, 3, 8]
    assert llm.generate([other], GREEDY)[0].token_ids == naive(model, other, max_new_tokens=8)
    assert counting.widths == [1, *[1] * 7]
    counting.widths.clear()
    assert llm.generate([other[:2]], GREEDY)[0].token_ids == naive(model, other[:2], max_new_tokens=8)
    assert counting.widths[0] == 1  # all of it is held; its last token runs for the logits


def test_a_stream_that_is_closed_or_interrupted_leaves_a_sound_cache(counting: Counting, model: Llama) -> None:
    llm = LLM(counting)
    stream = llm.stream([1, 2, 3], GREEDY)
    begun = [next(stream).token_id for _ in range(3)]
    stream.close()  # type: ignore[attr-defined]
    prompt = [1, 2, 3, *begun, 7]
    expected = naive(model, prompt, max_new_tokens=8)

    layer = counting.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt], GREEDY)  # the first layer has written these tokens, the second has not
    hook.remove()
    assert llm.generate([prompt], GREEDY)[0].token_ids == expected


def test_two_streams_at_once_do_not_share_a_cache(bare: LLM, model: Llama) -> None:
    bare.generate([[1, 2, 3]], GREEDY)
    streams = [bare.stream([1, 2, 3, 4], GREEDY), bare.stream([1, 2, 3, 5], GREEDY)]
    ids = [[chunk.token_id for chunk in pair] for pair in zip(*streams, strict=True)]
    assert [list(row) for row in zip(*ids)] == [naive(model, [1, 2, 3, last], max_new_tokens=8) for last in (4, 5)]


def test_threads_that_share_an_llm_do_not_share_a_cache(bare: LLM, model: Llama) -> None:
    prompts = [[1, 2, 3, last] for last in range(4, 8)]
    expected = [naive(model, prompt, max_new_tokens=4) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # between any two bytecodes, where both could take the cache of the prompt before
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(20):
                outputs = threads.map(lambda prompt: bare.generate([prompt], params)[0].token_ids, prompts)
                assert list(outputs) == expected
    finally:
        sys.setswitchinterval(interval)
