"""A loss or gradient that is infinite or NaN: where it came from, and whether the run ends, skips it or goes back.

The optimizer leaves weights and moments as they are in such a step, on the GPU and without asking for a number
(`Optimizer.step`). Here the numbers are read later, with those that are shown or kept anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from .config import TrainConfig
from .step import StepResult
from .world import World

_SHOWN = 3


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN; nothing was saved after that."""


class Watch:
    """Looks at the results of steps, some at a time, and counts those that are not finite.

    Args:
        config, world: of the run.
        note: prints a line.
    """

    def __init__(self, config: TrainConfig, world: World, note: Callable[[str], None]) -> None:
        self._config, self._world, self._note = config, world, note
        self._unseen: list[tuple[int, StepResult]] = []
        self.steps: list[int] = []
        """Numbers of all steps of this start that were not finite."""
        self._in_a_row = 0

    def add(self, step: int, result: StepResult) -> None:
        """Remember a result; nothing is read yet."""
        self._unseen.append((step, result))

    def look(self, saved: Path | None) -> int | None:
        """Read all results since the last look, which waits for a GPU; all processes find the same.

        Args:
            saved: the last checkpoint.

        Returns:
            With `on_nonfinite = "rollback"`, a step to go back from: the first that is not finite. Otherwise None.

        Raises:
            NonFiniteLoss: such a step, where the run is to stop, or `max_nonfinite` of them in a row.
        """
        unseen, self._unseen = self._unseen, []
        for step, result in unseen:
            fault = _fault(step, result, self._world)
            if fault is None:
                if step > max(self.steps, default=0):  # a rollback makes earlier ones anew: they prove nothing
                    self._in_a_row = 0
                continue
            self.steps.append(step)
            self._in_a_row += 1
            self._decide(fault, saved)
            if self._config.optimizer.on_nonfinite == "rollback":
                return step  # what came after it is not part of the run
        return None

    def _decide(self, fault: str, saved: Path | None) -> None:
        """Go on, or raise."""
        config = self._config.optimizer
        last = "none" if saved is None else str(saved)
        advice = (
            f"last checkpoint: {last}. Lower optimizer.learning_rate, {config.learning_rate}, or lengthen "
            f"schedule.warmup_steps, {self._config.schedule.warmup_steps}"
        )
        if config.on_nonfinite == "stop":
            raise NonFiniteLoss(f"{fault}; training stopped, and nothing was saved since; {advice}")
        if self._in_a_row > config.max_nonfinite:
            raise NonFiniteLoss(
                f"{fault}; that is number {self._in_a_row} in a row, and optimizer.max_nonfinite is "
                f"{config.max_nonfinite}: training stopped, and nothing was saved since; {advice}"
            )
        if config.on_nonfinite == "skip":
            self._note(f"skipped    {fault}; weights and moments stay as they were")

    def summary(self) -> str | None:
        """A line for the end of the run; None where all was finite."""
        if not self.steps:
            return None
        shown = ", ".join(map(str, self.steps[:10])) + (", …" if len(self.steps) > 10 else "")
        what = "skipped" if self._config.optimizer.on_nonfinite == "skip" else "rolled back"
        return f"nonfinite  {len(self.steps)} steps were not finite and were {what}: {shown}"


def _fault(step: int, result: StepResult, world: World) -> str | None:
    """What is not finite, and where it came from; a collective call where something is not."""
    for name, value in (("loss", float(result.loss)), ("gradient norm", float(result.grad_norm))):
        if not math.isfinite(value):
            return f"the {name} of step {step} is {value}{_culprits(result, world)}"
    return None


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
