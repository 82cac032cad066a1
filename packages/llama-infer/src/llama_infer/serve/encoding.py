"""Prompts to token ids, and requests for the engine; what takes long is done beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llama_infer.request import Request
from llama_infer.sampling_params import SamplingParams

from .errors import ApiError, refusing
from .service import Service

T = TypeVar("T")
SHORT = 4000
"""Characters that are encoded where they are, in less time than a thread takes to begin."""


async def beside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, from another thread where it is large."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


async def encode_text(service: Service, text: str, add_bos: bool = True) -> list[int]:
    with refusing("prompt"):
        return await beside(len(text), lambda: service.tokenizer.encode(text, add_bos=add_bos))


async def encode_chat(
    service: Service, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
) -> list[int]:
    if not service.tokenizer.chat_templates:
        raise ApiError(400, "the model has no chat template; /v1/completions continues plain text", param="messages")
    for name in variables.keys() & {"messages", "tools", "add_generation_prompt", "chat_template"}:
        raise ApiError(400, f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    size = sum(len(str(message.get("content") or "")) for message in messages) + 1000 * len(tools or ())

    def work() -> list[int]:
        return service.tokenizer.encode_chat(messages, tools=tools, **variables)

    with refusing("messages"):
        return await beside(size, work)


async def make_request(
    service: Service, text: str | None, ids: list[int], params: SamplingParams, param: str, streaming: bool
) -> Request:
    """A request for the engine.

    Raises:
        ApiError: 400; the prompt is too long, or holds an unknown id, or a setting doesn't fit the model.
    """
    longest = service.llm.max_model_len
    if len(ids) >= longest:
        message = (
            f"this model's context is {longest} tokens, and the request has {len(ids)}; "
            f"at most {longest - 1} leave room for a new one"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    with refusing():
        service.llm.requests.encode(ids)  # checks them
        # Compiling a grammar takes its time.
        size = SHORT + 1 if params.structured_outputs is not None else 0
        return await beside(size, lambda: service.llm.requests.request(text, ids, params, streaming=streaming))


def usage(requests: Sequence[Request]) -> dict[str, Any]:
    """Tokens of prompts, and of all their continuations."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    completion = sum(len(sequence.token_ids) for request in requests for sequence in request.sequences)
    cached = sum(request.sequences[0].cached or 0 for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
