"""What requests and answers have in common. Field names, ranges and shapes are OpenAI's; a few more are vLLM's.

Types are strict (no "5" for 5). A field that nobody knows is an error that names the nearest: a setting that does
nothing would be worse.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic import FailFast as _FailFast

from llama_infer.sampling_params import SamplingParams


class FailFast(_FailFast):
    """The first wrong item of a list is enough to say no: a list may have a million."""

    def __hash__(self) -> int:  # pydantic's has none, which unions ask for
        return 0


MOST = 128
"""Continuations of a prompt, as at OpenAI."""

Text = Annotated[str, Field(max_length=1000)]
Stop = Annotated[str, Field(min_length=1, max_length=500)]  # each token's text is compared with all of them
Stops = Annotated[list[Stop], FailFast(), Field(max_length=16)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data.keys() - cls.model_fields.keys():
                near = difflib.get_close_matches(str(name)[:60], cls.model_fields, n=1)
                also = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"there is no field {str(name)[:60]!r}{also}")
        return data


class Open(BaseModel):
    """Of what clients send back as they got it, with fields of their own (`parsed`, `annotations`) that say nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    """A last chunk before [DONE] that holds the usage of all."""
    include_obfuscation: bool | None = None
    """Taken and of no effect: nothing is added to the chunks."""


class SamplingFields(Strict):
    """Settings of both kinds of completion. null is the same as leaving a field out."""

    model: Text | None = Field(None, description="A name from /v1/models; the only one if left out.")
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = Field(
        None, description="By token id.", json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
    )
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    n: int | None = Field(None, ge=1, le=MOST)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, gt=0, le=1)
    user: Text | None = Field(None, description="Taken and of no effect.")
    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repetition_penalty: Finite | None = Field(None, gt=0, le=2)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], FailFast()] | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="json, json_object, regex, choice or grammar: the form of the output."
    )

    def sampling(self) -> dict[str, Any]:
        """What is set, by names of SamplingParams.

        Raises:
            ValueError: a token id of logit_bias that is none.
        """
        names = SamplingParams.__dataclass_fields__.keys() & SamplingFields.model_fields.keys()
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            found["seed"] = self.seed % 2**63  # OpenAI's may be below 0
        if self.logit_bias is not None:
            found["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return found

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to a stream; set stream to true")
        return self


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ValueError(f"logit_bias must have token ids as keys, got {key[:20]!r}")
    return int(key)


# --- answers: for the description at /openapi.json; what is sent is built as plain dicts


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
