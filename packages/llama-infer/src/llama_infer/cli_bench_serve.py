"""`llama-infer bench serve`: load on a server that speaks OpenAI's API, whoever's it is."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = 'pip install "llama-infer[bench]"'


@dataclass(frozen=True, kw_only=True)
class BenchServe:
    """Measure what clients of a server see: seconds to the first token, between tokens and altogether, as percentiles.

    --concurrency: a closed loop, in which so many clients ask again as soon as they are answered. --rate: an open loop,
    in which requests come at random times, so many a second, whether or not the server keeps up.
    """

    url: str = "http://127.0.0.1:8000"
    """The server, without /v1."""
    api_key: str | None = None
    """Its key."""
    model: str | None = None
    """Default: the first that it has."""
    concurrency: tuple[int, ...] = ()
    """Clients of the closed loop, one load after the other. Default without --rate: 1 8."""
    rate: tuple[float, ...] = ()
    """Requests a second of the open loop."""
    requests: int = 32
    """Requests of each load."""
    prompt_words: int = 64
    """Words of each prompt, drawn at random: little is found in a cache."""
    max_tokens: int = 32
    """Tokens of each answer."""
    stop_early: bool = False
    """Let answers end by themselves; else all are equally long, where the server knows ignore_eos."""
    seed: int = 0
    """Of the prompts and the times of the open loop."""
    json: Path | None = None
    """Write the numbers to this file."""
    png: Path | None = None
    """Draw them into this file."""

    def run(self) -> int:
        for name in ("requests", "prompt_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("concurrency", "rate"):
            if any(not value > 0 for value in getattr(self, name)):
                raise ValueError(f"--{name} must be above 0, got {' '.join(map(str, getattr(self, name)))}")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url must begin with http:// or https://, got {self.url!r}")
        for path in (self.json, self.png):
            if path is not None and not path.resolve().parent.is_dir():
                raise ValueError(f"there is no folder {path.parent}")
        needs = ["aiohttp"] + (["matplotlib"] if self.png is not None else [])
        if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
            raise ValueError(f"bench serve needs {' and '.join(missing)}; {INSTALL}")
        summaries = self._measure()
        self._show(summaries)
        return 0 if any(found["failed"] < found["requests"] for found in summaries) else 1

    def _measure(self) -> list[dict[str, Any]]:
        import asyncio

        from .serve_load import Target, model_of, run_loads
        from .serve_report import summary

        async def measure() -> list[dict[str, Any]]:
            url = self.url.rstrip("/")
            model = self.model or await model_of(url, self.api_key)
            target = Target(url, model, self.prompt_words, self.max_tokens, not self.stop_early, self.api_key)
            clients = list(self.concurrency or (() if self.rate else (1, 8)))
            rates = list(self.rate)
            runs = await run_loads(target, clients=clients, rates=rates, requests=self.requests, seed=self.seed)
            return [summary(run) for run in runs]

        return asyncio.run(measure())

    def _show(self, summaries: list[dict[str, Any]]) -> None:
        from rich.console import Console

        from .serve_report import draw, table

        Console(file=sys.stdout).print(table(summaries))
        for found in summaries:
            for error in found["errors"]:
                print(f"llama-infer: {error}", file=sys.stderr)
        if self.json is not None:
            self.json.write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
        if self.png is not None:
            draw(summaries, self.png)
