from __future__ import annotations

import math

import pytest

from llama_train.config import ScheduleConfig
from llama_train.schedule import learning_rate


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
