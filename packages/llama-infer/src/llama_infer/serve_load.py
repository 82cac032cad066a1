"""Load on an OpenAI-compatible server, and what its clients see of it.

Closed loop: so many clients, each with its next request as soon as the last is answered. Open loop: requests come at a
rate, at random times (Poisson), whether or not the server keeps up; queues show in the open loop only.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Target:
    """A server, and what to ask it."""

    url: str
    model: str
    prompt_words: int
    max_tokens: int
    ignore_eos: bool = True
    api_key: str | None = None

    def body(self, dice: random.Random) -> dict[str, Any]:
        words = " ".join(dice.choice(WORDS) for _ in range(self.prompt_words))
        asked = {"model": self.model, "prompt": words, "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        extra = {"ignore_eos": True} if self.ignore_eos else {}
        return {**asked, "stream_options": {"include_usage": True}, **extra}

    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


@dataclass
class Answer:
    """Seconds on the clock of time.perf_counter."""

    sent: float
    events: list[float] = field(default_factory=list)
    """When pieces of text came."""
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def whole(self) -> float:
        return self.ended - self.sent

    @property
    def each(self) -> float | None:
        """Seconds a token, after the first."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Run:
    """One load, and its answers."""

    kind: str
    """"closed": so many clients; "open": so many requests a second."""
    load: float
    seconds: float
    answers: list[Answer]


async def ask(session: aiohttp.ClientSession, target: Target, body: dict[str, Any]) -> Answer:
    """One streamed completion; what goes wrong stands in its `error`."""
    answer = Answer(time.perf_counter())
    try:
        async with session.post(f"{target.url}/v1/completions", json=body, headers=target.headers()) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                answer.error = f"{response.status}: {text}"
            async for line in response.content:
                now = time.perf_counter()
                if answer.error is None and line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), now)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.events:
        answer.error = "no text came"
    return answer


def _take(answer: Answer, data: dict[str, Any], now: float) -> None:
    if "error" in data:
        answer.error = str(data["error"].get("message"))
    elif data.get("usage"):
        answer.tokens, answer.prompt_tokens = data["usage"]["completion_tokens"], data["usage"]["prompt_tokens"]
    elif data.get("choices") and data["choices"][0].get("text"):
        answer.events.append(now)


async def closed_loop(ask_one: Callable[[], Awaitable[Answer]], clients: int, requests: int) -> Run:
    """`requests` altogether, never more than `clients` at once."""
    left = iter(range(requests))
    answers: list[Answer] = []

    async def client() -> None:
        for _ in left:
            answers.append(await ask_one())

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(clients, requests))))
    return Run("closed", clients, time.perf_counter() - begun, answers)


async def open_loop(ask_one: Callable[[], Awaitable[Answer]], rate: float, requests: int, dice: random.Random) -> Run:
    """`requests` altogether, `rate` of them a second."""
    begun = due = time.perf_counter()
    tasks: list[asyncio.Future[Answer]] = []
    for _ in range(requests):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask_one()))
        due += dice.expovariate(rate)
    answers = await asyncio.gather(*tasks)
    return Run("open", rate, time.perf_counter() - begun, list(answers))


async def model_of(url: str, api_key: str | None) -> str:
    """The first model that the server has.

    Raises:
        ValueError: there is no such server.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"{url}/v1/models answers {response.status}: {(await response.text())[:200]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ValueError(f"no server at {url}: {error}") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{url}/v1/models is no list of models") from None


async def run_loads(target: Target, *, clients: list[int], rates: list[float], requests: int, seed: int) -> list[Run]:
    """Each load after the other, on one pool of connections; a request before them wakes the server up."""
    dice = random.Random(seed)
    runs = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def ask_one() -> Answer:
            return await ask(session, target, target.body(dice))

        first = await ask_one()
        if first.error is not None:
            raise ValueError(f"the first request failed, {first.error}")
        for count in clients:
            runs.append(await closed_loop(ask_one, count, requests))
        for rate in rates:
            runs.append(await open_loop(ask_one, rate, requests, dice))
    return runs
