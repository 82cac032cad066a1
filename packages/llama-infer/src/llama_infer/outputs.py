"""What comes back from a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end token, stop token or stop string; length: max_tokens or the end of the context; abort: cancelled, or
ended by an error."""


@dataclass(frozen=True)
class Logprob:
    """How probable the model held a token, before temperature, filters and penalties."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None
    """The token alone as text; None without a tokenizer."""


@dataclass(frozen=True)
class Timings:
    """Seconds on the clock of time.perf_counter; None where it did not come to that."""

    arrived: float
    first_token: float | None
    finished: float | None


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt."""

    text: str
    """Without special tokens and without the stop string."""
    token_ids: list[int]
    """All tokens produced, the end token and those of a stop string included."""
    finish_reason: FinishReason
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, if `SamplingParams.logprobs` asks: itself and the most probable ones, by id."""
    error: str | None = None
    """Why the request was ended, if it was not the user's doing."""
    timings: Timings | None = field(default=None, compare=False)
    guessed_tokens: int = field(default=0, compare=False)
    """Tokens that a draft model or the text itself proposed ahead."""
    accepted_tokens: int = field(default=0, compare=False)
    """Those of them that stand in `token_ids`, so many steps of the model were saved."""

    @property
    def acceptance_rate(self) -> float | None:
        """The share of guesses that stand; None where nothing was guessed."""
        return self.accepted_tokens / self.guessed_tokens if self.guessed_tokens else None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; text, token_ids, finish_reason and logprobs are those of its first sample."""

    prompt: str | None
    """As given; None for prompts given as token ids or as a chat."""
    prompt_token_ids: list[int]
    samples: list[Sample]
    """As many as `SamplingParams.n`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, if `SamplingParams.prompt_logprobs` asks; None for the first."""
    cached_tokens: int = field(default=0, compare=False)
    """Tokens of the prompt that did not have to be computed."""

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.samples[0].logprobs

    @property
    def error(self) -> str | None:
        return self.samples[0].error


@dataclass(frozen=True)
class StreamChunk:
    """One more token of a running request."""

    text: str
    """What became final with this token; often empty, e.g. inside a character or a possible stop string."""
    token_id: int
    finish_reason: FinishReason | None
    """Set on the last chunk only."""
