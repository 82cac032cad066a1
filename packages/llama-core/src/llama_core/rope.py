"""Rotary frequencies and the angles of positions, always float32.

A model in bfloat16 must not have its positions in bfloat16: 257 would become 256. So the frequencies are
derived from the configuration in float64, kept in float32, and recomputed whenever the module moves or is cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import LlamaConfig
from .rope_config import RopeConfig


def inverse_frequencies(config: LlamaConfig) -> list[float]:
    """Angle per position, in radians, of each of the D/2 channel pairs of a head (float64)."""
    rope, width = config.rope, config.head_width
    plain = [rope.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return [f / rope.factor for f in plain]
    if rope.rope_type == "llama3":
        return [_llama3(f, rope) for f in plain]
    if rope.rope_type == "yarn":
        return _yarn(plain, config)
    assert rope.rope_type == "default"
    return plain


def _llama3(frequency: float, rope: RopeConfig) -> float:
    """Llama 3.1's rule: keep short wavelengths, divide long ones by `factor`, blend between."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    assert rope.factor is not None
    assert low is not None
    assert high is not None
    assert original is not None
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope.factor
    keep = (original / wavelength - low) / (high - low)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _yarn(plain: list[float], config: LlamaConfig) -> list[float]:
    """YaRN, "NTK by parts" (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2)."""
    rope, width = config.rope, config.head_width
    assert rope.factor is not None
    original = rope.original_max_position_embeddings or config.max_position_embeddings

    def pair_that_turns(rotations: float) -> float:  # index of the pair that turns so often within the context
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low = pair_that_turns(32.0 if rope.beta_fast is None else rope.beta_fast)
    high = pair_that_turns(1.0 if rope.beta_slow is None else rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    result = []
    for i, frequency in enumerate(plain):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        result.append(interpolated * frequency / rope.factor + (1 - interpolated) * frequency)
    return result


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied with: 1, except in YaRN (section 3.4: 0.1 ln(factor) + 1)."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.factor is not None

    def magnitude(scale: float) -> float:
        assert rope.factor is not None
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RotaryEmbedding(nn.Module):
    """Positions to the cosine and sine of every channel pair's angle."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._frequencies = inverse_frequencies(config)
        self._factor = attention_factor(config.rope)
        self.register_buffer("inv_freq", torch.tensor(self._frequencies, dtype=torch.float32), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B or 1, S), integers → cos, sin (B or 1, S, D/2), float32."""
        angles = positions.unsqueeze(-1).to(torch.float32) * self.inv_freq
        return angles.cos() * self._factor, angles.sin() * self._factor

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        # Moves go through; casts and uninitialised memory (`to_empty`) do not: values come from the configuration.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = torch.tensor(self._frequencies, dtype=torch.float32, device=self.inv_freq.device)
        return self
