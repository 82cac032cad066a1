"""A run from prepared folders: what must fit, and training itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_core import load_tokenizer
from llama_train import TrainConfig, train
from llama_train.config import DataConfig
from llama_train.data.make_shards import make_shards
from llama_train.data.open_sources import open_sources
from llama_train.data.settings import PrepareConfig
from llama_train.data.token_set import open_folder
from llama_train.tokenizer_training import save_tokenizer, train_tokenizer


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, ...]:
    """Two prepared folders of one tokenizer."""
    save_tokenizer(train_tokenizer(["def f(x):\n    return x\n" * 5], 262), tmp_path / "tokenizer", 10**30)
    for name in ("code", "talk"):
        text = "".join(json.dumps({"text": f"{name} {n} " * (n % 9 + 1)}) + "\n" for n in range(80))
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        inputs = (str(tmp_path / f"{name}.jsonl"),)
        config = PrepareConfig(str(tmp_path / "tokenizer"), str(tmp_path / name), inputs, workers=0, shard_tokens=900)
        assert make_shards(config).shards > 1
    return str(tmp_path / "code"), str(tmp_path / "talk")


@pytest.mark.parametrize("packing", ["cut", "best-fit"])
def test_a_run_stopped_and_continued_is_the_whole_run(
    packing: str,
    sources: tuple[str, ...],
    tiny: TrainConfig,
    change: Callable[..., TrainConfig],
    recorder: Any,
    tmp_path: Path,
    stop_after: Any,
) -> None:
    data = replace(
        DataConfig(sources=sources, weights=(3.0, 1.0), packing=packing),  # type: ignore[arg-type]
        sequence_length=16,
        micro_batch_size=4,
        held_out_fraction=0.1,
    )
    whole = train(replace(tiny, data=data, folder=str(tmp_path / "whole")), lines := recorder())
    assert "source     " + sources[0] in lines.text
    assert whole.held_out is not None
    parts = replace(tiny, data=data, folder=str(tmp_path / "parts"))
    with pytest.MonkeyPatch.context() as patch:
        stop_after(7, patch)
        assert not train(parts, recorder()).finished
    again = train(parts, recorder())
    assert again.finished
    assert again.held_out == whole.held_out
    with pytest.raises(ValueError, match=r"data.weights was"):
        train(change(parts, **{"data.weights": (1.0, 1.0)}), recorder())


def test_the_held_out_documents_are_no_training_documents(sources: tuple[str, ...]) -> None:
    rest, apart = open_folder(sources[0], 0.1)
    assert apart is not None
    assert len(apart.chosen) == 8
    assert sorted([*apart.chosen, *rest.chosen]) == list(range(80))
    opened = open_sources(DataConfig(sources=sources, held_out_fraction=0.1), lambda text: None)
    assert len(opened.held_out.tokens.lengths) == 16
    given = open_sources(DataConfig(sources=sources[:1], held_out=sources[1]), lambda text: None)
    assert len(given.train.sets[0].lengths) == len(given.held_out.tokens.lengths) == 80


def test_faults(sources: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none does not exist; `llama-train prepare` makes"):
        open_folder(str(tmp_path / "none"))
    other = tmp_path / "other"
    save_tokenizer(train_tokenizer(["something else " * 5], 262), other, 10**30)
    found = load_tokenizer(other).fingerprint[:12]
    with pytest.raises(ValueError, match=rf"code was made by the tokenizer .*; .*other is {found}…: prepare"):
        open_sources(DataConfig(sources=sources, tokenizer=str(other)), lambda text: None)
    (Path(sources[0]) / "index.json").unlink()
    with pytest.raises(ValueError, match="holds no finished shards: start its"):
        open_folder(sources[0])
    for wrong in ({"weights": (1.0,)}, {"weights": (1.0, 0.0)}, {"sources": (), "packing": "best-fit"}):
        with pytest.raises(ValueError, match=r"data\.(weights|held_out and data\.packing)"):
            DataConfig(**{"sources": sources, **wrong})  # type: ignore[arg-type]
