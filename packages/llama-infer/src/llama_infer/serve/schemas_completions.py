"""/v1/completions: the request and its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from .schemas import SamplingFields, Usage

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _check_prompt(value: Any) -> Any:
    # By hand: of a list of a million wrong things, pydantic would collect as many errors for each kind of prompt.
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, list) and value and all(_is_ids(item) for item in value):
        return value
    raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is wanted, and none empty")


class CompletionRequest(SamplingFields):
    prompt: Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema(_PROMPT)]
    echo: bool | None = Field(None, description="Begin the text with the prompt, and its log-probabilities.")
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128, description="Only the same as n.")
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or _is_ids(prompt) else list(prompt)


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
