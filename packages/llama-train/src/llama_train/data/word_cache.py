"""Tokenizing by a table of words that were seen before: several times as fast as splitting and merging each again.

A byte-level BPE splits a text by a regular expression and merges within each word, whatever stands around it. So the
ids of a text are those of its words, one after another. Here Python's `re` splits, and a dictionary knows the words;
the tokenizer itself encodes those that are new. That is done where the splitting is known to be the same: for the
expressions below, character by character of ASCII. Everything else goes to the tokenizer as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain

from llama_core import Tokenizer

_MOST = 1 << 18  # words that are kept; beyond that the table begins anew
_LONGEST = 64  # characters of a word that is kept
_CONTRACTIONS = "'(?:[stmd]|re|ve|ll)"
_S = r"[\t-\r ]"  # what the package calls white space in ASCII; Python's \s has four characters more
_OTHER = r"[^A-Za-z0-9\t-\r ]"  # neither letter, number nor white space
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES_ALONE = {**_BYTES, "use_regex": False}
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# What a tokenizer.json says of its splitting, and the same for ASCII.
_WORDS = (
    ([_BYTES], rf"{_CONTRACTIONS}| ?[A-Za-z]+| ?[0-9]+| ?{_OTHER}+|{_S}+(?![^\t-\r ])|{_S}+"),  # GPT-2
    (
        # SmolLM: digits are cut out first, so that what stands before one ends there
        [{"type": "Digits", "individual_digits": True}, _BYTES],
        rf"{_CONTRACTIONS}| ?[A-Za-z]+|[0-9]| ?{_OTHER}+|{_S}+(?![^0-9\t-\r ])|{_S}+",
    ),
    (
        [{"type": "Split", "pattern": {"Regex": _LLAMA_3}, "behavior": "Isolated", "invert": False}, _BYTES_ALONE],
        rf"(?i:{_CONTRACTIONS})|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}| ?{_OTHER}+[\r\n]*|{_S}*[\r\n]+"
        rf"|{_S}+(?![^\t-\r ])|{_S}+",
    ),
)
# A line's end between two visible characters ends a word in all of them, and looks back and ahead no further.
_CUT = re.compile(r"(?<=[!-~]\n)(?=[!-~])")
_PROBES = (
    "def f(self, x_1=3.14):\n    return  x_1 ** 2  # it's 12345 'll 'S\n\n\n  end \t\n",
    " a  b   c\t\td\r\n\r\n 1 22  333 4444\n\n 5\n\n\nx",
    "'s's 're'RE _'t\x0b\x0c\x1c\x1f\x00 \x7f", "  ", "\n", " \n \n",
    "{}[]();:,.<>/?!@#$%^&*-+=~`\"|\\ {{ }}\n}\n{\n", "A1b2 3c 4 d5\n6", "",
)  # fmt: skip


class WordCache:
    """Encodes texts as `tokenizer.encode_batch(texts, add_bos=False)` does.

    Args:
        tokenizer: one that splits as `words` does.
        words: finds the words of an ASCII text, all of its characters.
    """

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str]) -> None:
        self._tokenizer, self._words = tokenizer, words
        self._known: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; ValueError as of `encode_batch`."""
        # A text with other characters is cut into lines, so that only those which have some go the long way.
        parts = [[text] if text.isascii() else _CUT.split(text) for text in texts]
        others = [part for pieces in parts for part in pieces if not part.isascii()]
        whole = iter(self._tokenizer.encode_batch(others, add_bos=False) if others else ())
        words = [[self._words.findall(part) if part.isascii() else None for part in pieces] for pieces in parts]
        new = self._learn(chain.from_iterable(found for pieces in words for found in pieces if found is not None))
        known, encoded = self._known, []
        for pieces in words:
            ids: list[int] = []
            for found in pieces:
                ids += next(whole) if found is None else chain.from_iterable(map(known.__getitem__, found))
            encoded.append(ids)
        for word in new:
            if len(word) > _LONGEST:
                del known[word]
        return encoded

    def _learn(self, words: Iterable[str]) -> list[str]:
        """Put words into the table; which of them were not in it."""
        wanted = set(words)
        new = list(wanted.difference(self._known))
        if len(self._known) + len(new) > _MOST:
            self._known.clear()
            new = list(wanted)
        if new:
            self._known.update(zip(new, self._tokenizer.encode_batch(new, add_bos=False), strict=True))
        return new


def word_cache(tokenizer: Tokenizer) -> WordCache | None:
    """A table for a tokenizer, or None where its splitting is not one of those known here."""
    settings = json.loads(tokenizer.to_json())
    model, splits = settings["model"], settings["pre_tokenizer"] or {}
    plain = model["type"] == "BPE" and not model.get("dropout") and settings["normalizer"] is None
    if not plain or not all(token["special"] for token in settings["added_tokens"]):
        return None
    steps = splits.get("pretokenizers", [splits])
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    words = next((pattern for known, pattern in _WORDS if known == steps), None)
    if words is None:
        return None
    cache = WordCache(tokenizer, re.compile(words))
    # What is claimed above, once for this tokenizer: were it wrong, the long way would still be right.
    same = cache.encode(_PROBES) == tokenizer.encode_batch(_PROBES, add_bos=False)
    return cache if same else None
