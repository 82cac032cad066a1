"""A raw record to token ids, and which of them are trained on. Runs in the worker processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_core import Tokenizer

from .settings import PrepareConfig
from .word_cache import word_cache


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document or a piece of one: ids, which count as targets (None: all), and bytes of the text that counts."""

    ids: NDArray[Any]
    counted: NDArray[np.bool_] | None
    size: int


class Encoder:
    """Encodes records as the settings say.

    Args:
        tokenizer: of the model.
        config: how records are read.
    """

    def __init__(self, tokenizer: Tokenizer, config: PrepareConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        wants_bos = tokenizer.adds_bos if config.bos == "auto" else config.bos == "yes"
        if config.bos == "yes" and tokenizer.bos_id is None:
            raise ValueError("--bos is 'yes'; this tokenizer has no begin token")
        self.first = [tokenizer.bos_id] if wants_bos and tokenizer.bos_id is not None else []
        self.last = [tokenizer.eos_id] if config.eos == "yes" and tokenizer.eos_id is not None else []
        cache = word_cache(tokenizer)
        self._encode_texts = partial(tokenizer.encode_batch, add_bos=False) if cache is None else cache.encode
        # SentencePiece vocabularies put a space before every text, so two texts are not the text of both.
        self._joins = tokenizer.decode(self._ids("a b") + self._ids("c d")) == "a bc d"

    def encode(self, tasks: list[tuple[Any, bool, bool]], kind: str) -> list[Encoded | str]:
        """Each record (data, begins, ends) as ids, or as a message that says why it cannot be read."""
        texts: list[str | None] = []
        found: list[Encoded | str | None] = []
        for data, _, _ in tasks:
            text: str | None = None
            result: Encoded | str | None = None
            try:
                read = _text(data) if kind == "text" else self._record(data if kind == "rows" else _json(data))
                text, result = (read, None) if isinstance(read, str) else (None, read)
            except ValueError as error:
                result = str(error)
            texts.append(text)
            found.append(result)
        # All plain texts at once: that is where nearly all the time goes.
        try:
            encoded = iter(self._encode_texts([text for text in texts if text is not None]))
        except ValueError:  # one of them cannot be encoded: which?
            for index, text in enumerate(texts):
                try:
                    self._ids(text or "")
                except ValueError as error:
                    texts[index], found[index] = None, str(error)
            encoded = iter(self._encode_texts([text for text in texts if text is not None]))
        for index, (text, (_, begins, ends)) in enumerate(zip(texts, tasks)):
            if text is not None:
                ids = next(encoded)
                if ids or not (begins and ends):
                    ids = (self.first if begins else []) + ids + (self.last if ends else [])
                found[index] = Encoded(np.asarray(ids, dtype=np.uint32), None, len(text.encode()))
        return [item for item in found if item is not None]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False)

    def _record(self, record: Any) -> str | Encoded:
        """The text of a record, or ids and mask where a part of it is not trained on."""
        if not isinstance(record, dict):
            raise ValueError(f"the record is {_shown(record)}; it must be an object with keys")
        kind = self.config.record
        if kind == "chat" or (kind == "auto" and record.get("messages") is not None):
            return self._chat(record)
        if kind == "prompt" or (kind == "auto" and record.get("prompt") is not None and "completion" in record):
            return self._completion(_field(record, "prompt"), _field(record, "completion"))
        return _field(record, self.config.text_key)

    def _chat(self, record: dict[str, Any]) -> Encoded:
        if "messages" not in record:
            raise ValueError(f"the record has no key 'messages'; its keys are {_keys(record)}")
        ids, mask = self.tokenizer.encode_chat_with_mask(record["messages"], tools=record.get("tools"))
        counted = np.asarray(mask, dtype=np.bool_)
        return self._masked(ids, counted)

    def _completion(self, prompt: str, completion: str) -> Encoded:
        before = self._ids(prompt)
        if self._joins:  # as generation does it: the prompt is encoded before the answer exists
            after = self._ids(completion)
        else:
            whole = self._ids(prompt + completion)
            same = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
            before, after = whole[:same], whole[same:]
        ids = self.first + before + after + self.last
        counted = np.ones(len(ids), dtype=np.bool_)
        counted[: len(self.first) + len(before)] = False
        return self._masked(ids, counted)

    def _masked(self, ids: list[int], counted: NDArray[np.bool_]) -> Encoded:
        array = np.asarray(ids, dtype=np.uint32)
        return Encoded(array, counted, len(self.tokenizer.decode(array[counted].tolist()).encode()))


def cuts_are_exact(tokenizer: Tokenizer) -> bool:
    """Whether a text may be cut before a line that begins with no white space, and its parts encoded apart."""
    lines = ["def f(x):\n    return 1\n", "\n\n", "Word, 12.\n", "'s\n", "(a)\r\n", "é文\n", "end"]
    for before in lines:
        for after in ("Word", "12", "'s it", "(b)", "é", "文", "<x>", "_"):
            whole = tokenizer.encode(before + after, add_bos=False)
            if whole != tokenizer.encode(before, add_bos=False) + tokenizer.encode(after, add_bos=False):
                return False
    return True


def _text(data: bytes) -> str:
    # Lines end as Python's text files have it, whatever system wrote them.
    return _decode(data).replace("\r\n", "\n").replace("\r", "\n")


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        lines = data.count(b"\n", 0, error.start)
        where = f" in line {lines + 1} of the document" if lines else ""
        raise ValueError(f"it is not UTF-8: byte {data[error.start]:#04x}{where}") from None


def _json(data: bytes) -> Any:
    text = _decode(data)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"it is not JSON that can be read: {type(error).__name__}") from None


def _field(record: dict[str, Any], key: str) -> str:
    value: Any = record
    for part in [key] if key in record else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"the record has no key {key!r}; its keys are {_keys(record)}")
        value = value[part]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_shown(value)}; it must be text")
    return value


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:8])) or "none"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
