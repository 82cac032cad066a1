"""RopeConfig: three spellings of one block, and errors for contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from llama_core import LlamaConfig, RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "beta_fast": None}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        },
    ],
)
def test_spellings(hf: dict[str, Any]) -> None:
    expected = RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)
    assert RopeConfig.from_hf(hf) == expected
    assert RopeConfig.from_hf({"rope_parameters": expected.to_hf()}) == expected


@pytest.mark.parametrize("hf", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {}}])
def test_nothing_said(hf: dict[str, Any]) -> None:
    assert RopeConfig.from_hf(hf) == RopeConfig("default", 10000.0)
    assert RopeConfig.from_hf({**hf, "rope_theta": 7.0}) == RopeConfig("default", 7.0)


def test_unknown_keys_survive() -> None:
    block = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "truncate": False, "finetuned": True}
    config = RopeConfig.from_hf({"rope_parameters": block})
    assert config.extra == {"finetuned": True}
    assert config.to_hf() == block


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "'linear' and rope_type 'yarn'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 at the top and 500000.0"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "contradict each other",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs the key 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "'yarn' needs the key 'factor'"),
        *(
            ({"rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != key}}}, f"key '{key}'")
            for key in LLAMA3
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; known: default, linear"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0]}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; .* at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "'factor' is '8'; .* number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "'factor' is inf"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 and high"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 0}}, "low_freq_factor 0 and high"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}},
            "'original_max_position_embeddings' is 0; .* at least 1",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 10.5}},
            "'original_max_position_embeddings' is 10.5",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "'truncate' is 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "beta_slow 1.0 and beta_fast 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}}, "beta_slow 0 and beta_fast 32.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}}, "attention_factor is 0.0"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; it must be above 1"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_theta": float("nan")}, "'rope_theta' is nan"),
        ({"rope_theta": "10000"}, "'rope_theta' is '10000'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (
            {"original_max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            "4096 at the top and 8192",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                }
            },
            "differs between layer types",
        ),
    ],
)
def test_errors_name_the_value(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(hf)


def test_b09_unknown_kind_is_named() -> None:
    block = {"rope_type": "spiral", "factor": 2.0}
    for hf in ({"rope_scaling": block}, {"rope_parameters": block}, {"rope_scaling": {"type": "spiral"}}):
        with pytest.raises(ValueError, match="spiral"):
            LlamaConfig.from_hf(hf)


def test_b09_save_and_reload_keeps_kind_and_factor() -> None:
    for block in (
        {"type": "linear", "factor": 8.0},
        {"rope_type": "linear", "factor": 8.0},
        {"type": "linear", "rope_type": "linear", "factor": 8.0},
    ):
        written = LlamaConfig.from_hf({"rope_scaling": block}).to_hf()
        again = LlamaConfig.from_hf(written)
        assert (again.rope.rope_type, again.rope.factor) == ("linear", 8.0)
        assert written["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}  # what a v4 reader looks for
        assert written["rope_parameters"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
