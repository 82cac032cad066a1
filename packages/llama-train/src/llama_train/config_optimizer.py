"""Keys of [optimizer] and [schedule]."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import finite_and as _finite_and
from .config_checks import require


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
    master_weights: bool = True
    """With dtype bfloat16: the optimizer keeps weights and sums gradients in float32. No effect in float32."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        require(_finite_and(rate, rate > 0), "optimizer.learning_rate", rate, "above 0")
        require(
            all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "two numbers from 0 to below 1"
        )
        require(_finite_and(self.eps, self.eps > 0), "optimizer.eps", self.eps, "above 0")
        for name in ("weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            require(_finite_and(value, value >= 0), f"optimizer.{name}", value, "0 or more")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to train and the learning rate of every step: linear warm-up, then half a cosine."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    warmup_steps: int = 100
    """Steps over which the rate rises to optimizer.learning_rate."""
    final_ratio: float = 0.1
    """Rate of the last step, as a part of optimizer.learning_rate."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "schedule.steps", self.steps, "at least 1")
        wanted = f"0 to schedule.steps, {self.steps}"
        require(0 <= self.warmup_steps <= self.steps, "schedule.warmup_steps", self.warmup_steps, wanted)
        require(0 <= self.final_ratio <= 1, "schedule.final_ratio", self.final_ratio, "0 to 1")
