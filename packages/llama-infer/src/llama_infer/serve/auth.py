"""The key: who doesn't have it gets at nothing but whether the server is alive, and the page that asks for it."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json"})
"""They hold nothing of what goes through the server."""


class KeyCheck:
    """ASGI middleware: `Authorization: Bearer KEY`, compared in a time that says nothing about the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._key = key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            header = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, given = header.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                told = "no API key; send the header Authorization: Bearer KEY" if not header else "wrong API key"
                error = ApiError(401, told, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
                return await error.response()(scope, receive, send)
        return await self.app(scope, receive, send)
