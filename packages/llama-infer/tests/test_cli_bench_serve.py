"""`llama-infer bench serve`: its numbers from answers that are known, and against a server."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from llama_infer import cli
from llama_infer.serve_load import Answer, Run, closed_loop, open_loop
from llama_infer.serve_report import percentile, summary

GAPS = (0.05, 0.02, 0.04)
"""Seconds before each of the pieces that the server below sends."""


class Scripted(BaseHTTPRequestHandler):
    """A server of another make, with a failing model and a known pace."""

    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["model"] == "full":
            self._head(429, "application/json")
            self.wfile.write(b'{"error": {"message": "full"}}')
            return
        assert asked["stream"]
        self._head(200, "text/event-stream")
        for gap in GAPS:
            time.sleep(gap)
            self._event({"choices": [{"text": "x"}]})
        self._event({"choices": [{"text": ""}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def _event(self, data: object) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_percentiles() -> None:
    assert [percentile(range(1, 101), p) for p in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 99) == 7
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert math.isnan(percentile([], 50))


def test_a_summary() -> None:
    good = Answer(sent=10.0, events=[10.5, 10.6, 10.9], ended=11.0, tokens=3, prompt_tokens=7)
    bad = Answer(sent=10.0, ended=10.1, error="429: full")
    found = summary(Run("closed", 2, 4.0, [good, bad]))
    assert (found["requests"], found["failed"], found["errors"]) == (2, 1, ["429: full"])
    assert (found["tokens_per_second"], found["requests_per_second"]) == (0.75, 0.25)
    assert found["first"]["p50"] == pytest.approx(0.5)
    assert (found["between"]["p50"], found["between"]["p99"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert found["whole"]["p90"] == pytest.approx(1.0)
    assert good.each == pytest.approx(0.2)


def test_a_closed_loop_keeps_its_number_and_an_open_one_its_times() -> None:
    now = most = 0

    async def ask() -> Answer:
        nonlocal now, most
        now += 1
        most = max(most, now)
        sent = time.perf_counter()
        await asyncio.sleep(0.05)
        now -= 1
        return Answer(sent=sent)

    run = asyncio.run(closed_loop(ask, 3, 10))
    assert (most, len(run.answers)) == (3, 10)
    assert run.seconds >= 4 * 0.05
    most = 0
    run = asyncio.run(open_loop(ask, 200.0, 40, random.Random(0)))
    assert most > 3  # nobody waits for the one before
    assert len(run.answers) == 40
    assert run.seconds < 40 * 0.05


def test_against_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "serve", "--url", url, "--concurrency", "1", "4", "--rate", "20", "--requests", "8"]
    assert cli.main([*argv, "--json", str(tmp_path / "x.json"), "--png", str(tmp_path / "x.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines if "/8" in line] == ["1 client", "4 clients", "20 req/s"]
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(each["loop"], each["load"]) for each in found] == [("closed", 1), ("closed", 4), ("open", 20)]
    for each in found:
        assert (each["requests"], each["failed"], each["tokens"], each["prompt_tokens"]) == (8, 0, 24, 40)
        assert GAPS[0] <= each["first"]["p50"] < GAPS[0] + 0.2
        assert GAPS[1] - 0.01 <= each["between"]["p50"]
        assert each["whole"]["p50"] >= sum(GAPS)
    assert found[1]["tokens_per_second"] > 1.5 * found[0]["tokens_per_second"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv, words in (
        (["--url", "nowhere"], "--url must begin with http"),
        (["--url", "http://127.0.0.1:9"], "no server at http://127.0.0.1:9"),
        (["--url", f"{url}/", "--model", "full"], "the first request failed, 429"),
        (["--concurrency", "0"], "--concurrency must be above 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--png", str(tmp_path / "no" / "x.png")], "there is no folder"),
    ):
        assert cli.main(["bench", "serve", *argv]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert cli.main(["bench", "serve", "--help"]) == 0
