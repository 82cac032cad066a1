from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from llama_core import load_tokenizer
from llama_train.config import DataConfig, TrainConfig
from llama_train.prepare import prepare


@pytest.fixture
def data(tiny: TrainConfig) -> DataConfig:
    return tiny.data


def test_documents_are_text_between_begin_and_end(data: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(data, tmp_path / "data")
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert (prepared.vocab_size, prepared.bos_id, prepared.eos_id) == (300, 298, 299)
    facts = json.loads((tmp_path / "data" / "prepared.json").read_text(encoding="utf-8"))
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(data.source).iterdir()}
    for tokens, held_out in ((prepared.train, False), (prepared.held_out, True)):
        names = [name for name in sorted(texts) if (name in facts["held_out"]) == held_out]
        assert names
        expected = [[298, *tokenizer.encode(texts[name], add_bos=False), 299] for name in names]
        assert tokens.tolist() == list(chain.from_iterable(expected))


def test_made_once_per_settings(data: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    prepare(data, folder)
    stamp = (folder / "train.npy").stat().st_mtime_ns
    prepare(replace(data, sequence_length=8, micro_batch_size=2), folder)  # neither changes the files
    assert (folder / "train.npy").stat().st_mtime_ns == stamp
    assert prepare(replace(data, vocab_size=290), folder).vocab_size == 290
    (folder / "prepared.json").unlink()  # a preparation that was killed
    assert prepare(data, folder).vocab_size == 300


def test_an_existing_tokenizer_is_used_and_kept(data: DataConfig, tmp_path: Path) -> None:
    first = prepare(data, tmp_path / "first")
    second = prepare(replace(data, tokenizer=str(first.tokenizer), vocab_size=999), tmp_path / "second")
    assert second.vocab_size == 300
    assert second.train.tolist() == first.train.tolist()
    assert load_tokenizer(second.tokenizer).encode("def f(x)") == load_tokenizer(first.tokenizer).encode("def f(x)")


def test_a_text_that_spells_a_special_token_gets_no_special_id(data: DataConfig, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("before <|end_of_text|> after\n" * 40, encoding="utf-8")
    for index, tokenizer in enumerate((None, str(prepare(data, tmp_path / "other").tokenizer))):
        settings = replace(data, source=str(source), tokenizer=tokenizer, vocab_size=262)
        prepared = prepare(settings, tmp_path / f"data{index}")
        for tokens in (prepared.train, prepared.held_out):
            assert tokens.tolist().count(prepared.eos_id) == 1
            text = load_tokenizer(prepared.tokenizer).decode(tokens.tolist())
            assert text == source.read_text(encoding="utf-8")[: len(text)]


def test_unreadable_tokenizer(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        prepare(replace(data, tokenizer=str(tmp_path / "none")), tmp_path / "data")
    assert not (tmp_path / "data" / "prepared.json").exists()


def test_notes_say_what_was_found(data: DataConfig, tmp_path: Path, recorder: Callable[[], object]) -> None:
    lines: list[str] = []
    prepare(data, tmp_path / "data", lines.append)
    assert "6 documents" in lines[0]
    assert lines[1] == "tokenizer  learning a vocabulary of 300"  # before the longest wait
    assert "held-out tokens, vocabulary 300" in lines[2]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"settings": {}}'])
def test_a_damaged_index_is_an_error(text_folder: Path, tmp_path: Path, content: str) -> None:
    config = DataConfig(source=str(text_folder), suffixes=(".py",), held_out_fraction=0.2, vocab_size=300)
    prepare(config, tmp_path)
    index = tmp_path / "prepared.json"
    whole = index.read_text(encoding="utf-8")
    index.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"prepared\.json"):
        prepare(config, tmp_path)
    index.write_text(whole, encoding="utf-8")
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json: remove .*prepared.json"):
        prepare(config, tmp_path)
