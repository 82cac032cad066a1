"""Reading a JSON body: what Python's reader lets through and JSON or a server doesn't is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError

DEEPEST = 64
"""Lists and objects inside one another: schemas of tools need ten or so; readers that recurse stay far from harm."""


def read_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ApiError: 400; it is none, or nests too deep, or holds NaN or a number that no float can hold.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ApiError(400, f"the body nests deeper than {DEEPEST} levels") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(400, f"the body holds a number that is out of range: {error}") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [child for item in level if isinstance(item, list | dict) for child in _children(item)]
        if not level:
            return value
    raise ApiError(400, f"the body nests deeper than {DEEPEST} levels")


def _children(item: list[Any] | dict[str, Any]) -> Any:
    return item.values() if isinstance(item, dict) else item


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
