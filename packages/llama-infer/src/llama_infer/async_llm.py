"""`AsyncLLM`: requests that come and go while others run, for servers and other asyncio programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from typing import Any

from .llm import LLM
from .outputs import RequestOutput, StreamChunk
from .request import Message, Prompt, Request
from .sampling_params import SamplingParams


class AsyncLLM:
    """An `LLM` behind coroutines. One thread of its own takes the engine's steps, while there is anything to do.

    >>> async with AsyncLLM() as llm:
    ...     output = await llm.generate("Once upon a time")

    Args:
        llm: an LLM that you hold; else the arguments make one.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Any) -> None:
        self.llm = LLM(**arguments) if llm is None else llm
        self._work = threading.Condition()
        self._open = True
        self._running: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._steps, name="llama-infer", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Continue one prompt or chat. Cancelling the task frees its memory at once.

        Raises:
            ValueError: as `LLM.generate`.
        """
        request = self._request(prompt, params, streaming=False)
        async for _ in self._progress(request):
            pass
        output = request.output()
        if output.error is not None:
            raise ValueError(f"prompt 0: {output.error}")
        return output

    async def stream(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None
    ) -> AsyncIterator[StreamChunk]:
        """As `LLM.stream`; ending the iteration early frees its memory."""
        request = self._request(prompt, params, streaming=True)
        if request.params.n != 1:
            raise ValueError(f"a stream is one continuation; n must be 1, got {request.params.n}")
        sequence = request.sequences[0]
        assert sequence.chunks is not None
        async for _ in self._progress(request):
            while sequence.chunks:
                yield sequence.chunks.popleft()
        if sequence.error is not None:
            raise ValueError(f"prompt 0: {sequence.error}")

    def close(self) -> None:
        """End the thread; what still runs is aborted."""
        with self._work:
            self._open = False
            self._work.notify()
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _request(self, prompt: Prompt | Seq[Message], params: SamplingParams | None, streaming: bool) -> Request:
        text, ids = self.llm.requests.encode(prompt)
        return self.llm.requests.request(text, ids, params or self.llm.default_params, streaming=streaming)

    async def _progress(self, request: Request) -> AsyncIterator[None]:
        """Yields whenever the request may have come further, and after its end."""
        event = asyncio.Event()
        with self._work:
            if not self._open:
                raise RuntimeError("this AsyncLLM is closed")
            for sequence in request.sequences:
                self.llm.engine.add(sequence)
            self._running[id(request)] = (asyncio.get_running_loop(), event)
            self._work.notify()
        try:
            while any(sequence.finish_reason is None for sequence in request.sequences):
                await event.wait()
                event.clear()
                if self._failure is not None:
                    raise RuntimeError("the engine has failed") from self._failure
                yield
            yield
        finally:
            with self._work:
                del self._running[id(request)]
            for sequence in request.sequences:
                self.llm.engine.abort(sequence)

    def _steps(self) -> None:
        while True:
            with self._work:
                while self._open and not self._running:
                    self._work.wait()
                if not self._open:
                    self._tell()
                    return
            try:
                self.llm.engine.step()
            except BaseException as error:  # every waiting request must hear of it
                self._failure = error
            with self._work:
                self._tell()
                if self._failure is not None:
                    self._open = False

    def _tell(self) -> None:
        for loop, event in self._running.values():
            loop.call_soon_threadsafe(event.set)
