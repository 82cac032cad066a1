"""Guided output: which tokens may come next, so that the output has the form that its request asks for.

The grammars are llguidance's (https://github.com/guidance-ai/llguidance, extra `guided`), a package without
dependencies that knows tokens as bytes, so byte-level BPE and SentencePiece are the same to it. Of a `Guide` the
scheduler asks which guesses fit, the sampler which tokens are allowed, and the sequence tells it what was drawn.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from llama_core import Tokenizer

from .structured_outputs import FORMS, StructuredOutputsParams

INSTALL = "pip install llama-infer[guided]"
WHITESPACE = r"[ \n\t]{0,20}"
MARK = "\x02"
"""A character that no text has, and no longer token begins with."""
KEPT = 64
"""Compiled grammars; the least recently used goes first."""


class Guide:
    """How far one sequence has come in its grammar.

    Attributes:
        error: why the grammar cannot go on, e.g. that it has become too large; None while it can.
    """

    def __init__(self, matcher: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self.error: str | None = None
        self._bits = b""
        self._look()

    @property
    def over(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self._over

    def advance(self, token_id: int) -> None:
        """The token has been drawn."""
        if self.error is None:
            self._matcher.consume_token(token_id)
            self._look()

    def fitting(self, guesses: Sequence[int]) -> list[int]:
        """The guesses up to the first that the grammar refuses."""
        # A model may have more ids than the tokenizer; to the matcher they are a mistake that it does not get over.
        guesses = list(takewhile(lambda token_id: token_id < self._vocab_size, guesses))
        return guesses[: self._matcher.validate_tokens(guesses)] if guesses and self.error is None else []

    def allowed(self, guesses: Sequence[int], may_end: bool) -> list[bytes]:
        """Which tokens may come next, and which after each of the guesses.

        Args:
            may_end: whether the output may end where the grammar leaves the choice.

        Returns:
            1 + len(guesses) sets of token ids: bit i & 7 of byte i >> 3 is set for an id that may come. Behind a guess
            that does not fit they are empty.
        """
        rows = [self._bits]
        if guesses:
            ahead = self._matcher.deep_copy()
            fitting = len(self.fitting(guesses))
            for guess in guesses[:fitting]:
                ahead.consume_token(guess)
                rows.append(ahead.compute_bitmask())
            rows += [b""] * (len(guesses) - fitting)
        return rows if may_end else [_without(bits, self._end_ids) for bits in rows]

    def _look(self) -> None:
        stopped = self._matcher.is_stopped()
        if not stopped:
            self._bits = self._matcher.compute_bitmask()
            # That nothing can follow may show here only.
            stopped = self._matcher.is_stopped() or not _without(self._bits, self._end_ids).strip(b"\0")
        if self._matcher.is_error():
            self.error = f"structured_outputs cannot go on: {_first_line(self._matcher.get_error())}"
        self._over = stopped and self.error is None


class GuideMaker:
    """Makes guides for one tokenizer. Threads may share it.

    Args:
        tokenizer: whose tokens are drawn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # The id behind the last stands for the end where the tokenizer names none.
        self.end_ids = frozenset(tokenizer.eos_ids or (tokenizer.vocab_size,))
        self._compiled = functools.lru_cache(maxsize=KEPT)(self._compile)

    def guide(self, params: StructuredOutputsParams) -> Guide:
        """A guide at the beginning of an output.

        Raises:
            ValueError: a schema, expression or grammar that is none, or that llguidance cannot do; or llguidance is not
                installed.
        """
        guide = Guide(self._compiled(params).deep_copy(), self.end_ids, self.tokenizer.vocab_size)
        if guide.error is not None:
            raise ValueError(guide.error)
        return guide

    @functools.cached_property
    def _vocabulary(self) -> Any:
        llguidance = _package()
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer, self.end_ids)), eos_token=sorted(self.end_ids)
        )

    def _compile(self, params: StructuredOutputsParams) -> Any:
        llguidance = _package()
        form = next(name for name in FORMS if getattr(params, name) is not None)
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _grammar(llguidance, params), log_level=0)
            error = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, RecursionError) as raised:
            error = str(raised)
        if error:
            raise ValueError(f"structured_outputs: {form} {_shortened(getattr(params, form))}: {_first_line(error)}")
        return matcher


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        self.eos_token_id = min(end_ids)
        self.bos_token_id = tokenizer.bos_id
        special = tokenizer.special_ids
        ids = range(max(tokenizer.vocab_size, self.eos_token_id + 1))
        self.special_token_ids = [i for i in ids if i in special or i in end_ids]
        # Names of special tokens must differ from each other and from text; ids without a token have no bytes.
        self.tokens = [b"" if i >= tokenizer.vocab_size else tokenizer.token_bytes(i) for i in ids]
        for i in self.special_token_ids:
            self.tokens[i] = f"<|{i}|>".encode()
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text that the grammar leaves no choice about, in the middle of its output.
        llguidance allows no other tokens there."""
        ids = self._tokenizer.encode(text, add_bos=False)
        if self._bytes(ids) == text.encode():
            return ids
        # SentencePiece puts a space before a text; behind a character there is none.
        before, both = (self._tokenizer.encode(part, add_bos=False) for part in (MARK, MARK + text))
        ids = both[len(before) :]
        if both[: len(before)] == before and self._bytes(ids) == text.encode():
            return ids
        return self._greedy(text)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in ids)

    def _greedy(self, text: str) -> list[int]:
        """The longest token each time; texts that no tokens make are cut where they end."""
        special = set(self.special_token_ids)
        known = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        rest, ids = text.encode(), []
        while rest:
            length = next((n for n in range(min(len(rest), 64), 0, -1) if rest[:n] in known), 0)
            if not length:
                break
            ids.append(known[rest[:length]])
            rest = rest[length:]
        return ids


def _grammar(llguidance: Any, params: StructuredOutputsParams) -> str:
    grammar: str
    if params.json is not None or params.json_object:
        schema = '{"type": "object"}' if params.json is None else str(params.json)
        json.loads(schema)  # its error names the place in the schema
        whitespace = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
        options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    elif params.regex is not None:
        grammar = llguidance.grammar_from("regex", params.regex)
    elif params.choice is not None:
        grammar = llguidance.grammar_from("choice", json.dumps(params.choice))
    else:
        grammar = llguidance.grammar_from("grammar", params.grammar)
    return grammar


def _without(bits: bytes, ids: frozenset[int]) -> bytes:
    """The set less some ids."""
    changed = bytearray(bits)
    for token_id in ids:
        if token_id >> 3 < len(changed):
            changed[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return bytes(changed)


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"structured_outputs needs the package llguidance ({error}): {INSTALL}") from None
    return llguidance


def _first_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
