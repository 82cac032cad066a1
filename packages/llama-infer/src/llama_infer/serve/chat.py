"""/v1/chat/completions: the assistant's next turn."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from .chat_input import output_form, template_messages, template_tools
from .encoding import encode_chat, make_request, usage
from .errors import json_response, refusing
from .generation import Entry, Generation
from .logprobs import for_chat
from .request_log import log_request
from .schemas_chat import ChatRequest
from .service import Service
from .streaming import EventStream, TextTemplate, event
from .tools import Call, ToolStream, parse


async def chat(service: Service, asked: ChatRequest, receive: Receive) -> Response:
    """Answer one request."""
    service.admit(asked.n or 1)
    service.check_model(asked.model)
    messages = template_messages(asked)
    tools = template_tools(asked, service.tokenizer.chat_templates)
    form = output_form(asked)
    with refusing():
        settings = asked.sampling()
        if form is not None:
            settings["structured_outputs"] = form
        params = service.llm.sampling_params(**settings)
    ids = await encode_chat(service, messages, tools, asked.chat_template_kwargs or {})
    request = await make_request(service, None, ids, params, "messages", streaming=bool(asked.stream))
    generation = Generation(service, [request], receive)
    answer = _Answer(service, asked, generation, [tool["function"]["name"] for tool in tools or ()])
    if asked.stream:
        return EventStream(generation, answer.events())
    async with generation:
        await generation.finish()
        return json_response(answer.whole())


class _Answer:
    def __init__(self, service: Service, asked: ChatRequest, generation: Generation, tools: list[str]) -> None:
        self.service = service
        self.asked = asked
        self.generation = generation
        self.tools = tools
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, sample in enumerate(self.generation.sequences):
            text, calls = parse(sample.text, self.tools) if self.tools else (sample.text, [])
            calls = self._allowed(calls)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text or None
                message["tool_calls"] = [call.as_dict() for call in calls]
            logprobs = None if sample.logprobs is None else self._logprobs(sample.logprobs)
            reason = _reason(sample.finish_reason, calls)
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        self._log()
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(self.generation.requests)}

    async def events(self) -> AsyncIterator[bytes]:
        count = len(self.generation.sequences)
        plain = [TextTemplate(self._chunk(index, {"content": TextTemplate.HOLE})) for index in range(count)]
        readers = [ToolStream(self.tools) for _ in range(count)] if self.tools else None
        begin = {"role": "assistant", "content": "", "refusal": None}
        yield b"".join(event(self._chunk(index, begin)) for index in range(count))
        async for news in self.generation.chunks():
            out = []
            for index, piece, entry in news:
                text = piece.text if readers is None else readers[index].push(piece.text)
                if entry is not None:
                    out.append(event(self._chunk(index, {"content": text}, entry)))
                elif text:
                    out.append(plain[index](text))
                if piece.finish_reason is not None:
                    calls: list[Call] = []
                    if readers is not None:
                        rest, calls = readers[index].finish()
                        calls = self._allowed(calls)
                        if rest:
                            out.append(plain[index](rest))
                        out += [
                            event(self._chunk(index, {"tool_calls": [{"index": at, **call.as_dict()}]}))
                            for at, call in enumerate(calls)
                        ]
                    reason = _reason(piece.finish_reason, calls)
                    out.append(event(self._chunk(index, {}, reason=reason)))
            if out:
                yield b"".join(out)
        self._log()
        if self.asked.include_usage:
            head = self._head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": usage(self.generation.requests)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.settings.name}

    def _chunk(
        self, index: int, delta: dict[str, Any], entry: Entry = None, reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = None if entry is None else self._logprobs([entry])
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        tail = {"usage": None} if self.asked.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **tail}

    def _logprobs(self, entries: list[Any]) -> dict[str, Any]:
        wanted = self.asked.top_logprobs or 0
        return {"content": [for_chat(entry, self.service.tokenizer, wanted) for entry in entries], "refusal": None}

    def _allowed(self, calls: list[Call]) -> list[Call]:
        return calls[:1] if self.asked.parallel_tool_calls is False else calls

    def _log(self) -> None:
        prompts = [[message.model_dump(exclude_none=True) for message in self.asked.messages]]
        log_request(self.service, self.id, prompts, self.generation)


def _reason(reason: str | None, calls: list[Call]) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason
