"""The application: which path leads where, and the description of all that at /openapi.json."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from .auth import KeyCheck
from .chat import chat
from .completions import complete
from .errors import ApiError, add_handlers, json_response
from .limits import BodyLimit
from .metrics import CONTENT_TYPE
from .page import Page
from .requests import JsonRoute
from .schemas import ErrorResponse, ModelCard, ModelList
from .schemas_chat import ChatRequest, ChatResponse
from .schemas_completions import CompletionRequest, CompletionResponse
from .service import Service
from .tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
)

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; 429 says when to come back."},
    "5XX": {"model": ErrorResponse, "description": "The engine has failed, or the server is shutting down."},
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Or events, for a stream."}
}


def _version() -> str:
    try:
        return version("llama-infer")
    except PackageNotFoundError:  # run from a source tree that nobody has installed
        return "unknown"


def build_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(
        title="llama-infer serve",
        version=_version(),
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.include_router(_completions(service), responses=_ERRORS)
    app.include_router(_about(service), responses=_ERRORS)
    add_handlers(app)
    app.add_middleware(BodyLimit, most=service.settings.max_body)
    if service.settings.api_key is not None:
        app.add_middleware(KeyCheck, key=service.settings.api_key)
    return app


def _completions(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=ChatResponse, responses=_STREAM, operation_id="chat")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """The assistant's next turn of a chat."""
        return await chat(service, asked, request.receive)

    @router.post("/v1/completions", response_model=CompletionResponse, responses=_STREAM, operation_id="complete")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Plain text, continued."""
        return await complete(service, asked, request.receive)

    @router.post("/tokenize", response_model=TokenizeResponse, operation_id="tokenize")
    async def tokenize_text(asked: TokenizeRequest) -> Response:
        """Token ids of a text or a chat."""
        return await tokenize(service, asked)

    @router.post("/detokenize", response_model=DetokenizeResponse, operation_id="detokenize")
    async def detokenize_ids(asked: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return await detokenize(service, asked)

    return router


def _about(service: Service) -> APIRouter:
    router = APIRouter()
    page = Page(service.settings.name)

    def card() -> dict[str, Any]:
        own = {"id": service.settings.name, "object": "model", "created": service.created}
        return {**own, "owned_by": "llama-infer", "max_model_len": service.llm.max_model_len}

    @router.get("/v1/models", response_model=ModelList, operation_id="models")
    async def models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}", response_model=ModelCard, operation_id="model")
    async def model(name: str) -> Response:
        """The same, by its name."""
        service.check_model(name)
        return json_response(card())

    @router.get("/health", operation_id="health")
    async def health() -> dict[str, str]:
        """200 while this process can be of use; after 503 it can't, and should be replaced."""
        if service.state == "failed":
            raise ApiError(503, "the engine has failed", code="service_unavailable")
        return {"status": service.state}

    @router.get("/ready", operation_id="ready")
    async def ready() -> dict[str, str]:
        """200 while requests are taken."""
        service.check()
        return {"status": service.state}

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @router.get("/metrics", responses=text, response_class=Response, operation_id="metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE})

    @router.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return page.response()

    return router
