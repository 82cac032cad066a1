"""Learning rate as a function of the step: linear warm-up, then half a cosine (Loshchilov & Hutter 2017, eq. 5)."""

from __future__ import annotations

import math

from .config import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of step number `step`, counted from 1 to `schedule.steps`.

    It rises in equal parts to `peak` at step `warmup_steps` and falls to `final_ratio * peak` at the last step.
    Nothing is remembered between calls, so a resumed run has the rates of an uninterrupted one.
    """
    assert 1 <= step <= schedule.steps
    warmup, lowest = schedule.warmup_steps, schedule.final_ratio * peak
    if step < warmup:
        return peak * step / warmup
    if schedule.steps == warmup:
        return peak
    done = (step - warmup) / (schedule.steps - warmup)
    return lowest + 0.5 * (peak - lowest) * (1 + math.cos(math.pi * done))
