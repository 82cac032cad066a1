"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from .chat_input import template_messages, template_tools
from .encoding import beside, encode_chat, encode_text
from .errors import json_response, refusing
from .schemas import FailFast, Strict
from .schemas_chat import ChatRequest, Message, Tool
from .service import Service


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], FailFast()] | None = None
    add_special_tokens: bool = True
    """Begin a text as the model wants it, with BOS if it has one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages are wanted")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


class DetokenizeResponse(BaseModel):
    prompt: str


async def tokenize(service: Service, asked: TokenizeRequest) -> Response:
    service.check_model(asked.model)
    if asked.messages is not None:
        chat = ChatRequest.model_construct(messages=asked.messages, tools=asked.tools, tool_choice=None)
        tools = template_tools(chat, service.tokenizer.chat_templates)
        ids = await encode_chat(service, template_messages(chat), tools, {})
    else:
        ids = await encode_text(service, asked.prompt or "", add_bos=asked.add_special_tokens)
    return json_response({"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids})


async def detokenize(service: Service, asked: DetokenizeRequest) -> Response:
    service.check_model(asked.model)

    def work() -> Any:
        return service.tokenizer.decode(asked.tokens, skip_special=False)

    with refusing("tokens"):
        return json_response({"prompt": await beside(len(asked.tokens), work)})
