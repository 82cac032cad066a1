"""GGUF metadata → `LlamaConfig`. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .config import LlamaConfig
from .gguf_rope import rope_from_metadata

ARCHITECTURE = "llama"


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]], divisors: Sequence[float] | None = None
) -> LlamaConfig:
    """The configuration of a GGUF file.

    Args:
        metadata: from `read_gguf_metadata`.
        tensor_shapes: of the file's tensors, under their GGUF names: they tell what the metadata does not
            (tied head, biases, vocabulary size).
        divisors: values of `rope_freqs.weight` if the file has it.

    Raises:
        ValueError: an architecture other than llama, a missing key, or a value of a wrong type or range.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"general.architecture is {architecture!r}; this library reads {ARCHITECTURE!r}")
    keys = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    heads = _whole(keys, "attention.head_count")
    kv_heads = _whole(keys, "attention.head_count_kv", heads)
    hidden = _whole(keys, "embedding_length")
    head_dim = _whole(keys, "attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if _whole(keys, key, head_dim) != head_dim:
            raise ValueError(f"llama.{key} is {keys[key]}; only the width of a head, {head_dim}, is supported")
    if _whole(keys, "expert_count", 0):
        raise ValueError(f"llama.expert_count is {keys['expert_count']}; mixtures of experts are not supported")
    numbers = {key: _number(keys, key) for key in keys if key.startswith("rope.") and key != "rope.scaling.type"}
    if "rope.scaling.type" in keys:
        numbers["rope.scaling.type"] = keys["rope.scaling.type"]
    vocab_size = tensor_shapes.get("token_embd.weight", (0,))[0]
    return LlamaConfig(
        vocab_size=_whole(keys, "vocab_size", vocab_size),
        hidden_size=hidden,
        intermediate_size=_whole(keys, "feed_forward_length"),
        num_hidden_layers=_whole(keys, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_whole(keys, "context_length"),
        rms_norm_eps=_number(keys, "attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        attention_bias="blk.0.attn_q.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
        bos_token_id=_token(metadata, "bos_token_id"),
        eos_token_id=_end_tokens(metadata),
        pad_token_id=_token(metadata, "padding_token_id"),
        rope=rope_from_metadata(numbers, divisors, head_dim),
    )


def _whole(keys: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = keys.get(name, default)
    if value is None:
        raise ValueError(f"metadata key llama.{name} is missing")
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]  # per-layer arrays are fine while the layers agree
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"metadata key llama.{name} is {str(value)[:80]}; it must be one whole number")
    return value


def _number(keys: Mapping[str, Any], name: str) -> Any:
    value = keys.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"metadata key llama.{name} is {str(value)[:80]}; it must be a number")
    # Floats are float32 in the file. The shortest decimal that names the same float32 is what was meant: 1e-05, not
    # 9.999999747378752e-06.
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _token(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"metadata key tokenizer.ggml.{name} is {str(value)[:80]}; it must be a token id")
    return value


def _end_tokens(metadata: Mapping[str, Any]) -> int | tuple[int, ...] | None:
    """End of text, of turn and of message: all of them end a generation."""
    ids = [_token(metadata, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    unique = tuple(dict.fromkeys(id for id in ids if id is not None))
    return None if not unique else unique[0] if len(unique) == 1 else unique
