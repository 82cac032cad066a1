from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from llama_parallel import Process
from llama_train.config import DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from llama_train.schedule import learning_rate
from llama_train.startup import resolve_run


def test_case_b27_values() -> None:
    """nanotron#243: the table of the case, max 1e-3, min 1e-4, warm-up 4, 20 steps."""
    schedule = ScheduleConfig(steps=20, warmup_steps=4, final_ratio=0.1)
    rates = [learning_rate(step, 1e-3, schedule) for step in range(1, 21)]
    expected = {9: 8.000066e-4, 10: 7.222075e-4, 11: 6.377906e-4, 12: 5.5e-4, 20: 1e-4, 1: 2.5e-4, 4: 1e-3}
    for step, rate in expected.items():
        assert rates[step - 1] == pytest.approx(rate, rel=1e-6)
    for step in range(4, 21):
        closed = 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * (step - 4) / 16))
        assert rates[step - 1] == pytest.approx(closed, rel=1e-12)


def test_edges() -> None:
    assert learning_rate(1, 1.0, ScheduleConfig(steps=1, warmup_steps=0, final_ratio=0.1)) == pytest.approx(0.1)
    assert learning_rate(1, 1.0, ScheduleConfig(steps=1, warmup_steps=1)) == 1.0
    assert learning_rate(5, 1.0, ScheduleConfig(steps=5, warmup_steps=5)) == 1.0
    flat = ScheduleConfig(steps=10, warmup_steps=0, final_ratio=1.0)
    assert {learning_rate(step, 0.5, flat) for step in range(1, 11)} == {0.5}


def _rates(peak: float, schedule: ScheduleConfig) -> list[float]:
    return [learning_rate(step, peak, schedule) for step in range(1, schedule.total + 1)]


def test_linear_table() -> None:
    """Max 1, min 0.1, warm-up 2, 8 steps: after the warm-up each step takes 0.9 / 6."""
    schedule = ScheduleConfig(steps=8, warmup_steps=2, shape="linear")
    assert _rates(1.0, schedule) == pytest.approx([0.5, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1], rel=1e-12)


def test_wsd_tables() -> None:
    """Warm-up 2, then 1 until 4 steps before the end; 1 - sqrt(1/4, 2/4, 3/4, 1) of the height, or a straight line."""
    schedule = ScheduleConfig(
        steps=10, warmup_steps=2, shape="wsd", cooldown_steps=4, cooldown="1-sqrt", final_ratio=0.0
    )
    falling = [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]
    assert _rates(2.0, schedule) == pytest.approx([1.0, *[2.0] * 5, *(2 * part for part in falling)], abs=1e-12)
    straight = ScheduleConfig(
        steps=10, warmup_steps=2, shape="wsd", cooldown_ratio=0.4, cooldown="linear", final_ratio=0.2
    )
    assert straight.cooldown_length == 4
    assert _rates(1.0, straight) == pytest.approx([0.5, *[1.0] * 5, 0.8, 0.6, 0.4, 0.2], rel=1e-12)
    # the shortest: one step of cool-down, and a run that is nothing else
    assert _rates(1.0, ScheduleConfig(steps=3, warmup_steps=0, shape="wsd", cooldown_ratio=0.01)) == [1.0, 1.0, 0.1]
    whole = ScheduleConfig(steps=2, warmup_steps=0, shape="wsd", cooldown_ratio=1.0, cooldown="linear", final_ratio=0.0)
    assert _rates(1.0, whole) == [0.5, 0.0]


def test_a_wsd_branch_shares_the_rates_before_its_cool_down() -> None:
    """What makes a branch possible: until the cool-down begins, the length of the run plays no part."""
    long = ScheduleConfig(steps=100, warmup_steps=5, shape="wsd", cooldown_steps=10)
    short = ScheduleConfig(steps=40, warmup_steps=5, shape="wsd", cooldown_steps=10)
    assert _rates(1e-3, long)[:30] == _rates(1e-3, short)[:30]
    assert _rates(1e-3, long)[90:] == _rates(1e-3, short)[30:]


def test_tokens_become_whole_steps_rounded_up() -> None:
    for tokens, steps in ((1, 1), (2048, 1), (2049, 2), (20 * 2048, 20)):
        schedule = ScheduleConfig(tokens=tokens, warmup_steps=0)
        assert schedule.resolved(2048) == ScheduleConfig(steps=steps, warmup_steps=0)
    assert ScheduleConfig().resolved(2048).steps == 1000
    # over all processes: 4 rows of 16 tokens, 3 micro-batches, 2 ranks
    data = DataConfig(sequence_length=16, micro_batch_size=4, gradient_accumulation_steps=3)
    config = TrainConfig(device="cpu", data=data, schedule=ScheduleConfig(tokens=1000, warmup_steps=0))
    config = replace(config, model=ModelConfig(preset="smollm2-135m"))
    assert resolve_run(config, Process(0, 2, 0))[0].schedule == ScheduleConfig(steps=3, warmup_steps=0)
    with pytest.raises(ValueError, match=r"schedule.warmup_steps is 100; it must be 0 to schedule.steps, 5"):
        ScheduleConfig(tokens=10_000).resolved(2048)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps": 10, "tokens": 100}, "schedule.steps is 10 and schedule.tokens 100; one of them"),
        ({"steps": 0}, "schedule.steps is 0"),
        ({"tokens": 0}, "schedule.tokens is 0"),
        ({"cooldown_steps": 5}, "schedule.cooldown_steps is for schedule.shape \"wsd\"; it is 'cosine'"),
        ({"shape": "wsd", "cooldown_ratio": 0.0}, "schedule.cooldown_ratio is 0.0; it must be above 0, up to 1"),
        (
            {"steps": 10, "warmup_steps": 6, "shape": "wsd", "cooldown_steps": 5},
            "warmup_steps is 6 and the cool-down has 5 steps; together they must be at most schedule.steps, 10",
        ),
    ],
)
def test_schedules_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**keys)
