"""Presets against what was published."""

from __future__ import annotations

import pytest
import torch

from llama_core import PRESETS, Llama, LlamaConfig, preset

# Parameters in millions: model cards and papers, to the digits they give
PUBLISHED = {
    "llama-2-7b": 6738,
    "llama-2-13b": 13016,
    "llama-2-70b": 68977,
    "llama-3-8b": 8030,
    "llama-3-70b": 70554,
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-3.1-405b": 405853,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "tinyllama-1.1b": 1100,
    "smollm-135m": 134.5,
    "smollm-360m": 361.8,
    "smollm-1.7b": 1711,
    "smollm2-135m": 134.5,
    "smollm2-360m": 361.8,
    "smollm2-1.7b": 1711,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        count = Llama(preset(name)).num_parameters()
    digits = 1 if PUBLISHED[name] < 1000 else 0
    assert round(count / 1e6, digits) == PUBLISHED[name]


def test_every_preset_is_covered() -> None:
    assert {name for name in PRESETS if not name.startswith("tiny-") and name != "tiny"} == PUBLISHED.keys()


def test_rotary_settings_and_context() -> None:
    def row(name: str) -> tuple[str, float, float | None, int]:
        config = preset(name)
        return config.rope.rope_type, config.rope.rope_theta, config.rope.factor, config.max_position_embeddings

    assert row("llama-2-7b") == ("default", 10000.0, None, 4096)
    assert row("llama-3-8b") == row("llama-3-70b") == ("default", 500000.0, None, 8192)
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"):
        assert row(name) == ("llama3", 500000.0, 8.0, 131072)
    for name in ("llama-3.2-1b", "llama-3.2-3b"):
        assert row(name) == ("llama3", 500000.0, 32.0, 131072)
    assert row("tinyllama-1.1b") == ("default", 10000.0, None, 2048)
    assert row("smollm-135m") == ("default", 10000.0, None, 2048)
    assert row("smollm2-135m") == row("smollm2-360m") == ("default", 100000.0, None, 8192)
    assert row("smollm2-1.7b") == ("default", 130000.0, None, 8192)


def test_ids_and_ties() -> None:
    def row(name: str) -> tuple[int | None, tuple[int, ...], bool]:
        return preset(name).bos_token_id, preset(name).eos_token_ids, preset(name).tie_word_embeddings

    assert row("llama-2-7b") == row("tinyllama-1.1b") == (1, (2,), False)
    assert row("llama-3-8b") == row("llama-3.1-405b") == (128000, (128001,), False)
    assert row("llama-3.2-1b") == row("llama-3.2-3b") == (128000, (128001,), True)
    for name in PUBLISHED:
        assert not name.startswith("smollm") or row(name) == (0, (0,), True)
        assert preset(name).rms_norm_eps == 1e-5
        assert preset(name).head_width in (64, 128)


def test_presets_round_trip() -> None:
    for config in PRESETS.values():
        assert LlamaConfig.from_hf(config.to_hf()).replace(extra={}) == config


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'llama3-8b'; did you mean 'llama-3-8b'\? Known: tiny, .*smollm2-1.7b"):
        preset("llama3-8b")
