"""Every refusal and failure in OpenAI's shape, with OpenAI's status, and nothing in it that the client did not send."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import Response

LONGEST = 500
"""Characters of a message: it may quote what the client sent, which may be megabytes."""


class ApiError(HTTPException):  # FastAPI lets these through where it reads a body
    """What a client is told.

    Args:
        status: of the HTTP response.
        message: for people.
        param: the field of the request that is wrong.
        code: for programs, OpenAI's where it has one.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, "invalid_request_error")
        kind = "server_error" if self.status_code >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


class ClientGone(Exception):
    """There is nobody left to answer."""


def unavailable(message: str, seconds: int = 1) -> ApiError:
    """503: not now; clients of OpenAI try again after so many seconds."""
    return ApiError(503, message, code="service_unavailable", headers={"retry-after": str(seconds)})


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """A ValueError inside is the client's mistake."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error).removeprefix("prompt 0: "), param=param) from None


def dump(value: Any) -> bytes:
    """JSON as short as it gets."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, quoted from a request: UTF-8 can't hold it, JSON can
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Have the app answer all errors in this shape."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, AnyHTTPException)
        code, message = None, str(error.detail)
        if error.status_code == 404:
            code, message = "unknown_url", f"unknown request URL: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    async def nobody(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nginx's number; it goes nowhere

    async def unforeseen(_: Request, error: Exception) -> Response:
        # The server logs the traceback; the client learns nothing of our insides.
        return ApiError(500, "the server had an error while it worked on this request").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientGone, nobody)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(AnyHTTPException, http_error)
    app.add_exception_handler(Exception, unforeseen)


def _of_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    if first["type"] == "model_attributes_type":
        return ApiError(400, "the body must be a JSON object, sent with content-type: application/json")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, message if param is None else f"{param}: {message}", param=param)
