"""Generation with a draft model: the oracle's tokens when greedy, the model's distribution when not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_core import Llama, Tokenizer, generate_naive
from llama_infer import LLM, SamplingParams

MakeModel = Callable[..., Llama]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def near(model: Llama, make_model: MakeModel, noise: float, **changes: Any) -> Llama:
    """A draft that is often right: the model itself, with some noise in its weights."""
    draft = make_model(**changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, its in zip(draft.parameters(), model.parameters(), strict=True):
            mine.copy_(its + noise * torch.randn(its.shape, generator=generator))
    return draft


def prompts_of(seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    stem = [dice.randrange(256) for _ in range(20)]
    return [stem[: dice.randrange(1, 20)] + [dice.randrange(256)] * dice.randrange(1, 5) for _ in range(9)]


BLOCK = 2 * 2 * 16 * 2 * 8 * 4
"""Bytes of 16 tokens in the tiny model's cache; the draft's is as large."""
MIXES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    {"kv_cache_memory_bytes": 2 * 5 * BLOCK, "max_num_seqs": 4},
    {"attention": "plain", "block_size": 4, "max_num_seqs": 3},
    {"attention": "triton", "kv_cache_memory_bytes": 2 * 5 * BLOCK, "max_num_seqs": 4},
]


@pytest.fixture(scope="module")
def oracle(model: Llama) -> list[list[int]]:
    return [generate_naive(lambda ids: model.logits(model(ids)), prompt, max_new_tokens=24) for prompt in prompts_of(1)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("kind", ["the model", "near", "stranger", "one layer"])
def test_greedy_tokens_equal_the_oracle(
    model: Llama, make_model: MakeModel, oracle: list[list[int]], mix: dict[str, Any], kind: str
) -> None:
    draft = {
        "the model": lambda: model,
        "near": lambda: near(model, make_model, 0.02),
        "stranger": lambda: make_model(seed=9),
        "one layer": lambda: make_model(seed=9, num_hidden_layers=1, num_key_value_heads=4, intermediate_size=16),
    }[kind]()
    if mix.get("attention") == "triton" and not torch.cuda.is_available():
        mix = {**mix, "attention": "sdpa"}
    llm = LLM(model, draft=draft, num_speculative_tokens=3, **mix)
    outputs = llm.generate(prompts_of(1), GREEDY)
    assert [output.token_ids for output in outputs] == oracle
    if "kv_cache_memory_bytes" in mix and kind == "stranger":
        assert llm.engine.scheduler.preemptions > 0
    llm.engine.scheduler.pool.check()
    rate = llm.engine.accepted / llm.engine.guessed
    if kind == "the model":
        assert rate == 1.0
    elif kind == "near":
        assert 0.3 < rate < 1
    else:
        assert rate < 0.3
    assert sum(output.samples[0].guessed_tokens for output in outputs) == llm.engine.guessed
    assert sum(output.samples[0].accepted_tokens for output in outputs) == llm.engine.accepted
    assert llm.acceptance_rate == rate


def test_steps_are_saved(model: Llama) -> None:
    """A draft that is always right: 1 token in the prompt's step, then 4 in each."""
    llm = LLM(model, draft=model, num_speculative_tokens=3)
    ran = []
    run = llm.engine.runner.run
    llm.engine.runner.run = lambda batch: (ran.append(len(batch)), run(batch))[1]  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=21))
    assert len(ran) == 1 + 20 // 4


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.6])
def test_sampled_tokens_have_the_models_distribution(make_model: MakeModel, noise: float) -> None:
    """Chi-square over all outcomes of three tokens of a vocabulary of four, against the chances by enumeration."""
    model = make_model(vocab_size=4, bos_token_id=0, eos_token_id=0)
    draft = near(model, make_model, noise, vocab_size=4, bos_token_id=0, eos_token_id=0)
    many, settings = 3000, {"temperature": 1.3, "top_p": 0.95}
    llm = LLM(model, draft=draft, num_speculative_tokens=2, max_num_seqs=256)
    params = SamplingParams(n=many, seed=11, max_tokens=3, **settings)  # type: ignore[arg-type]
    counts = dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    output = llm.generate([[1, 2]], params)[0]
    for sample in output.samples:
        counts[tuple(sample.token_ids)] += 1
    from llama_core import filter_logits

    chi, cells, rare, rare_expected = 0.0, 0, 0, 0.0
    for outcome, count in counts.items():
        ids = torch.tensor([[1, 2, *outcome]])
        logits = model.logits(model(ids))[0, 1:4]
        p = filter_logits(logits, 1.3, 0, 0.95).softmax(-1)
        expected = many * p[[0, 1, 2], list(outcome)].double().prod().item()
        if expected == 0:
            assert count == 0
        elif expected < 5:
            rare, rare_expected = rare + count, rare_expected + expected
        else:
            chi, cells = chi + (count - expected) ** 2 / expected, cells + 1
    if rare_expected >= 5:
        chi, cells = chi + (rare - rare_expected) ** 2 / rare_expected, cells + 1
    assert cells > 8
    # Mean k and variance 2k of chi-square with k = cells - 1: four deviations above the mean.
    assert chi < cells - 1 + 4 * (2 * (cells - 1)) ** 0.5
    assert (llm.engine.accepted == llm.engine.guessed) == (noise == 0.0)


def test_a_seed_decides_whatever_runs_beside(model: Llama, make_model: MakeModel) -> None:
    """Alone, in a crowd, in little memory and with another number of guesses: the same draws."""
    draft = near(model, make_model, 0.05)
    params = [SamplingParams(temperature=1.0, top_k=40, seed=i, max_tokens=20) for i in range(9)]
    prompts = prompts_of(2)
    alone = [
        LLM(model, draft=draft, num_speculative_tokens=1).generate([prompt], each)[0].token_ids
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for mix in MIXES[:3]:
        llm = LLM(model, draft=draft, num_speculative_tokens=4, **mix)
        assert [output.token_ids for output in llm.generate(prompts, params)] == alone
        assert 0 < llm.engine.accepted < llm.engine.guessed
    other = LLM(model, draft=draft).generate(prompts[0], SamplingParams(temperature=1.0, seed=77, max_tokens=20))[0]
    assert other.token_ids != alone[0]


def test_all_settings_beside_one_another(model: Llama, make_model: MakeModel, tokenizer: Tokenizer) -> None:
    """Penalties take no guesses; log-probabilities, stop strings, guided output, n and min_tokens do."""
    draft = near(model, make_model, 0.02)
    greedy = {"temperature": 0.0, "max_tokens": 20}
    params = [
        SamplingParams(**greedy, repetition_penalty=1.3),
        SamplingParams(**greedy, logprobs=2, prompt_logprobs=1),
        SamplingParams(**greedy, stop=["e", "x"], min_tokens=2),
        SamplingParams(**greedy, structured_outputs={"regex": "(ab|cd|[x-z]){4,9}"}),
        SamplingParams(**greedy, ignore_eos=True),
        SamplingParams(**greedy, logit_bias={65: 30.0}),
    ]
    prompts = ["hello", "hello there", "abc", "hello", "abc", "abcd"]
    plain = LLM(model, tokenizer=tokenizer).generate(prompts, params)
    looked_up = LLM(model, tokenizer=tokenizer, speculative_tokens=3).generate(prompts, params)
    assert [output.token_ids for output in looked_up] == [output.token_ids for output in plain]
    llm = LLM(model, tokenizer=tokenizer, draft=draft)
    outputs = llm.generate(prompts, params)
    for output, wanted in zip(outputs, plain, strict=True):
        assert (output.text, output.token_ids, output.finish_reason) == (
            wanted.text,
            wanted.token_ids,
            wanted.finish_reason,
        )
    assert outputs[0].samples[0].acceptance_rate is None
    assert outputs[4].samples[0].acceptance_rate is not None
    assert outputs[1].samples[0].guessed_tokens > 0
    assert outputs[1].prompt_logprobs is not None
    assert outputs[1].logprobs is not None
    assert plain[1].logprobs is not None
    for found, expected in zip(outputs[1].logprobs, plain[1].logprobs, strict=True):
        assert list(found) == list(expected)
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(expected[token_id].logprob, abs=1e-5)
            assert entry.rank == expected[token_id].rank
    sampled = SamplingParams(n=8, temperature=1.5, seed=2, structured_outputs={"regex": "[ab]{5}-[0-9]{3}"})
    import re

    for sample in llm.generate("go", sampled)[0].samples:
        assert re.fullmatch("[ab]{5}-[0-9]{3}", sample.text)


def test_a_broken_draft_costs_time_only(model: Llama, make_model: MakeModel, oracle: list[list[int]]) -> None:
    draft = make_model(seed=9)
    with torch.no_grad():
        draft.model.norm.weight.fill_(float("nan"))
    llm = LLM(model, draft=draft, num_speculative_tokens=2)
    assert [output.token_ids for output in llm.generate(prompts_of(1), GREEDY)] == oracle
    sampled = llm.generate([[1, 2]], SamplingParams(seed=1, max_tokens=5))[0]
    assert len(sampled.token_ids) == 5


def test_a_beginning_in_the_cache_is_the_drafts_too(model: Llama) -> None:
    llm = LLM(model, draft=model, num_speculative_tokens=2, block_size=4)
    first = llm.generate([list(range(30))], GREEDY)[0]
    again = llm.generate([list(range(30))], GREEDY)[0]
    assert again.cached_tokens > 20
    assert again.token_ids == first.token_ids
    assert llm.acceptance_rate == 1.0  # it would not be, had the draft not known the beginning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"draft": "other vocabulary"}, "the draft model has 300 tokens and the model 272"),
        (
            {"draft": "short", "max_model_len": 64},
            "max_model_len must be from 2 to the draft model's context 32, got 64",
        ),
        ({"draft": "near", "num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number of at least 1"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens needs a draft model"),
        ({"draft": "near", "speculative_tokens": 3}, "speculative_tokens guesses from the text and draft from a model"),
    ],
)
def test_what_cannot_be_is_refused(model: Llama, make_model: MakeModel, arguments: dict[str, Any], words: str) -> None:
    drafts = {
        "other vocabulary": {"vocab_size": 300},
        "short": {"max_position_embeddings": 32},
        "near": {},
    }
    if "draft" in arguments:
        arguments = {**arguments, "draft": make_model(**drafts[arguments["draft"]])}
    with pytest.raises(ValueError, match=words):
        LLM(model, **arguments)


def test_the_shorter_context_counts(model: Llama, make_model: MakeModel) -> None:
    llm = LLM(model, draft=make_model(max_position_embeddings=32))
    assert llm.max_model_len == 32
    assert any("draft model's context is 32" in remark for remark in llm.remarks)


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_and_cancels_leak_nothing(
    model: Llama, make_model: MakeModel, tokenizer: Tokenizer, seed: int
) -> None:
    """Random requests, guided ones among them, come and go in little memory; what was not cancelled is the oracle's."""
    dice = random.Random(seed)
    llm = LLM(
        model, tokenizer=tokenizer, draft=near(model, make_model, 0.03), num_speculative_tokens=3, max_num_seqs=3,
        kv_cache_memory_bytes=2 * 5 * BLOCK, max_num_batched_tokens=16,
    )  # fmt: skip
    engine = llm.engine
    requests: list[Any] = []
    cancelled: list[Any] = []
    steps = 0
    while len(requests) < 12 or any(not request.sequences[0].has_ended() for request in requests):
        if len(requests) < 12 and dice.random() < 0.4:
            prompt = [dice.randrange(256) for _ in range(dice.randrange(1, 40))]
            form = {"regex": "[a-f]{3,9}"} if dice.random() < 0.3 else None
            params = SamplingParams(temperature=0.0, max_tokens=dice.randrange(1, 20), structured_outputs=form)
            requests.append(llm.requests.request(None, prompt, params))
            engine.add(requests[-1].sequences[0])
        alive = [request for request in requests if not request.sequences[0].has_ended()]
        if alive and dice.random() < 0.05:
            cancelled.append(dice.choice(alive))
            engine.abort(cancelled[-1].sequences[0])
        engine.step()
        engine.scheduler.pool.check()
        steps += 1
        assert steps < 2000, "somebody starves"
    plain = LLM(model, tokenizer=tokenizer)
    for request in requests:
        (sequence,) = request.sequences
        expected = plain.generate([request.prompt_ids], request.params)[0]
        if request in cancelled:
            assert sequence.token_ids == expected.token_ids[: len(sequence.token_ids)]
        else:
            assert (sequence.token_ids, sequence.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert engine.scheduler.pool.free == engine.scheduler.pool.num_blocks
