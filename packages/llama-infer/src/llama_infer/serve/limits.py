"""How much the server takes on: requests in the queue, and bytes in a body."""

from __future__ import annotations

import math
import time
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

REMEMBERED = 64
"""Ends of sequences from which the time until there is room is guessed."""


class Admission:
    """Counts sequences that are queued or running, and turns away what is too much.

    Args:
        limit: the most of them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def check(self, count: int) -> None:
        """Raises ApiError: 400 for what never fits, 429 for what doesn't fit now."""
        if count > self.limit:
            raise ApiError(400, f"the request asks for {count} continuations; at most {self.limit} fit at once")
        if self.inside + count > self.limit:
            message = f"{self.inside} of {self.limit} places in the queue are taken; try again later"
            headers = {"retry-after": str(self.seconds_until_room(count))}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    def enter(self, count: int) -> None:
        """Take so many places; raises as `check`."""
        self.check(count)
        self.inside += count

    def leave(self, count: int) -> None:
        self.inside -= count
        self._ends.extend([time.monotonic()] * min(count, REMEMBERED))
        assert self.inside >= 0

    def seconds_until_room(self, count: int) -> int:
        """At the pace of late, from 1 to 60."""
        if len(self._ends) < 2:
            return 1
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return max(1, min(60, math.ceil(each * count)))


class BodyLimit:
    """ASGI middleware: a body of more bytes is refused with 413, as soon as that is known."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self.most:
            return await self._refusal().response()(scope, receive, send)
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.most:
                    raise self._refusal()
            return message

        return await self.app(scope, counting, send)

    def _refusal(self) -> ApiError:
        headers = {"connection": "close"}  # what follows of the body is not read
        return ApiError(413, f"the body is larger than {self.most:,} bytes", code="request_too_large", headers=headers)
