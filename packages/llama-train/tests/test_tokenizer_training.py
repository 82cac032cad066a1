from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_train.tokenizer_training import BOS_TOKEN, EOS_TOKEN, save_tokenizer, train_tokenizer

TEXT = ["def function(argument):\n    return argument + 1\n" * 5, "class Thing:\n    value = 12345\n" * 5]


def test_any_text_survives() -> None:
    tokenizer = train_tokenizer(TEXT, 300)
    assert tokenizer.get_vocab_size() == 300
    for text in ("def f(x):\n\treturn  x\n", "naïve 文字 🙂\r\n\r\n   end ", "", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_last_and_begin_comes_once() -> None:
    tokenizer = train_tokenizer(TEXT, 300)
    bos, eos = tokenizer.token_to_id(BOS_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
    assert (bos, eos) == (298, 299)
    ids = tokenizer.encode("return").ids
    assert ids[0] == bos
    assert bos not in ids[1:]
    assert eos not in ids


def test_words_are_cut_as_llama_3_does() -> None:
    pieces = train_tokenizer(TEXT, 258).pre_tokenizer.pre_tokenize_str("  def f12345(x):\n")
    words = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert words == [" ", " def", " f", "123", "45", "(x", "):\n"]


def test_same_text_same_tokenizer() -> None:
    assert train_tokenizer(TEXT, 300).to_str() == train_tokenizer(iter(TEXT), 300).to_str()


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="yields only 2"):
        train_tokenizer(["ab"], 1000)


def test_saved_files(tmp_path: Path) -> None:
    from llama_core import load_tokenizer

    tokenizer = train_tokenizer(TEXT, 300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", max_length=64)
    settings = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["model_max_length"] == 64
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert (loaded.bos_id, loaded.eos_ids, loaded.vocab_size) == (298, (299,), 300)
    assert loaded.encode(TEXT[0]) == tokenizer.encode(TEXT[0]).ids
    assert loaded.decode(loaded.encode(TEXT[1])) == TEXT[1]
