"""What comes back from a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
"""stop: an end token, stop token or stop string; length: max_tokens or the end of the context."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    prompt: str | None
    """As given; None for prompts given as token ids or as a chat."""
    prompt_token_ids: list[int]
    text: str
    """Without special tokens and without the stop string."""
    token_ids: list[int]
    """All tokens produced, the end token and those of a stop string included."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class StreamChunk:
    """One more token of a running request."""

    text: str
    """What became final with this token; often empty, e.g. inside a character or a possible stop string."""
    token_id: int
    finish_reason: FinishReason | None
    """Set on the last chunk only."""
