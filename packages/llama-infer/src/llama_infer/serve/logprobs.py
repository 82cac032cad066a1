"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_core import Tokenizer
from llama_infer.outputs import Logprob

Entry = dict[int, Logprob]
"""Of one token: itself first, then the most probable ones."""


def for_chat(entry: Entry, tokenizer: Tokenizer, wanted: int) -> dict[str, Any]:
    """A token of `choices[].logprobs.content`."""
    own = next(iter(entry))
    top = sorted(entry, key=lambda token_id: entry[token_id].rank)[:wanted]
    return {**_token(own, entry, tokenizer), "top_logprobs": [_token(other, entry, tokenizer) for other in top]}


def _token(token_id: int, entry: Entry, tokenizer: Tokenizer) -> dict[str, Any]:
    known = token_id < tokenizer.vocab_size
    raw = list(tokenizer.token_bytes(token_id)) if known else None
    return {"token": _text(token_id, entry), "logprob": _finite(entry[token_id].logprob), "bytes": raw}


class CompletionLogprobs:
    """Gathers `choices[].logprobs` of /v1/completions, a token at a time."""

    def __init__(self, wanted: int, offset: int = 0) -> None:
        self.wanted = wanted
        self._offset = offset

    def of(self, entries: Sequence[tuple[int, Entry | None]]) -> dict[str, Any]:
        """Of tokens in a row: (token id, entry; None for the first of a prompt)."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in entries:
            text = _text(token_id, entry) if entry is not None else ""
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else _finite(entry[token_id].logprob))
            top = None
            if entry is not None and self.wanted:
                ranked = sorted(entry, key=lambda other: entry[other].rank)[: self.wanted]
                top = {_text(other, entry): _finite(entry[other].logprob) for other in ranked}
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return {**found, "top_logprobs": found["top_logprobs"] if self.wanted else None}


def _text(token_id: int, entry: Entry) -> str:
    text = entry[token_id].decoded_token
    return f"<{token_id}>" if text is None else text  # a row of the model that no token has


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's number for what is impossible: JSON has no infinity
