"""What all endpoints share: the engine, its name, how much it takes on, and in which state it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llama_core import Tokenizer
from llama_infer.async_llm import AsyncLLM
from llama_infer.llm import LLM

from .errors import ApiError, unavailable
from .limits import Admission
from .metrics import Metrics

if TYPE_CHECKING:
    from .generation import Generation

log = logging.getLogger("llama_infer.serve")
State = Literal["ready", "restarting", "draining", "failed"]
RESTARTS = 3
"""Engines in a row that may fail before one has finished a request; after them the process should be replaced."""


@dataclass(frozen=True)
class Settings:
    """Of a server.

    Args:
        name: of the model, to clients.
        max_queue: sequences that wait beside those that run.
        max_body: bytes of a request.
        api_key: None: everybody may come.
        log_prompts: whether prompts and answers are logged.
        request_timeout: seconds until a request must have arrived.
        write_timeout: seconds that a reader may stand still.
        drain_timeout: seconds that running requests have after SIGTERM.
    """

    name: str
    max_queue: int = 512
    max_body: int = 4 * 2**20
    api_key: str | None = None
    log_requests: bool = False
    log_prompts: bool = False
    request_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("the model's name must have at least 1 character")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("the API key must be printable ASCII of at least 1 character")  # it travels in a header
        for name, least in (("max_queue", 0), ("max_body", 1024)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("request_timeout", "write_timeout", "drain_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")


class Service:
    """The engine as endpoints see it.

    Args:
        llm: with a tokenizer.
        settings: of the server.
        stop: ends the server, when there is no hope.
    """

    def __init__(self, llm: LLM, settings: Settings, stop: Callable[[], None] | None = None) -> None:
        if llm.tokenizer is None:
            raise ValueError("a server needs a tokenizer, and this LLM has none; give LLM(model, tokenizer=…)")
        self.tokenizer: Tokenizer = llm.tokenizer
        self.engine = AsyncLLM(llm)
        self.settings = settings
        self.created = int(time.time())
        self.state: State = "ready"
        self.admission = Admission(llm.engine.scheduler.max_num_seqs + settings.max_queue)
        self.metrics = Metrics(lambda: getattr(llm, "engine", None))
        self.live: set[Generation] = set()
        self.stop = stop or (lambda: None)
        self._failures = 0
        self._restarting: asyncio.Task[None] | None = None

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    def admit(self, count: int) -> None:
        """Raises ApiError where so many sequences could not be taken now: before any work is put into them."""
        self.check()
        try:
            self.admission.check(count)
        except ApiError:
            self.metrics.refused.inc()
            raise

    def check(self) -> None:
        """Raises ApiError, 503, unless requests are taken."""
        if self.state == "restarting":
            raise unavailable("the engine has failed and is being restarted", seconds=2)
        if self.state == "failed":
            raise unavailable("the engine has failed", seconds=30)
        if self.state == "draining":
            raise unavailable("the server is shutting down", seconds=5)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            message = f"the model {name[:100]!r} does not exist; there is {self.settings.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # --- the engine fails

    def engine_failed(self) -> None:
        """Somebody has met the failure: replace the engine, unless that is under way."""
        if self.state == "ready":
            self.state = "restarting"
            failure = self.engine.failure
            log.error("the engine has failed: %s", type(failure).__name__, exc_info=failure)
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def engine_works(self) -> None:
        self._failures = 0

    async def _restart(self) -> None:
        self._failures += 1
        if self._failures <= RESTARTS:
            try:
                await asyncio.to_thread(self.engine.restart)
            except Exception as error:
                log.error("no new engine could be made: %s", type(error).__name__, exc_info=error)
            else:
                log.warning("a new engine replaces the one that failed")
                self.metrics.restarts.inc()
                if self.state == "restarting":
                    self.state = "ready"
                return
        log.error("giving up, so that whoever started this process can start another")
        self.state = "failed"
        self.stop()

    # --- the end

    def drain(self) -> None:
        """Take no more requests; those that are under way go on."""
        if self.state in ("ready", "restarting"):
            self.state = "draining"

    def abandon(self) -> None:
        """End those that are still under way; their clients are told."""
        for generation in list(self.live):
            generation.give_up(unavailable("the server is shutting down", seconds=5))
