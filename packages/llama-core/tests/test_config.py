"""LlamaConfig: every key of the Hugging Face config, in v4 and v5 spelling, and an error for what cannot be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llama_core import LlamaConfig, RopeConfig

V4: dict[str, Any] = {  # a config.json as transformers 4.4x wrote it
    "_name_or_path": "somewhere/llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128256,
}


def test_defaults_are_hugging_faces() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.LlamaConfig(), LlamaConfig()
    for field in dataclasses.fields(LlamaConfig):
        if field.name not in ("rope", "extra"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert theirs.rope_parameters == ours.rope.to_hf()


def test_v4_file() -> None:
    config = LlamaConfig.from_hf(V4)
    assert (config.hidden_size, config.head_dim, config.kv_heads, config.head_width) == (2048, 64, 8, 64)
    assert config.tie_word_embeddings
    assert config.eos_token_id == (128001, 128008, 128009) == config.eos_token_ids
    assert config.rope == RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
    assert config.extra == {
        key: V4[key] for key in ("_name_or_path", "architectures", "model_type", "torch_dtype", "transformers_version")
    }
    hash(config)


def test_round_trip_keeps_every_key() -> None:
    config = LlamaConfig.from_hf({**V4, "my_key": {"nested": [1, 2]}})
    written = json.loads(json.dumps(config.to_hf()))
    assert {key: written[key] for key in V4} == V4
    assert written["my_key"] == {"nested": [1, 2]}
    assert written["rope_parameters"] == {**V4["rope_scaling"], "rope_theta": 500000.0}
    assert LlamaConfig.from_hf(written) == config


def test_round_trip_of_the_defaults() -> None:
    written = LlamaConfig().to_hf()
    assert written["rope_scaling"] is None
    assert written["rope_theta"] == 10000.0
    assert LlamaConfig.from_hf(written).replace(extra={}) == LlamaConfig()


def test_null_means_the_default() -> None:
    config = LlamaConfig.from_hf(
        {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "rope_theta": None, "use_cache": None}
    )
    assert config == LlamaConfig()
    nothing = LlamaConfig.from_hf({"bos_token_id": None, "eos_token_id": None, "pretraining_tp": None})
    assert (nothing.bos_token_id, nothing.eos_token_id, nothing.pretraining_tp) == (None, None, None)
    assert nothing.eos_token_ids == ()
    assert LlamaConfig(eos_token_id=7).eos_token_ids == (7,)


def test_derived_widths() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    assert config.replace(num_attention_heads=12) == LlamaConfig(hidden_size=96, num_attention_heads=12)
    grouped = LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=32)
    changed = grouped.replace(hidden_size=48)
    assert (changed.head_dim, changed.num_key_value_heads) == (32, 2)  # explicit ones stay
    with pytest.raises(ValueError, match="hidden_size is -1"):
        grouped.replace(hidden_size=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; .* at least 1"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size 30 .* num_attention_heads 4; give head_dim"),
        ({"head_dim": 7}, "head_dim is 7; .* even"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 8.0}, "head_dim is 8.0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 .* num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; .*'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0"),
        ({"attention_dropout": -1}, "attention_dropout is -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1"),
        ({"initializer_range": float("inf")}, "initializer_range is inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [None]}, "eos_token_id is .*None"),
        ({"eos_token_id": [1, None, "x"]}, "eos_token_id is .*'x'"),
        ({"bos_token_id": 1.0}, "bos_token_id is 1.0"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**changes)
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(changes)


def test_rope_must_be_a_rope_config() -> None:
    with pytest.raises(ValueError, match="must be a RopeConfig"):
        LlamaConfig(rope={"rope_type": "default"})  # type: ignore[arg-type]


def test_other_kinds_of_checkpoint() -> None:
    with pytest.raises(ValueError, match="model_type is 'mistral'"):
        LlamaConfig.from_hf({**LlamaConfig().to_hf(), "model_type": "mistral"})


def test_from_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        LlamaConfig.from_file(tmp_path)
    file.write_text(json.dumps(V4))
    assert LlamaConfig.from_file(tmp_path) == LlamaConfig.from_file(file) == LlamaConfig.from_hf(V4)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        LlamaConfig.from_file(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        LlamaConfig.from_file(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="holds list; it must be a JSON object"):
        LlamaConfig.from_file(file)
    file.write_text('{"vocab_size": 0}')
    with pytest.raises(ValueError, match=r"config\.json: vocab_size is 0"):
        LlamaConfig.from_file(file)


@pytest.mark.parametrize(
    "keys",
    [
        {"vocab_size": 10**400},
        {"initializer_range": 10**400},
        {"rope_theta": 10**400},
        {"rope_scaling": {"type": "linear", "factor": 10**400}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400}},
    ],
)
def test_numbers_beyond_every_float_are_errors(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="it must be a"):
        LlamaConfig.from_hf(keys)
