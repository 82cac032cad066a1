"""Connections on which nothing moves are closed: who sends a request a byte at a time, or never reads its answer.

uvicorn has a time-out for idle connections only. These two are of the transport, below HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's, with an end to its patience.

    Args:
        request_timeout: seconds from a connection's, or a request's, first moment until the request is there.
        write_timeout: seconds that a full buffer waits for its reader.
    """

    def __init__(self, *, request_timeout: float, write_timeout: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._request = _Timer(self.loop, request_timeout)
        self._write = _Timer(self.loop, write_timeout)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request.start(transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._request.stop()
        self._write.stop()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request.start(self.transport.abort)

    def on_message_complete(self) -> None:
        self._request.stop()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write.start(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write.stop()


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    def start(self, then: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(self._seconds, then)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
