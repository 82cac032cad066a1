"""The engine for a long time: requests come at random, some are cancelled, memory is short, and nothing is ever lost.

Whatever happens around it, each request ends once and soon enough, with the oracle's tokens; every block comes back;
the memory of the process stays what it was.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama, generate_naive
from llama_infer.block_pool import BlockPool
from llama_infer.engine import Engine
from llama_infer.logprobs import LogprobWriter
from llama_infer.paged_cache import PagedKVCache, sdpa_rows
from llama_infer.runner import ModelRunner
from llama_infer.sampler import Sampler
from llama_infer.sampling_params import SamplingParams
from llama_infer.scheduler import Scheduler
from llama_infer.sequence import Sequence

CONTEXT = 48
PATIENCE = 3000
"""Steps after which a request counts as starved. At most 12 wait and 4 run; one alone takes at most 48 steps for its
tokens and 48 for its prompt, and may be pre-empted by each that came before it: 12 · 96 · 2 with room to spare."""

SETTINGS: list[dict[str, Any]] = [
    {"blocks": 13, "size": 4, "budget": 16},  # one context and a block: nearly everything is pre-empted
    {"blocks": 24, "size": 4, "budget": 5, "guess": 3},
    {"blocks": 60, "size": 1, "budget": 9, "paged": True, "overlap": True},
    {"blocks": 17, "size": 3, "budget": 7, "paged": True, "prefix": False},
    {"blocks": 8, "size": 16, "budget": 64},
]


def engine_for(
    model: Llama,
    *,
    blocks: int,
    size: int,
    budget: int,
    guess: int = 0,
    paged: bool = False,
    overlap: bool = False,
    prefix: bool = True,
) -> Engine:
    pool = BlockPool(blocks, size, prefix_caching=prefix, contiguous=not paged)
    cache = PagedKVCache(model.config, blocks, size, torch.float32)
    cache.memory.fill_(float("nan"))  # whatever is read must have been written
    runner = ModelRunner(model, cache, 4, CONTEXT, None if paged else sdpa_rows)
    return Engine(Scheduler(pool, 4, budget, guess), runner, Sampler(False), LogprobWriter(model, None), overlap)


class Oracle:
    """Greedy continuations, and those of seeds, each computed once."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.known: dict[tuple[Any, ...], list[int]] = {}

    def tokens(self, sequence: Sequence) -> list[int]:
        params = sequence.params
        key = (tuple(sequence.prompt_ids), params.temperature, params.seed)
        if key not in self.known:
            if len(self.known) > 500:  # or the test's own memory grows
                self.known.clear()
            self.known[key] = generate_naive(
                lambda tokens: self.model.logits(self.model(tokens)),
                sequence.prompt_ids,
                max_new_tokens=CONTEXT - len(sequence.prompt_ids),
                temperature=params.temperature,
                seed=params.seed,
            )
        wanted = self.known[key][: sequence.limit]
        ends = [at for at, token_id in enumerate(wanted) if token_id in params.stop_token_ids]
        return wanted[: ends[0] + 1] if ends else wanted


class Customers:
    """Requests of a few kinds over a few texts, so that beginnings are shared and the oracle is asked again."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.stems = [[dice.randrange(256) for _ in range(40)] for _ in range(3)]

    def next(self) -> Sequence:
        dice = self.dice
        prompt = dice.choice(self.stems)[: dice.choice((1, 3, 4, 8, 17, 30, 40))]
        if dice.random() < 0.3:
            prompt = [*prompt, dice.randrange(4)]
        limit = min(dice.choice((1, 2, 7, 20, 47)), CONTEXT - len(prompt))
        seed = dice.randrange(3) if dice.random() < 0.3 else None
        stop = tuple(dice.sample(range(256), 20)) if dice.random() < 0.2 else ()
        params = SamplingParams(temperature=0.0 if seed is None else 0.7, seed=seed, stop_token_ids=stop)
        return Sequence(prompt, params, limit, streaming=True)


def soak(engine: Engine, oracle: Oracle, goes_on: Callable[[int], bool], dice: random.Random) -> Counter[str]:
    """Take requests while `goes_on(steps)`, and run to the end; counts of what happened."""
    customers, counts = Customers(dice), Counter[str]()
    alive: list[tuple[Sequence, int]] = []
    steps = 0
    while (is_open := goes_on(steps)) or alive:
        if is_open and len(alive) < 16 and dice.random() < 0.4:
            alive.append((customers.next(), steps))
            engine.add(alive[-1][0])
        if alive and dice.random() < 0.03:
            engine.abort(dice.choice(alive)[0])
        engine.step()
        steps += 1
        for sequence, _ in [each for each in alive if each[0].has_ended()]:
            assert sequence.chunks is not None
            ends = [chunk.finish_reason for chunk in sequence.chunks if chunk.finish_reason is not None]
            expected = oracle.tokens(sequence)
            if sequence.finish_reason == "abort":
                assert sequence.error is None
                assert sequence.token_ids == expected[: len(sequence.token_ids)]
                assert not ends
            else:
                assert sequence.token_ids == expected, (sequence.prompt_ids, sequence.params)
                assert ends == [sequence.finish_reason]
            counts[str(sequence.finish_reason)] += 1
        alive = [each for each in alive if not each[0].has_ended()]
        assert all(steps - since < PATIENCE for _, since in alive), "a request has starved"
        if steps % 20 == 0:
            engine.scheduler.pool.check()
    pool = engine.scheduler.pool
    pool.check()
    assert pool.free == pool.num_blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    counts["steps"], counts["preemptions"] = steps, engine.scheduler.preemptions
    return counts


def resident() -> int:
    """Bytes of this process in main memory, from /proc."""
    gc.collect()
    (pages,) = Path("/proc/self/statm").read_text().split()[1:2]
    return int(pages) * 4096


def run(
    make_model: Callable[..., Llama], rounds: int, seed: int, steps: int = 0, seconds: float = 0.0
) -> tuple[Counter[str], list[int]]:
    """All settings in turn, for so many steps or seconds, round after round; the process's memory after each round."""
    model = make_model()
    oracle, dice = Oracle(model), random.Random(seed)
    total, memory = Counter[str](), []
    for _ in range(rounds):
        for settings in SETTINGS:
            end = time.monotonic() + seconds
            goes_on = (lambda taken: taken < steps) if steps else (lambda _, end=end: time.monotonic() < end)
            total += soak(engine_for(model, **settings), oracle, goes_on, dice)
        oracle.known.clear()
        memory.append(resident() if sys.platform == "linux" else 0)
    return total, memory


def test_a_short_while(make_model: Callable[..., Llama]) -> None:
    counts, memory = run(make_model, rounds=2, seed=1, steps=150)
    assert min(counts[reason] for reason in ("stop", "length", "abort", "preemptions")) > 0
    assert memory[-1] - memory[0] < 20 * 2**20, memory  # the interpreter's own heap moves by some megabytes


@pytest.mark.slow
def test_an_hour(make_model: Callable[..., Llama]) -> None:
    counts, memory = run(make_model, rounds=60, seed=2, seconds=12)
    print(counts, [size >> 20 for size in memory])
    assert counts["length"] > 3000
    # Flat: of the minutes after the first five, the last ten are where the ten before them were.
    assert max(memory[-10:]) - min(memory[5:]) < 20 * 2**20, memory
