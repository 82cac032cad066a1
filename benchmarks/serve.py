"""What `llama-infer serve` costs: beside the bare engine, with an engine that takes no time, and for /health meanwhile.

    python benchmarks/serve.py health instant [--save]
    python benchmarks/serve.py engine --device cuda --preset llama-3.1-8b [--save]

health: 200 simultaneous streams on the embedded model, one in five of them broken off, on all cores of a CPU; the
seconds that /health takes meanwhile. instant: 64 streams from an engine that has its tokens at once; the server has one
core to itself, its client another. engine: 64 streams beside `LLM.generate` of the same 64 prompts, with weights drawn
at random; the two take turns, each repeat on new prompts. The client is always a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from llama_infer.serve_load import Answer, Target, ask
from llama_infer.serve_report import percentile

BARS = {"health": 0.25, "instant": 5000.0, "engine": 0.05}
RESULTS = Path(__file__).parent / "results" / "serve.md"


# --- the client, in a process of its own


async def client(url: str, bodies: list[dict[str, Any]], leave: list[int | None]) -> dict[str, Any]:
    """All streams at once; seconds, tokens, and the seconds that /health took."""
    target = Target(url, "", 0, 0)
    health: list[float] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(body: dict[str, Any], events: int | None) -> Answer | None:
            if events is None:
                return await ask(session, target, body)
            async with session.post(f"{url}/v1/completions", json=body) as response:
                async for line in response.content:
                    events -= line.startswith(b"data: {")
                    if events < 1:
                        break
                response.close()
            return None

        async def pulse() -> None:
            while True:
                begun = time.perf_counter()
                async with session.get(f"{url}/health") as response:
                    await response.read()
                health.append(time.perf_counter() - begun)
                await asyncio.sleep(0.02)

        beat = asyncio.create_task(pulse())
        begun = time.perf_counter()
        answers = await asyncio.gather(*map(one, bodies, leave))
        seconds = time.perf_counter() - begun
        beat.cancel()
    whole = [answer for answer in answers if answer is not None]
    assert not [answer.error for answer in whole if answer.error]
    gaps = [b - a for answer in whole for a, b in zip(answer.events, answer.events[1:], strict=False)]
    tokens = sum(answer.tokens for answer in whole)
    return {"seconds": seconds, "tokens": tokens, "health": health, "gap": percentile(gaps, 99)}


def run_client(url: str, bodies: list[dict[str, Any]], leave: list[int | None], core: int | None = None) -> Any:
    command = [sys.executable, __file__, "client", "--url", url]
    pinned = ["taskset", "-c", str(core)] if core is not None else []
    asked = json.dumps({"bodies": bodies, "leave": leave})
    done = subprocess.run([*pinned, *command], input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def body(prompt: Any, tokens: int) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


# --- the server, in a thread of this process, as `llama-infer serve` runs it


class Serving:
    def __init__(self, llm: Any) -> None:
        from llama_infer.serve.server import Server, listen
        from llama_infer.serve.service import Service, Settings

        self.service = Service(llm, Settings("benchmark"))
        sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.server = Server(self.service)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]})

    def __enter__(self) -> Serving:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.thread.join()
        self.service.engine.close()


def health(streams: int, tokens: int, repeats: int) -> list[str]:
    from llama_infer import LLM

    llm = LLM(max_model_len=256)
    times: list[float] = []
    rates = []
    with Serving(llm) as server:
        run_client(server.url, [body("x", 2)], [None])
        for seed in range(repeats):
            dice = random.Random(seed)
            bodies = [body(f"Story {dice.random()}. Once there was", tokens) for _ in range(streams)]
            leave = [dice.randrange(1, tokens) if dice.random() < 0.2 else None for _ in range(streams)]
            found = run_client(server.url, bodies, leave)
            times += found["health"]
            rates.append(found["tokens"] / found["seconds"])
    p50, p99 = percentile(times, 50), percentile(times, 99)
    what = f"/health while {streams} streams run on {os.cpu_count()} cores (embedded model, 1 in 5 broken off)"
    told = f"p99 {1000 * p99:.0f} ms (p50 {1000 * p50:.1f} ms, {len(times)} calls)"
    return [f"| {what} | {told} | ≤ {1000 * BARS['health']:.0f} ms |"]


class InstantEngine:
    """Every sequence's next token, at once. As much of an engine as the server knows."""

    def __init__(self, engine: Any) -> None:
        pool = SimpleNamespace(free=1, num_blocks=1)
        self.scheduler = SimpleNamespace(running=[], waiting=deque(), max_num_seqs=256, pool=pool, preemptions=0)
        self.guessed = self.accepted = 0

    def add(self, sequence: Any) -> None:
        self.scheduler.running.append(sequence)

    def abort(self, sequence: Any) -> None:
        sequence.abort()
        if sequence in self.scheduler.running:
            self.scheduler.running.remove(sequence)

    def step(self) -> None:
        for sequence in self.scheduler.running:
            sequence.append(1000 + len(sequence.token_ids))
        self.scheduler.running = [s for s in self.scheduler.running if not s.has_ended()]


def instant(streams: int, tokens: int, repeats: int) -> list[str]:
    from llama_infer import LLM

    llm = LLM(max_model_len=4096, kv_cache_memory_bytes=400 * 2**20)
    llm.engine = InstantEngine(llm.engine)  # type: ignore[assignment]
    pin = hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1
    if pin:
        os.sched_setaffinity(0, {0})
    rates, gaps = [], []
    with Serving(llm) as server:
        for seed in range(repeats + 1):
            bodies = [body(f"{seed} {at}", tokens) for at in range(streams)]
            found = run_client(server.url, bodies, [None] * streams, core=1 if pin else None)
            assert found["tokens"] == streams * tokens
            if seed:  # the first warms up
                rates.append(found["tokens"] / found["seconds"])
                gaps.append(found["gap"])
    if pin:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    what = f"streamed tokens/s on one core, {streams} streams, an engine that takes no time"
    told = f"{statistics.median(rates):,.0f} (median of {repeats}; {min(rates):,.0f} to {max(rates):,.0f})"
    return [f"| {what} | {told} | ≥ {BARS['instant']:,.0f} |"]


def word_tokenizer(size: int) -> Any:
    """A tokenizer of made-up words, one for each id."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from llama_core import Tokenizer

    backend = tokenizers.Tokenizer(models.BPE(vocab={f"▁w{at}": at for at in range(size)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def engine(streams: int, tokens: int, repeats: int, device: str, name: str, prompt: int) -> list[str]:
    import torch

    from llama_core import Llama, preset
    from llama_infer import LLM, SamplingParams

    config = preset(name)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = Llama(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02, generator=generator)
    llm = LLM(model, tokenizer=word_tokenizer(config.vocab_size), max_model_len=min(4096, prompt + tokens + 8))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    dice = random.Random(0)

    def prompts() -> list[list[int]]:
        return [[dice.randrange(config.vocab_size) for _ in range(prompt)] for _ in range(streams)]

    bare, served = [], []
    with Serving(llm) as server:
        for repeat in range(repeats + 1):
            begun = time.perf_counter()
            llm.generate(prompts(), params, show_progress=False)
            alone = time.perf_counter() - begun
            found = run_client(server.url, [body(ids, tokens) for ids in prompts()], [None] * streams)
            assert found["tokens"] == streams * tokens
            if repeat:  # the first warms both up
                bare.append(streams * tokens / alone)
                served.append(found["tokens"] / found["seconds"])
    lost = 1 - statistics.median(s / b for s, b in zip(served, bare, strict=True))
    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    what = f"{streams} streams of {prompt} + {tokens} tokens, {name} with random weights on {where}, beside the engine"
    told = f"{lost:.1%} lost ({statistics.median(served):,.0f} of {statistics.median(bare):,.0f} tokens/s)"
    return [f"| {what} | {told} | ≤ {BARS['engine']:.0%} |"]


def save(rows: list[str], command: str) -> None:
    """Into the table of results: each row in place of the one of the same measure."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    at = commit.stdout.strip() or "an unknown commit"
    head = ["# Server", "", "| measure | result | promised | measured by |", "|---|---|---|---|"]
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else head
    for row in rows:
        key = row.split("|")[1].split(",")[0].split(" on ")[0]
        lines = [line for line in lines if not line.startswith(f"|{key}")]
        lines.append(f"{row} `{command}` at {at}; {platform.processor() or platform.machine()} |")
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["health", "instant", "engine", "client"])
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", default="smollm2-135m", help="whose shape the engine's model has")
    parser.add_argument("--streams", type=int, help="default 200 for health, 64 for the others")
    parser.add_argument("--tokens", type=int, help="of each answer; default 16 for health, else 256")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write into {RESULTS.parent.name}/{RESULTS.name}")
    options = parser.parse_args()
    if options.parts == ["client"]:
        asked = json.load(sys.stdin)
        print(json.dumps(asyncio.run(client(options.url, asked["bodies"], asked["leave"]))))
        return
    rows = []
    for part in options.parts:
        streams = options.streams or (200 if part == "health" else 64)
        tokens = options.tokens or (16 if part == "health" else 256)
        if part == "health":
            rows += health(streams, tokens, options.repeats)
        elif part == "instant":
            rows += instant(streams, tokens, options.repeats)
        else:
            place = (options.device, options.preset, options.prompt_tokens)
            rows += engine(streams, tokens, options.repeats, *place)
        print(rows[-1], flush=True)
    if options.save:
        save(rows, f"python benchmarks/serve.py {' '.join(arg for arg in sys.argv[1:] if arg != '--save')}")


if __name__ == "__main__":
    main()
