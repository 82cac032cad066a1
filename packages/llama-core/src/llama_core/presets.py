"""Shapes of the published Llamas, by name; token ids are those of the base models, not of the chat variants."""

from __future__ import annotations

import difflib

from .config import LlamaConfig
from .rope_config import RopeConfig


def _llama3(factor: float) -> RopeConfig:
    return RopeConfig(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **rest: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{"rms_norm_eps": 1e-5, **rest},  # type: ignore[arg-type]
    )


_L2 = {"max_position_embeddings": 4096}
_L3 = {"max_position_embeddings": 8192, "rope": RopeConfig(rope_theta=500000.0), "bos_token_id": 128000}
_L3 |= {"eos_token_id": 128001}
_L31 = {**_L3, "max_position_embeddings": 131072, "rope": _llama3(8.0)}
_L32 = {**_L31, "rope": _llama3(32.0), "tie_word_embeddings": True}  # 32, not 8: Meta's params.json does not say it
_SMOL = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
_SMOL1 = {**_SMOL, "max_position_embeddings": 2048, "rope": RopeConfig(rope_theta=10000.0)}
_SMOL2 = {**_SMOL, "max_position_embeddings": 8192, "rope": RopeConfig(rope_theta=100000.0)}
_SMOL2_SMALL = {**_SMOL2, "initializer_range": 1 / 24}  # 1 / sqrt(576)
_SMOL2_BIG = {**_SMOL2, "rope": RopeConfig(rope_theta=130000.0)}

PRESETS: dict[str, LlamaConfig] = {
    "tiny": _shape(32, 64, 2, 4, 2, 128, max_position_embeddings=64),
    "tiny-tied": _shape(32, 64, 2, 4, 2, 128, max_position_embeddings=64, tie_word_embeddings=True),
    "llama-2-7b": _shape(4096, 11008, 32, 32, 32, 32000, **_L2),
    "llama-2-13b": _shape(5120, 13824, 40, 40, 40, 32000, **_L2),
    "llama-2-70b": _shape(8192, 28672, 80, 64, 8, 32000, **_L2),
    "llama-3-8b": _shape(4096, 14336, 32, 32, 8, 128256, **_L3),
    "llama-3-70b": _shape(8192, 28672, 80, 64, 8, 128256, **_L3),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256, **_L31),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256, **_L31),
    "llama-3.1-405b": _shape(16384, 53248, 126, 128, 8, 128256, **_L31),
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128256, head_dim=64, **_L32),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128256, head_dim=128, **_L32),
    "tinyllama-1.1b": _shape(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048),
    "smollm-135m": _shape(576, 1536, 30, 9, 3, 49152, **_SMOL1),
    "smollm-360m": _shape(960, 2560, 32, 15, 5, 49152, **_SMOL1),
    "smollm-1.7b": _shape(2048, 8192, 24, 32, 32, 49152, **_SMOL1),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49152, **_SMOL2_SMALL),
    "smollm2-360m": _shape(960, 2560, 32, 15, 5, 49152, **_SMOL2),
    "smollm2-1.7b": _shape(2048, 8192, 24, 32, 32, 49152, **_SMOL2_BIG),
}


def preset(name: str) -> LlamaConfig:
    """The configuration called `name`, e.g. "llama-3-8b".

    Raises:
        ValueError: no such preset; names the nearest and lists all.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)
    raise ValueError(f"no preset {name!r}; did you mean {near[0]!r}? Known: {', '.join(PRESETS)}")
