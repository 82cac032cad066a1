"""`AsyncLLM`: requests that come and go while others run, for servers and other asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from typing import Any

from .llm import LLM
from .outputs import RequestOutput, StreamChunk
from .request import Message, Prompt, Request
from .sampling_params import SamplingParams


class EngineFailure(RuntimeError):
    """A step of the engine has failed; every request that was under way hears of it."""


class Running:
    """Requests that were handed to the engine's thread together.

    The thread appends chunks to `sequence.chunks` and waits for nobody who reads them: a slow reader only finds more.
    """

    def __init__(self, owner: AsyncLLM, requests: Seq[Request]) -> None:
        self.requests = requests
        self.sequences = [sequence for request in requests for sequence in request.sequences]
        self.done = False
        """All have ended, and their last chunks are there."""
        self.cancelled = False
        self.failure: BaseException | None = None
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._told = False  # the loop has been told and has not looked yet; no need to tell it again

    async def news(self) -> bool:
        """Waits until there is something new to read; False when nothing will follow what is there now.

        Raises:
            EngineFailure: the engine's thread has failed or was closed.
        """
        await self._event.wait()
        self._event.clear()
        self._told = False  # before anything is read: what comes later is told anew
        if self.failure is not None:
            raise EngineFailure(str(self.failure)) from self.failure
        return not (self.done or self.cancelled)

    def cancel(self) -> None:
        """End them before the engine's next step; their memory is free then. Waits for nothing."""
        if not (self.done or self.cancelled):
            self.cancelled = True
            self._owner._drop(self)
            self._event.set()


class AsyncLLM:
    """An `LLM` behind coroutines. One thread of its own takes the engine's steps, while there is anything to do.

    >>> async with AsyncLLM() as llm:
    ...     output = await llm.generate("Once upon a time")

    No coroutine waits for a step to end: requests and cancellations are left for the thread, which takes them up
    between two steps.

    Args:
        llm: an LLM that you hold; else the arguments make one.

    Attributes:
        failure: what ended the engine's thread, if it has failed; `restart` begins anew.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Any) -> None:
        self.llm = LLM(**arguments) if llm is None else llm
        self.failure: BaseException | None = None
        self._work = threading.Condition()
        self._open = True
        self._arrived: list[Running] = []
        self._dropped: list[Running] = []
        self._current: list[Running] = []  # the thread's own
        self._thread = self._begin()

    async def generate(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Continue one prompt or chat. Cancelling the task frees its memory at once.

        Raises:
            ValueError: as `LLM.generate`.
        """
        request = self._request(prompt, params, streaming=False)
        running = self.start([request])
        try:
            while await running.news():
                pass
        finally:
            running.cancel()
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
        running = self.start([request])
        try:
            more = True
            while more:
                more = await running.news()
                while sequence.chunks:
                    yield sequence.chunks.popleft()
        finally:
            running.cancel()
        if sequence.error is not None:
            raise ValueError(f"prompt 0: {sequence.error}")

    def start(self, requests: Seq[Request]) -> Running:
        """Hand requests (of `llm.requests`) to the thread, from a coroutine of the loop that will read them.

        Raises:
            EngineFailure: the engine has failed before.
        """
        running = Running(self, requests)
        with self._work:
            if self.failure is not None:
                raise EngineFailure("the engine has failed") from self.failure
            if not self._open:
                raise RuntimeError("this AsyncLLM is closed")
            self._arrived.append(running)
            self._work.notify()
        return running

    def restart(self) -> None:
        """After a failure: a new engine with an empty cache (`LLM.restart`), and a thread for it. Takes its time.

        Raises:
            Exception: whatever the failure has left behind, e.g. a GPU that answers no longer.
        """
        self._thread.join()
        if self.failure is not None:
            self.failure.__traceback__ = None  # its frames hold the old engine, and so the memory of its cache
        self.llm.restart()
        with self._work:
            self.failure = None
            self._thread = self._begin()

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

    def _drop(self, running: Running) -> None:
        with self._work:
            self._dropped.append(running)
            self._work.notify()

    # --- the thread

    def _begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._steps, name="llama-infer", daemon=True)
        thread.start()
        return thread

    def _steps(self) -> None:
        engine = self.llm.engine
        while True:
            with self._work:
                while self._open and not (self._arrived or self._dropped or self._current):
                    self._work.wait()
                arrived, self._arrived = self._arrived, []
                dropped, self._dropped = self._dropped, []
                self._current += arrived
            try:
                for running in arrived:
                    for sequence in running.sequences:
                        engine.add(sequence)
                for running in dropped if self._open else self._current:
                    for sequence in running.sequences:
                        engine.abort(sequence)
                if not self._open:
                    return self._end(RuntimeError("this AsyncLLM is closed"))
                if any(not running.cancelled for running in self._current):
                    engine.step()
            except BaseException as error:  # every waiting request must hear of it
                return self._end(EngineFailure(f"the engine has failed: {type(error).__name__}"), error)
            ended = [running for running in self._current if all(s.has_ended() for s in running.sequences)]
            for running in ended:
                running.done = True
            self._tell(self._current)
            self._current = [running for running in self._current if not running.done]

    def _end(self, told: RuntimeError, failure: BaseException | None = None) -> None:
        told.__cause__ = failure
        with self._work:
            self.failure = failure
            left = [*self._current, *self._arrived]
            self._current, self._arrived, self._dropped = [], [], []
        for running in left:
            running.failure = told
        self._tell(left)

    @staticmethod
    def _tell(candidates: list[Running]) -> None:
        """Wake those that have something to read: one message to each loop, however many they are."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Running]] = {}
        for running in candidates:
            if running._told:
                continue
            if running.done or running.failure is not None or any(s.chunks for s in running.sequences):
                running._told = True
                by_loop.setdefault(running._loop, []).append(running)
        for loop, several in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody reads any more
                loop.call_soon_threadsafe(_wake, several)


def _wake(several: list[Running]) -> None:
    for running in several:
        running._event.set()
