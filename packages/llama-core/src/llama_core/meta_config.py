"""Meta's params.json ↔ `LlamaConfig`.

Facts: llama-models `models/llama3/args.py` and the rules of Hugging Face's former conversion script. What the file
does not say is either certain from the rest of it or asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import LlamaConfig
from .rope_config import RopeConfig

LLAMA3_VOCABULARY = 128256
"""Vocabulary of every Llama 3: its embedding is split over the vocabulary, and it has its own special tokens."""


def config_from_params(
    params: Mapping[str, Any], vocab_size: int, tied: bool, rope_factor: float | None = None
) -> LlamaConfig:
    """The configuration that params.json stands for.

    Args:
        params: content of params.json.
        vocab_size: rows of the output head in the weights; params.json often says -1 ("ask the tokenizer").
        tied: the weights' head is the embedding.
        rope_factor: context extension factor where params.json says `use_scaled_rope` and no factor: 8 for
            Llama 3.1 and 3.3, 32 for Llama 3.2 1B and 3B.

    Raises:
        ValueError: a missing or impossible value, or a factor that is needed and not given (or the reverse).
    """
    dim, heads = _whole(params, "dim"), _whole(params, "n_heads")
    said = params.get("vocab_size", -1)
    if said not in (-1, vocab_size):
        raise ValueError(f"vocab_size is {said}, the output head has {vocab_size} rows")
    llama3 = vocab_size == LLAMA3_VOCABULARY
    theta = _number(params, "rope_theta", 500000.0 if llama3 else 10000.0)
    eps = _number(params, "norm_eps", 1e-5)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=feed_forward_width(params),
        num_hidden_layers=_whole(params, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads if params.get("n_kv_heads") is None else _whole(params, "n_kv_heads"),
        max_position_embeddings=_context(params, theta, eps, llama3),
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        bos_token_id=128000 if llama3 else 1,
        # end of text, of message, of turn; only the instruction-tuned models ever emit the latter two
        eos_token_id=(128001, 128008, 128009) if llama3 else 2,
        rope=_rope(params, theta, rope_factor),
    )


def feed_forward_width(params: Mapping[str, Any]) -> int:
    """Meta's rule: two thirds of 4·dim, times a multiplier, rounded up to a multiple."""
    multiple = _whole(params, "multiple_of", 256)
    if multiple < 1:
        raise ValueError(f"multiple_of is {multiple}; it must be at least 1")
    width = int(2 * 4 * _whole(params, "dim") / 3)
    if params.get("ffn_dim_multiplier") is not None:
        scale = _number(params, "ffn_dim_multiplier", 1.0)
        if not 0 < scale < 1e6:
            raise ValueError(f"ffn_dim_multiplier is {scale}; it must be positive")
        width = int(scale * width)
    return -(-width // multiple) * multiple


def _context(params: Mapping[str, Any], theta: float, eps: float, llama3: bool) -> int:
    """params.json does not tell the context length; these are what the published models were trained on."""
    if "max_seq_len" in params:
        return _whole(params, "max_seq_len")
    if params.get("use_scaled_rope"):
        return 131072
    if llama3:
        return 8192
    if theta > 10000:
        return 16384  # Code Llama
    return 4096 if eps > 2e-6 else 2048  # Llama 2 has norm_eps 1e-5, the first Llama 1e-6


def _rope(params: Mapping[str, Any], theta: float, factor: float | None) -> RopeConfig:
    if not params.get("use_scaled_rope"):
        if factor is not None:
            raise ValueError(f"rope_factor is {factor}, but params.json does not say use_scaled_rope")
        return RopeConfig(rope_theta=theta)
    stored = params.get("rope_scaling_factor")
    if stored is not None and factor is not None and factor != stored:
        raise ValueError(f"rope_factor is {factor}, but params.json says rope_scaling_factor {stored}")
    if stored is None and factor is None:
        raise ValueError(
            "params.json says use_scaled_rope and not by which factor; give rope_factor: "
            "8 for Llama 3.1 and 3.3, 32 for Llama 3.2 1B and 3B"
        )
    factor = _number(params, "rope_scaling_factor", 0.0) if factor is None else float(factor)
    high = _number(params, "rope_high_freq_factor", 4.0)
    return RopeConfig("llama3", theta, factor, 1.0, high, 8192)


def params_from_config(config: LlamaConfig) -> dict[str, Any]:
    """params.json for a configuration.

    Raises:
        ValueError: Meta's format cannot say it; the message names the setting.
    """
    if config.attention_bias or config.mlp_bias:
        raise ValueError("attention_bias and mlp_bias: Meta's format has no biases")
    if config.head_width * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"head_dim is {config.head_width}; Meta's format always means hidden_size / num_attention_heads "
            f"= {config.hidden_size / config.num_attention_heads:g}"
        )
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        **_width_rule(config.hidden_size, config.intermediate_size),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.rope_theta,
        "max_seq_len": config.max_position_embeddings,
    }
    rope = config.rope
    if rope.rope_type == "llama3":
        if (rope.low_freq_factor, rope.original_max_position_embeddings) != (1.0, 8192):
            raise ValueError(
                f"rope: Meta's format means low_freq_factor 1 and original_max_position_embeddings 8192, not "
                f"{rope.low_freq_factor} and {rope.original_max_position_embeddings}"
            )
        params |= {"use_scaled_rope": True, "rope_scaling_factor": rope.factor}
        if rope.high_freq_factor != 4.0:
            params["rope_high_freq_factor"] = rope.high_freq_factor
    elif rope.rope_type != "default":
        raise ValueError(f"rope_type is {rope.rope_type!r}; Meta's format has 'default' and 'llama3'")
    return params


def _width_rule(dim: int, width: int) -> dict[str, Any]:
    """`multiple_of` and `ffn_dim_multiplier` that give `width`: those of released models first, then a construction."""
    for multiple in (256, 1024, 4096, 512, 128, 64, 32, 16, 8):
        for scale in (None, 1.3, 1.5, 1.2, 1.4, 1.0):
            rule = {"multiple_of": multiple} | ({} if scale is None else {"ffn_dim_multiplier": scale})
            if feed_forward_width({"dim": dim, **rule}) == width:
                return rule
    base = int(2 * 4 * dim / 3)
    if base <= width:
        return {"multiple_of": width}  # anything up to it is rounded up to it
    return {"multiple_of": 1, "ffn_dim_multiplier": (width + 0.5) / base}


def _whole(params: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = params.get(name, default)
    if value is None:
        raise ValueError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value > 1 << 40:
        raise ValueError(f"{name} is {str(value)[:80]}; it must be a whole number")
    return value


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {str(value)[:80]}; it must be a number")
    return float(value)
