"""Sampling defaults of a model, from its generation_config.json or its card."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_infer.defaults import ModelSampling, model_sampling


def defaults(folder: Path, config: dict[str, Any]) -> ModelSampling:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return model_sampling(folder)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"eos_token_id": 2}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 0, "top_k": 40, "min_p": 0.05}, {"temperature": 0, "top_k": 40, "min_p": 0.05}),
        ({"do_sample": False, "temperature": 0.6, "max_new_tokens": 9}, {"temperature": 0.0, "max_tokens": 9}),
    ],
)
def test_settings_by_our_names(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]) -> None:
    assert defaults(tmp_path, config).settings == settings


def test_only_what_applies_is_told(tmp_path: Path) -> None:
    found = defaults(tmp_path, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1})
    start = "sampling defaults from generation_config.json: "
    assert found.settings["repetition_penalty"] == 1.1
    assert found.notices({"top_p": 0.5}) == [start + "temperature 0.6, repetition_penalty 1.1"]
    penalty = [start + "repetition_penalty 1.1"]
    assert found.notices({"top_p": 0.5, "temperature": 1.0}) == penalty
    assert found.notices({"temperature": 0.0}) == penalty  # greedy: top_p has no effect


def test_no_file_no_defaults(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "model.gguf"):
        assert model_sampling(path).settings == {}
        assert model_sampling(path).notices() == []
