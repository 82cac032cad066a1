"""Which occurrences of a special token's text become that token, and which stay text.

The text of a user may hold `<|eot_id|>`; only what a chat template wrote (or a caller vouches for) may become a control
token. The tokenizers package can treat special tokens as text, but only all or none of them. So every special token
gets a *twin*: an ordinary added token with the same flags, spelled with a private-use character that is in no text
given to it. Special tokens are always read as text, and where a special token is meant its twin is put. Everything else
(splits around tokens, Metaspace's rule for the first piece, normalizers) stays the package's own work.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import tokenizers

from .backend import package_errors, special_ids
from .text import unused_chars

_TWINS = 0xF0000  # private use, plane 15: numbers a twin after its sentinel


@dataclass(frozen=True)
class MarkedText:
    """A text with twins in the place of special tokens.

    `knots` are (position in the source, position in `text`) pairs, rising, around everything that was replaced.
    `found` are (start, end, special token) in the source.
    """

    text: str
    sentinel: str
    knots: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    found: list[tuple[int, int, str]] = field(default_factory=list)

    def position(self, source: int) -> int:
        """The place in `text` of a place in the source that lies outside replaced parts."""
        start, place = self.knots[bisect.bisect_right(self.knots, source, key=lambda knot: knot[0]) - 1]
        return place + source - start


class SpecialText:
    """The special tokens of one tokenizer, and its reader of texts with twins in them.

    Takes the backend over: it gets twins, under ids past the end, and from then on reads special tokens as text. A text
    that holds the twins' own character is read by a copy with another one.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder().values()
        self.json = backend.to_str()
        """The text of a `tokenizer.json`, without twins."""
        taken = set(backend.get_vocab(with_added_tokens=True).values())
        self.size = max(taken, default=-1) + 1
        """One more than the largest id."""
        self._has_holes = len(taken) != self.size
        self._normalizer = backend.normalizer
        self._ids = special_ids(backend)
        unknown = getattr(backend.model, "unk_token", None)
        self._never_text = frozenset(self._ids.values()) - {self._ids.get(str(unknown))}
        self._flags = {token.content: token for token in added if token.content}
        self._index = {content: index for index, content in enumerate(self._ids)}
        # Leftmost, then longest, over all added tokens: the package's own rule.
        ordered = sorted(self._flags, key=len, reverse=True)
        self._any = "|".join(self._pattern(content) for content in ordered)
        self.specials = tuple(self._ids)
        self._heads = {token[:n] for token in self._ids for n in range(1, len(token))}
        self._tails = {token[-n:] for token in self._ids for n in range(1, len(token))}
        self._longest = max(map(len, self._ids), default=0)
        self._first = unused_chars([])[0]
        self._reader = self._with_twins(backend, self._first)
        self._copy = lru_cache(maxsize=2)(
            lambda sentinel: self._with_twins(tokenizers.Tokenizer.from_str(self.json), sentinel)
        )

    def _pattern(self, content: str) -> str:
        escaped = re.escape(content)
        return rf"(?<!\w){escaped}(?!\w)" if self._flags[content].single_word else escaped

    def read(self, marked: MarkedText) -> tuple[list[int], tokenizers.Encoding]:
        """Ids of a marked text, and the package's own encoding of it, whose `offsets` are each token's (start, end).

        Raises:
            ValueError: the model itself makes a special token out of plain text, or fails on the text.
        """
        with package_errors("encoding failed"):
            reader, real = self._reader if marked.sentinel == self._first else self._copy(marked.sentinel)
            encoding = reader.encode(marked.text, add_special_tokens=False)
        ids = self._checked(encoding.ids)
        return [real.get(i, i) for i in ids] if marked.found else ids, encoding

    def read_texts(self, texts: list[str]) -> list[list[int]]:
        """Ids of several texts in which nothing is special, on several threads. Errors as for `read`."""
        sentinel = unused_chars(texts)[0]
        with package_errors("encoding failed"):
            reader, _ = self._reader if sentinel == self._first else self._copy(sentinel)
            encodings = reader.encode_batch_fast(texts, add_special_tokens=False)
        return [self._checked(encoding.ids) for encoding in encodings]

    def _checked(self, ids: list[int]) -> list[int]:
        if not self._never_text.isdisjoint(ids):
            token = next(text for text, token_id in self._ids.items() if token_id in ids)
            raise ValueError(f"the text holds {token!r} where this tokenizer reads a special token even as text")
        return ids

    def _twin(self, content: str, sentinel: str) -> str:
        return sentinel + chr(_TWINS + self._index[content])

    def _keeps(self, content: str) -> bool:
        normalizer = self._normalizer
        return normalizer is None or normalizer.normalize_str(content) == content

    def _with_twins(self, backend: tokenizers.Tokenizer, sentinel: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        flags = self._flags
        twins = [
            tokenizers.AddedToken(
                self._twin(content, sentinel),
                single_word=False,  # already decided where the twin was put
                lstrip=flags[content].lstrip,
                rstrip=flags[content].rstrip,
                # a token matched in normalized text can't be found if the normalizer changes its own spelling, as that
                # of Llama 2's older files does; its twin is found
                normalized=flags[content].normalized and self._keeps(content),
                special=False,
            )
            for content in self._ids
        ]
        if self._has_holes:
            backend = self._reserve(twins)
        backend.add_tokens(twins)
        backend.encode_special_tokens = True
        real: dict[int, int] = {}
        for content, token_id in self._ids.items():
            twin_id = backend.token_to_id(self._twin(content, sentinel))
            assert twin_id is not None
            assert twin_id >= self.size
            real[twin_id] = token_id
        return backend, real

    def _reserve(self, twins: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
        """A copy whose model knows the twins under ids past the end. Into a vocabulary with holes, the package would
        otherwise put a new token at an id that is taken."""
        settings = json.loads(self.json)
        vocab = settings["model"]["vocab"]
        if not isinstance(vocab, dict):
            raise ValueError("a vocabulary with holes between its ids is read for BPE and WordLevel models only")
        vocab.update({twin.content: self.size + index for index, twin in enumerate(twins)})
        return tokenizers.Tokenizer.from_str(json.dumps(settings))

    def mark(self, source: str, drop: str = "") -> MarkedText:
        """Puts twins for all special tokens in `source`, and leaves out the characters in `drop`.

        A character of `drop` inside a special token's text, or before one of a single character, keeps it text.
        """
        sentinel = unused_chars([source])[0]
        parts = [self._any] if self._any else []
        if drop:
            single = "".join(re.escape(content) for content in self._ids if len(content) == 1)
            parts.insert(0, f"[{re.escape(drop)}]" + (f"[{single}]?" if single else ""))
        if not parts:
            return MarkedText(source, sentinel)
        out: list[str] = []
        knots, found = [(0, 0)], []
        at = length = 0
        for match in re.finditer("|".join(parts), source):
            content = match[0]
            if content in self._ids:
                new = self._twin(content, sentinel)
                found.append((match.start(), match.end(), content))
            else:
                new = content.lstrip(drop) if drop else content
            out += source[at : match.start()], new
            length += match.start() - at + len(new)
            at = match.end()
            knots.append((at, length))
        return MarkedText("".join([*out, source[at:]]), sentinel, knots, found)

    def break_up(self, text: str, mark: str) -> str:
        """The text of a user with `mark` put wherever it holds a special token, or a part of one at its ends that
        neighbouring text could complete. Dropping the marks (`mark(…, drop=…)`) gives the text back."""
        if not self._ids:
            return text
        ordered = sorted(self._ids, key=len, reverse=True)
        # look ahead, so that tokens which overlap are all found
        pattern = re.compile(f"(?=({'|'.join(map(re.escape, ordered))}))")
        # inside the token, where no string method of a template is likely to part them (one character has no inside)
        marks = {match.start() + (len(match[1]) > 1) for match in pattern.finditer(text)}
        # at the first and last visible character: templates trim
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(1, min(self._longest, end - start + 1))
        if any(text[end - n : end] in self._heads for n in lengths):
            marks.add(end)
        if any(text[start : start + n] in self._tails for n in lengths):
            marks.add(start)
        edges = sorted({0, len(text)} | marks)
        pieces = [(mark if a in marks else "") + text[a:b] for a, b in itertools.pairwise(edges)]
        return "".join(pieces) + (mark if len(text) in marks else "")
