"""Keys of [optimizer] and [schedule]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .config_checks import finite_and as _finite_and
from .config_checks import require

_STEPS = 1000
"""Of a run that says nothing."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) and gradient clipping."""

    learning_rate: float = 3e-4
    """The highest rate, reached after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean and mean square of the gradient."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it; 0 means no clipping."""
    z_loss: float = 0.0
    """Weight of log²Z, Z the softmax's denominator, in the loss that is trained on and shown; 1e-4 is usual. The
    held-out loss is without it."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is infinite or NaN: stop ends the run; skip leaves weights and moments as they are in
    that step; rollback goes back to the newest checkpoint and passes over the rows of the steps since."""
    max_nonfinite: int = 5
    """With skip: so many skipped steps in a row do not end the run, one more does; with rollback, so many rollbacks
    without a step beyond the last one's."""
    master_weights: bool = True
    """With dtype bfloat16: the optimizer keeps weights and sums gradients in float32. No effect in float32."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        require(_finite_and(rate, rate > 0), "optimizer.learning_rate", rate, "above 0")
        require(
            all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "two numbers from 0 to below 1"
        )
        require(_finite_and(self.eps, self.eps > 0), "optimizer.eps", self.eps, "above 0")
        require(self.max_nonfinite >= 0, "optimizer.max_nonfinite", self.max_nonfinite, "0 or more")
        for name in ("weight_decay", "max_grad_norm", "z_loss"):
            value = getattr(self, name)
            require(_finite_and(value, value >= 0), f"optimizer.{name}", value, "0 or more")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to train and the learning rate of every step: linear warm-up, then a shape that ends at final_ratio."""

    steps: int | None = None
    """Optimizer steps of the whole run; unset means as many as schedule.tokens needs, or 1000 without that."""
    tokens: int | None = None
    """Tokens of the whole run, in place of steps: rounded up to whole steps."""
    shape: Literal["cosine", "linear", "wsd"] = "cosine"
    """After warm-up: half a cosine, a straight line, or wsd: the highest rate until a cool-down at the end."""
    warmup_steps: int = 100
    """Steps over which the rate rises to optimizer.learning_rate."""
    final_ratio: float = 0.1
    """Rate of the last step, as a part of optimizer.learning_rate."""
    cooldown_steps: int | None = None
    """With wsd: steps of the cool-down; unset means cooldown_ratio of all."""
    cooldown_ratio: float = 0.2
    """With wsd: part of all steps that is cool-down, rounded to whole steps."""
    cooldown: Literal["linear", "1-sqrt"] = "1-sqrt"
    """With wsd: how the rate falls, in a straight line or as 1 - sqrt of the part that is done."""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, "schedule.steps", self.steps, "at least 1")
        require(self.tokens is None or self.tokens >= 1, "schedule.tokens", self.tokens, "at least 1")
        if self.steps is not None and self.tokens is not None:
            raise ValueError(
                f"schedule.steps is {self.steps} and schedule.tokens {self.tokens}; one of them says when to stop"
            )
        require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "0 to schedule.steps")
        require(0 <= self.final_ratio <= 1, "schedule.final_ratio", self.final_ratio, "0 to 1")
        cooldown = self.cooldown_steps
        require(cooldown is None or cooldown >= 1, "schedule.cooldown_steps", cooldown, "at least 1")
        require(0 < self.cooldown_ratio <= 1, "schedule.cooldown_ratio", self.cooldown_ratio, "above 0, up to 1")
        if cooldown is not None and self.shape != "wsd":
            raise ValueError(f'schedule.cooldown_steps is for schedule.shape "wsd"; it is {self.shape!r}')
        if self.tokens is None:
            wanted = f"0 to schedule.steps, {self.total}"
            require(self.warmup_steps <= self.total, "schedule.warmup_steps", self.warmup_steps, wanted)
            if self.warmup_steps + self.cooldown_length > self.total:
                raise ValueError(
                    f"schedule.warmup_steps is {self.warmup_steps} and the cool-down has {self.cooldown_length} steps; "
                    f"together they must be at most schedule.steps, {self.total}"
                )

    def resolved(self, tokens_per_step: int) -> ScheduleConfig:
        """The same with `steps` a number: the fewest whole steps that see at least `tokens` tokens.

        Args:
            tokens_per_step: inputs of one optimizer step, over all processes, whether or not they have a target.

        Raises:
            ValueError: warm-up and cool-down do not fit into these steps.
        """
        if self.tokens is None:
            return replace(self, steps=self.total)
        return replace(self, steps=-(-self.tokens // tokens_per_step), tokens=None)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run, where tokens do not say it."""
        assert self.tokens is None, "not resolved"
        return _STEPS if self.steps is None else self.steps

    @property
    def cooldown_length(self) -> int:
        """Steps of the cool-down; 0 where the shape has none. Where tokens do not say the length of the run."""
        if self.shape != "wsd":
            return 0
        return self.cooldown_steps or max(1, round(self.cooldown_ratio * self.total))
