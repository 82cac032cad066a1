"""The engine under every mix, against the oracle: random arrivals, lengths, cancels, tiny caches, chunks and blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_core import Llama, generate_naive
from llama_infer.block_pool import BlockPool
from llama_infer.engine import Engine
from llama_infer.logprobs import LogprobWriter
from llama_infer.paged_cache import AttendRows, PagedKVCache, rows_by_backend, sdpa_rows
from llama_infer.runner import ModelRunner
from llama_infer.sampler import Sampler
from llama_infer.sampling_params import SamplingParams
from llama_infer.scheduler import Scheduler
from llama_infer.sequence import Sequence

CONTEXT = 48


def engine_for(
    model: Llama,
    *,
    blocks: int = 24,
    size: int = 4,
    seqs: int = 4,
    budget: int = 16,
    prefix: bool = True,
    contiguous: bool = True,
    attend_rows: AttendRows | None = sdpa_rows,
    overlap: bool = False,
    guess: int = 0,
) -> Engine:
    pool = BlockPool(blocks, size, prefix_caching=prefix, contiguous=contiguous)
    cache = PagedKVCache(model.config, blocks, size, torch.float32)
    cache.memory.fill_(float("nan"))  # whatever is read must have been written
    runner = ModelRunner(model, cache, seqs, CONTEXT, attend_rows)
    return Engine(Scheduler(pool, seqs, budget, guess), runner, Sampler(False), LogprobWriter(model, None), overlap)


def naive(model: Llama, prompt: list[int], count: int, **settings: Any) -> list[int]:
    return generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=count, **settings)


@pytest.fixture(scope="module")
def oracle(model: Llama) -> Callable[[list[int], int], list[int]]:
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int], count: int) -> list[int]:
        key = tuple(prompt)
        if key not in known:
            known[key] = naive(model, prompt, CONTEXT - len(prompt))
        return known[key][:count]

    return tokens


MIXES: list[dict[str, Any]] = [
    {},
    {"budget": 4},
    {"budget": 5, "size": 1, "blocks": 96},
    {"blocks": 13},  # one context and a block: nearly everything is pre-empted
    {"blocks": 13, "prefix": False},
    {"blocks": 13, "contiguous": False},
    {"blocks": 13, "contiguous": False, "attend_rows": None},
    {"size": 16, "blocks": 6, "attend_rows": None, "contiguous": False, "budget": 7},
    {"contiguous": False, "attend_rows": None, "overlap": True},
    {"blocks": 13, "contiguous": False, "attend_rows": None, "overlap": True, "prefix": False},
    {"attend_rows": rows_by_backend("plain"), "budget": 9, "size": 3, "blocks": 17},
    {"seqs": 1, "budget": 3},
    {"guess": 3},
    {"guess": 5, "blocks": 13, "budget": 9},
    {"guess": 2, "contiguous": False, "attend_rows": None, "size": 3, "blocks": 17},
]


def _name(mix: dict[str, Any]) -> str:
    """Without addresses of functions: workers of pytest-xdist compare names."""
    return ", ".join(f"{key}={'own' if callable(value) else value}" for key, value in mix.items())


@pytest.mark.parametrize("mix", MIXES, ids=_name)
@pytest.mark.parametrize("seed", range(2))
def test_any_mix_equals_the_oracle(
    model: Llama, oracle: Callable[[list[int], int], list[int]], mix: dict[str, Any], seed: int
) -> None:
    engine = engine_for(model, **mix)
    dice = random.Random(seed)
    stems = [[dice.randrange(256) for _ in range(20)] for _ in range(2)]
    sequences: list[Sequence] = []
    cancelled: list[Sequence] = []
    steps = 0
    while len(sequences) < 14 or any(s.finish_reason is None for s in sequences):
        if len(sequences) < 14 and dice.random() < 0.5:
            stem = dice.choice(stems)[: dice.randrange(1, 20)]
            prompt = stem + [dice.randrange(256) for _ in range(dice.randrange(1, 6))]
            limit = dice.randrange(1, min(14, CONTEXT - len(prompt)) + 1)
            sequences.append(Sequence(prompt, SamplingParams(temperature=0.0), limit))
            engine.add(sequences[-1])
        if dice.random() < 0.04 and (alive := [s for s in sequences if s.finish_reason is None]):
            cancelled.append(dice.choice(alive))
            engine.abort(cancelled[-1])
            engine.scheduler.pool.check()
        engine.step()
        engine.scheduler.pool.check()
        steps += 1
        assert steps < 3000, "somebody starves"
    engine.step()
    for sequence in sequences:
        assert sequence.token_ids == oracle(sequence.prompt_ids, len(sequence.token_ids))
        if sequence in cancelled:
            assert sequence.finish_reason == "abort"
        else:
            assert sequence.finish_reason == "length"
            assert len(sequence.token_ids) == sequence.limit
    pool, scheduler = engine.scheduler.pool, engine.scheduler
    assert pool.free == pool.num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    if pool.num_blocks * pool.block_size < 2 * CONTEXT and scheduler.max_num_seqs > 1:
        assert scheduler.preemptions > 0  # or the mix does not test what it says


@pytest.mark.parametrize("attend_rows", [sdpa_rows, None])
def test_a_beginning_shared_with_a_running_sequence(model: Llama, attend_rows: AttendRows | None) -> None:
    engine = engine_for(model, attend_rows=attend_rows, contiguous=attend_rows is not None)
    stem = list(range(1, 20))
    first = Sequence([*stem, 30], SamplingParams(temperature=0.0), 20)
    engine.add(first)
    for _ in range(4):
        engine.step()
    second = Sequence([*stem[:18], 40, 41], SamplingParams(temperature=0.0), 12)
    engine.add(second)
    while second.finish_reason is None or first.finish_reason is None:
        engine.step()
    assert second.cached == 18  # four blocks, and two tokens of one that the other still holds
    assert first.token_ids == naive(model, first.prompt_ids, 20)
    assert second.token_ids == naive(model, second.prompt_ids, 12)


def test_generating_sequences_go_on_beside_a_long_prompt(model: Llama) -> None:
    engine = engine_for(model, budget=4)
    first = Sequence([1, 2], SamplingParams(temperature=0.0), 20)
    engine.add(first)
    engine.step()
    long = Sequence(list(range(3, 33)), SamplingParams(temperature=0.0), 2)
    engine.add(long)
    for _ in range(5):
        before = len(first.token_ids)
        engine.step()
        assert len(first.token_ids) == before + 1
        assert not long.token_ids


def test_seeds_hold_under_preemption(model: Llama) -> None:
    engine = engine_for(model, blocks=13)
    params = [SamplingParams(temperature=1.0, top_k=40, seed=seed) for seed in range(6)]
    sequences = [Sequence([seed, 7, 9], each, 24) for seed, each in enumerate(params)]
    for _ in engine.run(sequences):
        pass
    assert engine.scheduler.preemptions
    for seed, sequence in enumerate(sequences):
        assert sequence.token_ids == naive(model, [seed, 7, 9], 24, temperature=1.0, top_k=40, seed=seed)


def test_a_row_of_nan_ends_alone(make_model: Callable[..., Llama]) -> None:
    model = make_model()
    model.model.embed_tokens.weight[99] = float("nan")  # type: ignore[union-attr]
    engine = engine_for(model, budget=64)
    params = SamplingParams(temperature=0.0)
    sequences = [Sequence([1, 2, 3], params, 5), Sequence([1, 99, 3], params, 5), Sequence([4], params, 5)]
    for _ in engine.run(sequences):
        pass
    assert [s.finish_reason for s in sequences] == ["length", "abort", "length"]
    assert "largest logit is nan" in (sequences[1].error or "")
    for sequence in (sequences[0], sequences[2]):
        assert sequence.token_ids == naive(model, sequence.prompt_ids, 5)


def repeating(make_model: Callable[..., Llama]) -> Llama:
    """A model that soon goes round in circles: its layers add little to the embedding of the newest token."""
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.05)
        layer.mlp.down_proj.weight.mul_(0.05)
    return model


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.05, "seed": 5}, {"temperature": 0.2, "top_k": 3, "seed": 1}]
)
def test_guesses_change_nothing_but_the_number_of_steps(
    make_model: Callable[..., Llama], settings: dict[str, Any]
) -> None:
    model = repeating(make_model)
    engine = engine_for(model, guess=4, seqs=3, blocks=36)
    prompts = [[1, 2, 3, 1, 2], [7], [9, 9, 9]]
    sequences = [Sequence(prompt, SamplingParams(**settings), 30) for prompt in prompts]
    steps = sum(1 for _ in engine.run(sequences))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.token_ids == naive(model, prompt, 30, **settings)
    assert 0 < engine.accepted <= engine.guessed
    if settings["temperature"] == 0:
        assert steps < 20
    else:
        assert engine.accepted < engine.guessed  # or nothing tests what is dropped
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.free == engine.scheduler.pool.num_blocks


def test_an_end_token_among_guesses_ends(make_model: Callable[..., Llama]) -> None:
    model = repeating(make_model)
    expected = naive(model, [7], 30)
    end = expected[-1]
    engine = engine_for(model, guess=4, blocks=36)
    sequence = Sequence([7], SamplingParams(temperature=0.0, stop_token_ids=(end,)), 30)
    for _ in engine.run([sequence]):
        pass
    assert sequence.finish_reason == "stop"
    assert sequence.token_ids == expected[: expected.index(end) + 1]
