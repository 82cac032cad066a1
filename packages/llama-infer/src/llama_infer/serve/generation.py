"""The continuations that one HTTP request asked for, on their way: admission, reading, cancelling, counting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive

from llama_infer.async_llm import EngineFailure
from llama_infer.outputs import Logprob, StreamChunk
from llama_infer.request import Request

from .errors import ApiError, ClientGone, unavailable
from .service import Service, log

Entry = dict[int, Logprob] | None
"""Log-probabilities of one token, where they were asked for."""


class Generation:
    """Runs requests; use it in `async with`, which ends what still runs.

    Args:
        service: of the server.
        requests: made with `streaming=True` if `chunks` is to be read.
        receive: of the HTTP request; the client's going away ends everything.

    Raises:
        ApiError: the queue is full, or the engine has failed.
    """

    def __init__(self, service: Service, requests: Sequence[Request], receive: Receive) -> None:
        service.check()
        self.service = service
        self.requests = requests
        self.sequences = [sequence for request in requests for sequence in request.sequences]
        try:
            service.admission.enter(len(self.sequences))
        except ApiError:
            service.metrics.refused.inc()
            raise
        try:
            self.running = service.engine.start(requests)
        except RuntimeError:  # it has failed, or was closed
            service.admission.leave(len(self.sequences))
            service.engine_failed()
            raise unavailable("the engine has failed and is being restarted", seconds=2) from None
        service.live.add(self)
        self.begun = time.perf_counter()
        self._error: ApiError | None = None
        self._closed = False
        self._watch = asyncio.get_running_loop().create_task(self._until_gone(receive))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def finish(self) -> None:
        """Wait for all to end.

        Raises:
            ApiError: the engine has failed, or cannot go on with one of them.
            ClientGone: nobody waits for it any more.
        """
        while await self._news():
            pass
        self._raise_errors()

    async def chunks(self) -> AsyncIterator[list[tuple[int, StreamChunk, Entry]]]:
        """What is new, as often as there is something: (index of the sequence, chunk, log-probabilities).

        Raises:
            ApiError, ClientGone: as `finish`.
        """
        taken = [0] * len(self.sequences)
        last = [0.0] * len(self.sequences)
        observe = self.service.metrics.between.observe
        more = True
        while more:
            more = await self._news()
            found: list[tuple[int, StreamChunk, Entry]] = []
            now = time.perf_counter()
            for index, sequence in enumerate(self.sequences):
                assert sequence.chunks is not None
                count = len(sequence.chunks)
                for _ in range(count):
                    logprobs = sequence.logprobs
                    entry = None if logprobs is None else logprobs[taken[index]]
                    found.append((index, sequence.chunks.popleft(), entry))
                    if last[index]:
                        observe((now - last[index]) / count)
                    taken[index] += 1
                if count:
                    last[index] = now
            if found:
                yield found
        self._raise_errors()

    def give_up(self, error: ApiError) -> None:
        """End now, and tell the client why."""
        self._error = self._error or error
        self.running.cancel()

    def close(self) -> None:
        """End what still runs, and count."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        self.running.cancel()
        self.service.live.discard(self)
        self.service.admission.leave(len(self.sequences))
        for sequence in self.sequences:
            self.service.metrics.ended(sequence)
        if all(sequence.finish_reason in ("stop", "length") for sequence in self.sequences):
            self.service.engine_works()

    async def _news(self) -> bool:
        try:
            more = await self.running.news()
        except EngineFailure:
            self.service.engine_failed()
            raise self._error or unavailable("the engine has failed and is being restarted", seconds=2) from None
        if self.running.cancelled:
            if self._error is not None:
                raise self._error
            raise ClientGone
        return more

    def _raise_errors(self) -> None:
        for sequence in self.sequences:
            if sequence.error is not None:
                log.error("a request was ended: %s", sequence.error)
                raise ApiError(500, sequence.error, code="generation_failed")

    async def _until_gone(self, receive: Receive) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.running.cancel()
