"""How one request is to be sampled and when it ends. Names and edge rules are vLLM's where both have the setting.

Imports no torch, so that the command line can show it in `--help`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .structured_outputs import StructuredOutputsParams, as_structured_outputs


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Raises:
        ValueError: a setting outside its range; the message names both.
    """

    temperature: float = 1.0
    """0 takes the most probable token; below 1 sharpens, above 1 flattens. At least 0."""
    top_k: int = 0
    """Draw from the k most probable tokens only. 0 or -1: from all."""
    top_p: float = 1.0
    """Draw from the fewest most probable tokens whose probabilities sum to at least this. In (0, 1]."""
    min_p: float = 0.0
    """Draw from tokens at least this probable relative to the most probable. In [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or the output, multiplies negative ones (Keskar et al. 2019,
    https://arxiv.org/abs/1909.05858, eq. 4). In (0, 2]; 1: off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output, as often as each occurs. In [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; clamped to [-100, 100]."""
    n: int = 1
    """Continuations of the prompt, each drawn on its own; more than 1 wants a temperature above 0."""
    logprobs: int | None = None
    """Give each token's log-probability, and those of the most probable so many. None: no such thing; 0: its own."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    seed: int | None = None
    """Of this request's own generator, whatever runs beside it. None: another draw each time."""
    max_tokens: int | None = None
    """The most tokens to produce, at least 1. None: as many as the context has room for."""
    min_tokens: int = 0
    """No end token and no stop string counts before so many tokens."""
    stop: tuple[str, ...] = ()
    """End before any of these texts; they are not part of the output. One text or several."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these tokens, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """The form that the output must have (JSON schema, regular expression, grammar, choice), or a mapping of that. An
    output is complete where its finish reason is "stop"; `max_tokens`, stop strings and stop tokens may cut it. Where
    nothing can follow it ends by itself, whatever `min_tokens` and `ignore_eos` say."""

    def __post_init__(self) -> None:
        # Lists and single values are welcome; tuples keep the object frozen to the bottom.
        object.__setattr__(self, "stop", _as_tuple(self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids, int))
        _number("temperature", self.temperature, "a finite number of at least 0", lambda x: x >= 0)
        _integer("top_k", self.top_k, "0 or -1 (off), or at least 1", lambda x: x >= -1)
        _number("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1)
        _number("min_p", self.min_p, "in [0, 1]", lambda x: 0 <= x <= 1)
        _number("repetition_penalty", self.repetition_penalty, "in (0, 2]", lambda x: 0 < x <= 2)
        _number("presence_penalty", self.presence_penalty, "in [-2, 2]", lambda x: -2 <= x <= 2)
        _number("frequency_penalty", self.frequency_penalty, "in [-2, 2]", lambda x: -2 <= x <= 2)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        _integer("n", self.n, "at least 1", lambda x: x >= 1)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 at temperature 0, which always gives the same, got {self.n}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), "at least 0", lambda x: x >= 0)
        if self.seed is not None:
            _integer("seed", self.seed, "from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "at least 1", lambda x: x >= 1)
        _integer("min_tokens", self.min_tokens, "at least 0", lambda x: x >= 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold texts of at least 1 character, got {text!r}")
            if any("\ud800" <= char <= "\udfff" for char in text):  # such as a byte that is not UTF-8 on a command line
                raise ValueError(f"stop must hold texts that UTF-8 can hold; no output could contain {text!r}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, "token ids of at least 0", lambda x: x >= 0)


def _as_tuple(value: object, single: type) -> tuple[object, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, single) or not isinstance(value, Iterable) else tuple(value)


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must be a mapping of token ids to numbers, got {bias!r}")
    for token_id, value in bias.items():
        _integer("logit_bias", token_id, "of token ids of at least 0", lambda x: x >= 0)
        _number("logit_bias", value, "of finite numbers", lambda x: True)
    return _Bias((token_id, min(max(float(value), -100.0), 100.0)) for token_id, value in bias.items())


class _Bias(dict[int, float]):
    """A dict that nobody changes: SamplingParams can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _number(name: str, value: object, allowed: str, fits: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or not fits(value):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _integer(name: str, value: object, allowed: str, fits: Callable[[int], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not fits(value):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
