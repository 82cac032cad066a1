"""/v1/chat/completions: the request and its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .schemas import FailFast, Open, SamplingFields, Strict, Usage

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Open):
    name: str = Field(max_length=1000)
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Open):
    id: str = Field(max_length=1000)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Open):
    """One turn. Content is text, or parts that are text: there are no images or sounds."""

    model_config = ConfigDict(title="ChatMessage")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FailFast()] | None = None
    name: str | None = Field(None, max_length=1000)
    tool_calls: Annotated[list[ToolCall], FailFast()] | None = None
    tool_call_id: str | None = Field(None, max_length=1000)
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not to {self.role!r}")
        return self


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: Name


class ToolChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest(cls, data: Any) -> Any:
        return data  # `schema` is a method of pydantic's; the alias is told by pydantic


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is wanted with the type 'json_schema', and with no other")
        return self


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FailFast(), Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call is given back.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    # taken and of no effect: they say nothing about what is generated here
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs belong to logprobs; set logprobs to true")
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                raise ValueError(f"tool_choice names {name!r}, which is not among the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', and there are no tools")
        return self

    def sampling(self) -> dict[str, Any]:
        found = super().sampling()
        if self.max_completion_tokens is not None:
            found["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            found["logprobs"] = self.top_logprobs or 0
        return found


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None


class AnswerFunction(BaseModel):
    name: str
    arguments: str


class AnswerCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerCall] = []


class ChatChoice(BaseModel):
    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
