"""Keys of [evaluation] and [logging]: what is measured and shown on the way."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import finite_and as _finite_and
from .config_checks import is_text as _is_text
from .config_checks import require


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out loss and the text sample."""

    every: int = 0
    """Steps between evaluations; 0 means only at the end."""
    max_tokens: int | None = None
    """At most so many held-out tokens are scored; unset means all."""
    sample_every: int = 0
    """Steps between text samples; 0 means only at the end."""
    sample_prompt: str = "def "
    """What a text sample continues."""
    sample_chat: bool = False
    """Whether sample_prompt is the user's turn of a chat, in the tokenizer's chat format."""
    sample_tokens: int = 64
    """Length of a text sample; 0 means none."""
    sample_temperature: float = 0.7
    """0 picks the likeliest token each time."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluation.every", self.every, "0 or more")
        require(self.max_tokens is None or self.max_tokens >= 1, "evaluation.max_tokens", self.max_tokens, "at least 1")
        require(self.sample_every >= 0, "evaluation.sample_every", self.sample_every, "0 or more")
        require(self.sample_tokens >= 0, "evaluation.sample_tokens", self.sample_tokens, "0 or more")
        if self.sample_every and not self.sample_tokens:
            raise ValueError(
                f"evaluation.sample_every is {self.sample_every} and evaluation.sample_tokens 0; one must change"
            )
        require(_is_text(self.sample_prompt), "evaluation.sample_prompt", self.sample_prompt, "UTF-8 text without NUL")
        temperature = self.sample_temperature
        require(_finite_and(temperature, temperature >= 0), "evaluation.sample_temperature", temperature, "0 or more")


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown while training."""

    every: int = 10
    """Steps between lines. metrics.jsonl in the run folder gets the same figures."""
    progress: bool = True
    """Whether a terminal shows a progress bar; a file or pipe never does."""
    tensorboard: bool = False
    """Whether the figures also go to RUN/tensorboard; needs the extra `tensorboard`."""
    wandb: str | None = None
    """Project of Weights & Biases that also gets the figures; needs the extra `wandb`, and `wandb login` or
    WANDB_MODE=offline."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "logging.every", self.every, "at least 1")
        require(self.wandb is None or self.wandb != "", "logging.wandb", self.wandb, "the name of a project")
