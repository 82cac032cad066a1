"""A loss or gradient that is infinite or NaN ends the run, and says where it came from."""

from __future__ import annotations

import math
from pathlib import Path

from .config import TrainConfig
from .step import StepResult
from .world import World

_SHOWN = 3


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN; nothing was saved after that."""


def check_finite(step: int, result: StepResult, world: World, config: TrainConfig, saved: Path | None) -> None:
    """Raise NonFiniteLoss for a step whose loss or gradient norm is not finite; all processes find the same.

    Args:
        step: its number.
        result: of the step; reading it waits for a GPU.
        world, config: of the run.
        saved: the last checkpoint.
    """
    for name, value in (("loss", float(result.loss)), ("gradient norm", float(result.grad_norm))):
        if not math.isfinite(value):
            last = "none" if saved is None else str(saved)
            raise NonFiniteLoss(
                f"the {name} of step {step} is {value}{_culprits(result, world)}; training stopped, and nothing was "
                f"saved since; last checkpoint: {last}. Lower optimizer.learning_rate, "
                f"{config.optimizer.learning_rate}, or lengthen schedule.warmup_steps, {config.schedule.warmup_steps}"
            )


def _culprits(result: StepResult, world: World) -> str:
    """Which gradients are not finite, and on which ranks; a collective call."""
    own = [name for name, norm in result.norms.items() if not math.isfinite(float(norm))]
    found = [
        name if world.size == 1 else f"{name} on rank {rank}"
        for rank, names in enumerate(world.gather(own))
        for name in names
    ]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f" (not finite: the gradient of {', '.join(found[:_SHOWN])}{more})" if found else ""
