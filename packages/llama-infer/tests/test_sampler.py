"""Penalties, biases, log-probabilities and several samples, each against its formula written out in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_core import Llama, Tokenizer, generate_naive
from llama_infer import LLM, SamplingParams
from llama_infer.sampler import processed
from llama_infer.sequence import Sequence


def by_formula(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """One token after the other; vLLM's order: bias, then repetition, frequency and presence."""
    counts = Counter(output)
    result = []
    for token_id, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token_id]
        logit -= params.presence_penalty * (counts[token_id] > 0)
        result.append(logit)
    return result


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 5.0, 7: -1000.0}},
    {"repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 1.5, "logit_bias": {2: 1.5}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processed_logits_are_the_formula(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sequences = [Sequence([1, 2, 2, 5], params, 9), Sequence([0], SamplingParams(), 9)]
    for token_id in (5, 3, 5, 5):
        sequences[0].append(token_id)
    ours = processed(logits, sequences)
    expected = by_formula(logits[0].tolist(), [1, 2, 2, 5], [5, 3, 5, 5], params)
    torch.testing.assert_close(ours[0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert torch.equal(ours[1], before[1])  # the neighbour is not touched
    assert torch.equal(logits, before)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_generation_with_penalties_is_greedy_over_the_formula(model: Llama, settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, **settings)
    prompts = [[1, 2, 3], [9, 9, 4, 5, 6]]
    outputs = LLM(model, max_num_batched_tokens=32).generate([*prompts, [7]], [params, params, SamplingParams(seed=1)])
    for prompt, output in zip(prompts, outputs[:2], strict=True):
        ids: list[int] = []
        for _ in range(12):
            logits = model.logits(model(torch.tensor([prompt + ids])))[0, -1].tolist()
            scores = by_formula(logits, prompt, ids, params)
            ids.append(max(range(len(scores)), key=scores.__getitem__))
        assert output.token_ids == ids


def test_logprobs_are_raw_log_softmax(model: Llama, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    llm = LLM(model, tokenizer=tokenizer, max_num_seqs=2, max_num_batched_tokens=4)  # the prompt in parts
    prompt = [65, 66, 67, 68, 69, 70, 71]
    llm.generate([prompt], SamplingParams(max_tokens=1))  # what is cached must not make prompt_logprobs incomplete
    output = llm.generate([prompt], params)[0]
    ids = prompt + output.token_ids
    logprobs = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *output.logprobs]
    assert len(entries) == len(ids) - 1
    for at, entry in enumerate(entries):
        assert entry is not None
        row, wanted = logprobs[at], 2 if at < len(prompt) - 1 else 3
        order = row.argsort(descending=True).tolist()
        assert set(entry) == {ids[at + 1], *order[:wanted]}
        for token_id, given in entry.items():
            assert given.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert given.rank == order.index(token_id) + 1
            assert given.decoded_token == (tokenizer.decode([token_id], skip_special=False) if token_id < 259 else None)


def test_logprobs_are_absent_unless_asked_for_and_zero_is_the_token_alone(model: Llama) -> None:
    llm = LLM(model)
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=2, seed=0))[0]
    assert output.logprobs is None
    assert output.prompt_logprobs is None
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=2, seed=0, logprobs=0, prompt_logprobs=0))[0]
    assert [list(entry) for entry in output.logprobs or []] == [[token_id] for token_id in output.token_ids]
    assert [entry and list(entry) for entry in output.prompt_logprobs or []] == [None, [2]]


def test_n_samples_are_the_seeds_that_follow(model: Llama) -> None:
    llm = LLM(model, max_num_seqs=3)
    outputs = llm.generate([[1, 2, 3], [4]], [SamplingParams(n=4, seed=10, max_tokens=8), SamplingParams(max_tokens=2)])
    assert [len(output.samples) for output in outputs] == [4, 1]
    for index, sample in enumerate(outputs[0].samples):
        expected = generate_naive(
            lambda t: model.logits(model(t)), [1, 2, 3], max_new_tokens=8, temperature=1.0, seed=10 + index
        )
        assert sample.token_ids == expected
    assert outputs[0].token_ids == outputs[0].samples[0].token_ids
    unseeded = llm.generate([[1]], SamplingParams(n=3, max_tokens=8))[0]
    assert len({tuple(sample.token_ids) for sample in unseeded.samples}) == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("repetition_penalty", 0.0, r"in \(0, 2\], got 0.0"),
        ("presence_penalty", 2.1, r"in \[-2, 2\], got 2.1"),
        ("frequency_penalty", float("nan"), "got nan"),
        ("logit_bias", [1], "a mapping of token ids to numbers"),
        ("logit_bias", {-1: 0.0}, "token ids of at least 0, got -1"),
        ("logit_bias", {1: "x"}, "finite numbers, got 'x'"),
        ("n", 0, "at least 1, got 0"),
        ("logprobs", -1, "at least 0, got -1"),
        ("prompt_logprobs", True, "got True"),
    ],
)
def test_settings_outside_their_range(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must .*{words}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_several_greedy_samples_are_refused_and_biases_are_clamped() -> None:
    with pytest.raises(ValueError, match="n must be 1 at temperature 0"):
        SamplingParams(n=2, temperature=0.0)
    params = SamplingParams(logit_bias={1: 1e9})
    assert params.logit_bias == {1: 100.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 100.0}))


def test_a_bias_beyond_the_vocabulary_names_it(model: Llama) -> None:
    with pytest.raises(ValueError, match="logit_bias hold 272; token ids are from 0 to 271"):
        LLM(model).generate([[1]], SamplingParams(logit_bias={272: 1.0}))


def test_timings_and_counts(model: Llama) -> None:
    llm = LLM(model)
    llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=2))
    output = llm.generate([[1, 2, 3, 9]], SamplingParams(temperature=0.0, max_tokens=2))[0]
    timings = output.samples[0].timings
    assert timings is not None
    assert timings.arrived < timings.first_token < timings.finished  # type: ignore[operator]
    assert output.cached_tokens == 3


@pytest.fixture
def nan_llm(make_model: Callable[..., Llama]) -> LLM:
    model = make_model()
    model.model.embed_tokens.weight[99] = float("nan")  # type: ignore[union-attr]
    return LLM(model)


def test_one_request_of_nan_leaves_the_others(nan_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4)
    good, bad, other = nan_llm.generate([[1, 2], [99], [3]], params)
    assert (good.finish_reason, bad.finish_reason, other.finish_reason) == ("length", "abort", "length")
    assert bad.token_ids == []
    assert "the largest logit is nan" in (bad.error or "")
    with pytest.raises(ValueError, match="the largest logit is nan"):
        list(nan_llm.stream([99], params))


@pytest.mark.parametrize("settings", [{"repetition_penalty": 5e-324}, {"temperature": 5e-324}, {"top_p": 5e-324}])
def test_the_smallest_settings_are_finite(model: Llama, settings: dict[str, float]) -> None:
    output = LLM(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4, **settings))[0]  # type: ignore[arg-type]
    assert output.error is None
    assert len(output.token_ids) == 4
