"""/v1/completions: plain text goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from llama_infer.request import Request

from .encoding import encode_text, make_request, usage
from .errors import ApiError, json_response, refusing
from .generation import Generation
from .logprobs import CompletionLogprobs
from .request_log import log_request
from .schemas_completions import CompletionRequest
from .service import Service
from .streaming import EventStream, TextTemplate, event


async def complete(service: Service, asked: CompletionRequest, receive: Receive) -> Response:
    """Answer one request."""
    service.admit(len(asked.prompts()) * (asked.n or 1))
    service.check_model(asked.model)
    if asked.best_of not in (None, asked.n or 1):
        raise ApiError(400, f"best_of must be n, {asked.n or 1}, got {asked.best_of}", param="best_of")
    with refusing():
        settings = asked.sampling()
        if asked.logprobs is not None:
            settings["logprobs"] = asked.logprobs
            if asked.echo:
                settings["prompt_logprobs"] = asked.logprobs
        params = service.llm.sampling_params(**settings)
    requests = []
    for prompt in asked.prompts():
        text = prompt if isinstance(prompt, str) else None
        ids = await encode_text(service, prompt) if isinstance(prompt, str) else prompt
        requests.append(await make_request(service, text, ids, params, "prompt", streaming=bool(asked.stream)))
    generation = Generation(service, requests, receive)
    answer = _Answer(service, asked, generation)
    if asked.stream:
        return EventStream(generation, answer.events())
    async with generation:
        await generation.finish()
        return json_response(answer.whole())


class _Answer:
    def __init__(self, service: Service, asked: CompletionRequest, generation: Generation) -> None:
        self.service = service
        self.asked = asked
        self.generation = generation
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.settings.name,
        }
        self.of_sample = [request for request in generation.requests for _ in request.sequences]

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, (request, sample) in enumerate(zip(self.of_sample, self.generation.sequences, strict=True)):
            text, entries = self._echo(request)
            if sample.logprobs is not None:
                entries += zip(sample.token_ids, sample.logprobs, strict=True)
            choices.append(
                {
                    "index": index,
                    "text": text + sample.text,
                    "logprobs": self._writer().of(entries) if self.asked.logprobs is not None else None,
                    "finish_reason": sample.finish_reason,
                }
            )
        self._log()
        return {**self.head, "choices": choices, "usage": usage(self.generation.requests)}

    async def events(self) -> AsyncIterator[bytes]:
        tail: dict[str, Any] = {"usage": None} if self.asked.include_usage else {}

        def chunk(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            return {**self.head, "choices": [choice], **tail}

        count = len(self.generation.sequences)
        plain = [TextTemplate(chunk(index, TextTemplate.HOLE, None, None)) for index in range(count)]
        writers = [self._writer() for _ in range(count)]
        begun = [not self.asked.echo] * count
        async for news in self.generation.chunks():
            out = []
            for index, piece, entry in news:
                if not begun[index]:
                    begun[index] = True
                    text, entries = self._echo(self.of_sample[index])
                    logprobs = writers[index].of(entries) if self.asked.logprobs is not None else None
                    out.append(event(chunk(index, text, logprobs, None)))
                if entry is not None:
                    logprobs = writers[index].of([(piece.token_id, entry)])
                    out.append(event(chunk(index, piece.text, logprobs, piece.finish_reason)))
                elif piece.finish_reason is not None:
                    out.append(event(chunk(index, piece.text, None, piece.finish_reason)))
                elif piece.text:
                    out.append(plain[index](piece.text))
            if out:
                yield b"".join(out)
        self._log()
        if self.asked.include_usage:
            yield event({**self.head, "choices": [], "usage": usage(self.generation.requests)})

    def _writer(self) -> CompletionLogprobs:
        return CompletionLogprobs(self.asked.logprobs or 0)

    def _echo(self, request: Request) -> tuple[str, list[tuple[int, Any]]]:
        """What the answer begins with: text, and log-probabilities."""
        if not self.asked.echo:
            return "", []
        text = request.prompt if request.prompt is not None else self.service.tokenizer.decode(request.prompt_ids)
        if self.asked.logprobs is None:
            return text, []
        known = request.sequences[0].prompt_logprobs
        return text, [(token_id, known.get(at)) for at, token_id in enumerate(request.prompt_ids)]

    def _log(self) -> None:
        log_request(self.service, self.id, [_shown(r) for r in self.generation.requests], self.generation)


def _shown(request: Request) -> str | list[int]:
    return request.prompt_ids if request.prompt is None else request.prompt
