"""Server-sent events. What is the same in every chunk of a stream is serialised once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, ClientGone, dump
from .generation import Generation

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
]


def event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


class TextTemplate:
    """Events that differ in one text: `template(text)` equals `event` of the value with the text in it.

    Args:
        value: holds `TextTemplate.HOLE` once, where the text goes.
    """

    HOLE = "\x00text\x00"

    def __init__(self, value: Any) -> None:
        hole = dump(self.HOLE)
        before, found, after = event(value).partition(hole)
        assert found
        assert hole not in after
        self._before, self._after = before, after

    def __call__(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode("ascii") + self._after


class EventStream(Response):
    """Events as they come; an error in their midst is the last of them.

    Args:
        generation: is ended with the response, whatever ends that.
        events: joined pieces of the stream, without [DONE].
    """

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self.generation = generation
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation, aclosing(self.events):  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            last = DONE
            try:
                async for data in self.events:
                    # Waits while the reader is slow; the engine doesn't: its chunks lie in the sequence meanwhile.
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                last = event(error.body())
            except ClientGone:
                return
            except asyncio.CancelledError:  # the server ends at once
                last = event(ApiError(503, "the server is shutting down").body())
            await send({"type": "http.response.body", "body": last, "more_body": False})
