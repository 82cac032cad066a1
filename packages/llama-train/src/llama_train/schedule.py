"""Learning rate as a function of the step: linear warm-up, then a shape."""

from __future__ import annotations

import math

from .config import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of step number `step`, counted from 1 to `schedule.total`.

    It rises in equal parts to `peak` at step `warmup_steps` and falls to `final_ratio * peak` at the last step, of the
    height between them leaving

    - cosine: (1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017, eq. 5), t from 0 at the end of the warm-up to 1;
    - linear: 1 - t;
    - wsd: all of it until the last `cooldown_length` steps, then 1 - t or 1 - sqrt(t), t from 0 before them to 1
      (Haegele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", section 3).

    Nothing is remembered between calls, so a resumed run has the rates of an uninterrupted one.
    """
    assert 1 <= step <= schedule.total
    warmup, lowest = schedule.warmup_steps, schedule.final_ratio * peak
    if step < warmup:
        return peak * step / warmup
    begin = schedule.total - schedule.cooldown_length if schedule.shape == "wsd" else warmup
    if step <= begin:
        return peak
    done = (step - begin) / (schedule.total - begin)
    if schedule.shape == "cosine":
        return lowest + 0.5 * (peak - lowest) * (1 + math.cos(math.pi * done))
    straight = schedule.shape == "linear" or schedule.cooldown == "linear"
    return lowest + (peak - lowest) * (1 - (done if straight else math.sqrt(done)))
