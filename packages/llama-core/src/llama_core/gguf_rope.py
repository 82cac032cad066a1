"""Rotary positions in GGUF: the metadata keys of linear and YaRN scaling, and Llama 3's scaling as a tensor.

llama.cpp's converter does not store Llama 3's four numbers. It stores what they come to: `rope_freqs.weight`, one
divisor per channel pair. Reading turns the divisors back into the numbers (llama.cpp pull request 8676).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .config import LlamaConfig
from .rope import inverse_frequencies
from .rope_config import RopeConfig

TOLERANCE = 1e-4
"""Relative, between stored and recomputed divisors: they are float32 and some converters computed them in float32."""


def rope_from_metadata(metadata: Mapping[str, Any], divisors: Sequence[float] | None, head_dim: int) -> RopeConfig:
    """The rotary configuration of a GGUF file.

    Args:
        metadata: keys of the file, with the prefix `llama.` removed, numbers checked by the caller.
        divisors: `rope_freqs.weight`, or `None`.
        head_dim: width of a head.

    Raises:
        ValueError: a kind of scaling this library does not have, or divisors that are no Llama 3 scaling.
    """
    theta = float(metadata.get("rope.freq_base", 10000.0))
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    original = metadata.get("rope.scaling.original_context_length")
    if divisors is not None and any(abs(divisor - 1) > TOLERANCE for divisor in divisors):
        if kind != "none":
            raise ValueError(f"rope.scaling.type is {kind!r} and there is rope_freqs.weight; only one may scale")
        return _llama3_from_divisors(theta, divisors, head_dim, original)
    if kind == "none" and "rope.scaling.type" not in metadata and factor not in (None, 0, 1):
        kind = "linear"  # files from before the key `rope.scaling.type`
    if kind == "none":
        return RopeConfig(rope_theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=factor)
    if kind == "yarn":
        scale = metadata.get("rope.scaling.yarn_attn_factor", metadata.get("rope.scaling.attn_factor"))
        return RopeConfig(
            "yarn",
            theta,
            factor=factor,
            original_max_position_embeddings=original,
            # Hugging Face's number replaces YaRN's own, 0.1 ln(factor) + 1; llama.cpp's multiplies it
            attention_factor=None
            if scale in (None, 1) or not factor
            else _rounded(scale * (0.1 * math.log(factor) + 1)),
            beta_fast=metadata.get("rope.scaling.yarn_beta_fast"),
            beta_slow=metadata.get("rope.scaling.yarn_beta_slow"),
        )
    raise ValueError(f"rope.scaling.type is {kind!r}; known are 'none', 'linear' and 'yarn'")


def metadata_from_rope(rope: RopeConfig) -> dict[str, Any]:
    """The keys for a rotary configuration, without the prefix `llama.`; Llama 3's scaling is a tensor besides.

    Raises:
        ValueError: a setting of YaRN that GGUF does not have.
    """
    keys: dict[str, Any] = {"rope.freq_base": float(rope.rope_theta)}
    original = rope.original_max_position_embeddings
    if rope.rope_type == "llama3" and original != 8192:
        keys["rope.scaling.original_context_length"] = original  # for our own reading: see `_candidates`
    if rope.rope_type in ("linear", "yarn"):
        assert rope.factor is not None
        keys |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor)}
    if rope.rope_type == "yarn":
        if rope.mscale is not None or rope.mscale_all_dim is not None or not rope.truncate:
            raise ValueError("rope: GGUF has no mscale, mscale_all_dim and truncate: false for 'yarn'")
        if original is not None:
            keys["rope.scaling.original_context_length"] = original
        if rope.attention_factor is not None:
            keys["rope.scaling.yarn_attn_factor"] = rope.attention_factor / (0.1 * math.log(rope.factor or 1.0) + 1)
        for name in ("beta_fast", "beta_slow"):
            if (value := getattr(rope, name)) is not None:
                keys[f"rope.scaling.yarn_{name}"] = float(value)
    return keys


def llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """Plain frequency / scaled frequency of every channel pair (D/2)."""
    scaled = inverse_frequencies(_shape(rope, head_dim))
    plain = inverse_frequencies(_shape(RopeConfig(rope_theta=rope.rope_theta), head_dim))
    return [p / s for p, s in zip(plain, scaled)]


def _shape(rope: RopeConfig, head_dim: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope=rope)


def _llama3_from_divisors(theta: float, divisors: Sequence[float], head_dim: int, original: int | None) -> RopeConfig:
    if len(divisors) != head_dim // 2 or not all(0.999 < divisor < 1e6 for divisor in divisors):
        raise ValueError(
            f"rope_freqs.weight must hold {head_dim // 2} divisors of at least 1, not {list(divisors)[:8]}"
        )
    factor = _rounded(max(divisors))
    for low, high, length in _candidates(theta, divisors, head_dim, factor, original):
        if not 0 < low < high or length < 1:
            continue
        rope = RopeConfig("llama3", theta, factor, low, high, length)
        if all(abs(a / b - 1) < TOLERANCE for a, b in zip(llama3_divisors(rope, head_dim), divisors)):
            return rope
    raise ValueError(
        f"rope_freqs.weight {[round(d, 4) for d in divisors][:8]} … is no Llama 3 scaling; "
        "other tables are not supported"
    )


def _candidates(
    theta: float, divisors: Sequence[float], head_dim: int, factor: float, original: int | None
) -> Iterable[tuple[float, float, int]]:
    """(low_freq_factor, high_freq_factor, original length) to try: the released models' numbers, then a fit."""
    for length in (original, 8192):
        if length is not None:
            yield 1.0, 4.0, int(length)
    # Between the borders 1/divisor = (1 - keep)/factor + keep, and keep = (length f/2π - low)/(high - low) is linear
    # in the frequency f. Two such points give slope and intercept; low = 1 fixes the scale that nothing depends on.
    points = []
    for i, divisor in enumerate(divisors):
        keep = (1 / divisor - 1 / factor) / (1 - 1 / factor)
        if 1e-3 < keep < 1 - 1e-3:
            points.append((theta ** (-2 * i / head_dim) / (2 * math.pi), keep))
    if len(points) == 1:
        [(turns, keep)] = points
        yield 1.0, 4.0, round((keep * 3 + 1) / turns)
    if len(points) > 1:
        (turns_a, keep_a), (turns_b, keep_b) = points[0], points[-1]
        slope = (keep_a - keep_b) / (turns_a - turns_b)
        intercept = keep_a - slope * turns_a
        if intercept < 0 < slope:
            span = -1 / intercept  # high - low
            yield 1.0, _rounded(1 + span, digits=3), round(slope * span)
            yield 1.0, 1 + span, round(slope * span)


def _rounded(value: float, digits: int = 6) -> float:
    """The number somebody typed, out of one that went through float32."""
    return float(f"{value:.{digits}g}")
