"""Keys of [model]: where the weights come from and the shape."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import finite_and as _finite_and
from .config_checks import require


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model: a preset, explicit numbers, or a preset with some numbers changed."""

    preset: str | None = None
    """Name of a preset of llama_core, such as smollm2-135m; unset means the numbers below are all of it."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the feed-forward part."""
    num_hidden_layers: int | None = None
    """Number of decoder layers."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; unset means as many as query heads."""
    head_dim: int | None = None
    """Width of a head; unset means hidden_size / num_attention_heads."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    rms_norm_eps: float | None = None
    """Added to the mean square in RMSNorm."""
    initializer_range: float | None = None
    """Standard deviation of fresh weights."""
    max_position_embeddings: int | None = None
    """Longest sequence the model says it can read; unset means data.sequence_length, or the preset's."""
    tie_word_embeddings: bool | None = None
    """Whether the output head is the embedding table."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name}", value, "at least 1")
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            number = getattr(self, name)
            require(number is None or _finite_and(number, number > 0), f"model.{name}", number, "above 0")
