"""What nobody should send: never a 500, never a slot that stays taken."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_infer import LLM

from .conftest import NAME, Running, Serving

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
LONG = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def impatient(tiny: Callable[..., LLM], serving: Serving) -> Iterator[Running]:
    with serving(tiny(), max_body=100_000, request_timeout=1.0, write_timeout=1.0, max_queue=4) as running:
        yield running
        assert running.is_idle()


def nested(depth: int) -> bytes:
    return b'{"prompt": ' + b"[" * depth + b"1" + b"]" * depth + b"}"


BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stop": ["\\udfff"]}',
    b'{"prompt": "x", "\\ud800": 1}',
    b'{"prompt": "x", "user": "\\ud800"}',
    b'{"prompt": "x", "model": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "max_tokens": 99999999999999999999999}',
    b'{"prompt": "x", "max_tokens": 0}',
    b'{"prompt": "x", "max_tokens": 1.5}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": "x", "seed": 123456789012345678901234567890}',
    b'{"prompt": "x", "top_k": -2}',
    b'{"prompt": "x", "logit_bias": {"x": 1}}',
    b'{"prompt": "x", "logit_bias": {"\xc2\xb2": 1}}',
    b'{"prompt": "x", "logit_bias": {"99999999999999999999": 1}}',
    b'{"prompt": "x", "logprobs": 21}',
    b'{"prompt": "x", "stop": [""]}',
    b'{"prompt": "x", "best_of": 3}',
    b'{"prompt": "x", "suffix": "y"}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [100000000000000000000000]}',
    b'{"prompt": [300]}',
    b'{"prompt": [1, "x"]}',
    b'{"prompt": [[1], ["x"]]}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [' + b"{}," * 30000 + b"1]}",
    b'{"prompt": "x", "stream_options": {"include_usage": true}}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "x", "structured_outputs": {"json": {"type": "x"}}}',
    b'{"prompt": "x", "structured_outputs": {}}',
    b'{"prompt": "x", "structured_outputs": {"choice": []}}',
    nested(50),
    nested(500),
    nested(40_000),
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_bad_body_is_the_clients_mistake(impatient: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, answer, headers = impatient.ask(path, body, method="POST")
        if status != 200:  # one of four may make something of it
            assert status in (400, 404)
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["type"] == "invalid_request_error"
            assert len(answer["error"]["message"]) <= 600
        assert headers["content-type"] == "application/json"
    assert impatient.ask("/v1/completions", body, method="POST")[0] in (400, 404)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{}] * 20_000},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "\ud800"}}}]},
        {"tools": [], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
        {"response_format": {"type": "xml"}},
        {"chat_template_kwargs": {"messages": []}},
        {"logprobs": 2},
    ],
)
def test_a_bad_chat_is_the_clients_mistake(impatient: Running, change: dict[str, Any]) -> None:
    status, answer, _ = impatient.ask("/v1/chat/completions", {**CHAT, **change})
    assert status == 400, answer
    assert answer["error"]["message"]


def test_paths_methods_and_types(impatient: Running) -> None:
    assert impatient.ask("/v1/embeddings", {})[0] == 404
    assert impatient.ask("/v1/embeddings", {})[1]["error"]["code"] == "unknown_url"
    status, answer, headers = impatient.ask("/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert answer["error"]["type"] == "invalid_request_error"
    assert impatient.ask("/v1/completions", b'{"prompt": "x"}', headers={"content-type": "text/plain"})[0] == 400
    assert impatient.ask("/docs")[0] == 404
    # CORS is off: a page from elsewhere gets no permission
    status, _, headers = impatient.ask("/v1/models", method="OPTIONS", headers={"origin": "http://elsewhere.example"})
    assert status == 405
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_large_bodies_are_refused_early(impatient: Running) -> None:
    status, answer, _ = impatient.ask("/v1/completions", b" " * 100_001)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    connection = http.client.HTTPConnection("127.0.0.1", impatient.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"%x\r\n%s\r\n" % (40_000, b" " * 40_000))
    with connection.getresponse() as response:
        assert response.status == 413  # and the rest was never sent
    connection.close()


def raw(server: Running, data: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    sock.sendall(data)
    return sock


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ", post(LONG)[:-5], b"\x16\x03\x01 TLS?\r\n\r\n"],
)
def test_who_sends_slowly_is_hung_up_on(impatient: Running, data: bytes) -> None:
    with raw(impatient, data) as sock:
        begun = time.monotonic()
        while sock.recv(1000):
            pass
        assert time.monotonic() - begun < 8
    assert impatient.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_byte_at_a_time_wins_no_time(impatient: Running) -> None:
    def trickle(sock: socket.socket) -> None:
        for byte in b"GET /health HTTP/1.1\r\nx: " + b"y" * 400:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)

    with raw(impatient, b"") as sock:
        begun = time.monotonic()
        with pytest.raises(OSError):
            trickle(sock)
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_frees_its_request(impatient: Running, how: str, stream: bool) -> None:
    for _ in range(3):
        sock = raw(impatient, post({**LONG, "stream": stream}))
        if stream:
            assert sock.recv(100)
        else:
            time.sleep(0.05)
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
            assert impatient.is_idle()
        sock.close()
    assert impatient.is_idle()


def test_who_does_not_read_holds_nobody_up(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny(max_num_seqs=2), write_timeout=1.0) as server:
        asked = {**LONG, "n": 2, "temperature": 1.0, "logprobs": 20}
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post(asked))
        time.sleep(0.2)
        # both places are taken by sequences whose reader stands still; they end, and this one runs
        status, answer, _ = server.ask("/v1/completions", {"prompt": "y", "max_tokens": 3})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert server.is_idle()
        sock.close()


def test_a_full_queue_says_when_to_come_back(impatient: Running) -> None:
    places = impatient.service.admission.limit
    assert places == 8 + 4
    socks = [raw(impatient, post(LONG)) for _ in range(places)]
    for sock in socks[:8]:
        assert sock.recv(10)
    end = time.monotonic() + 10
    while impatient.service.admission.inside < places and time.monotonic() < end:
        time.sleep(0.01)
    status, answer, headers = impatient.ask("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert impatient.ask("/health")[0] == 200
    for sock in socks:
        sock.close()
    assert impatient.is_idle()
    assert impatient.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    status, answer, _ = impatient.ask("/v1/completions", {"prompt": "x", "n": 13, "temperature": 1})
    assert status == 400
    assert "13 continuations; at most 12" in answer["error"]["message"]


def test_the_key(tiny: Callable[..., LLM], serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tiny(), api_key="s3cret") as server:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/nowhere", "/tokenize"):
                status, answer, got = server.ask(path, headers=dict(header))
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert got["www-authenticate"] == "Bearer"
        latin = {"authorization": "Bearer s3cr\xe9t"}
        assert server.ask("/v1/models", headers=latin)[0] == 401
        assert server.ask("/v1/models", headers={"authorization": "bearer s3cret"})[0] == 200
        assert server.ask("/health")[0] == server.ask("/ready")[0] == server.ask("/")[0] == 200
    assert "s3cret" not in caplog.text


def test_prompts_are_logged_only_where_asked(
    tiny: Callable[..., LLM], serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for settings, line, words in (({}, 0, 0), ({"log_requests": True}, 1, 0), ({"log_prompts": True}, 1, 1)):
        caplog.clear()
        with serving(tiny(), **settings) as server:  # type: ignore[arg-type]
            server.ask("/v1/completions", {"prompt": "a very private thing", "max_tokens": 2})
            server.ask("/v1/completions", {"prompt": "a very private thing", "max_tokens": "x"})
        assert ("20 tokens" in caplog.text or "21 tokens" in caplog.text) == bool(line)
        assert ("private" in caplog.text) == bool(words)


def test_no_path_of_the_disk_in_an_answer(impatient: Running) -> None:
    seen = [impatient.ask(path)[1] for path in ("/v1/models", "/health", "/ready", "/openapi.json", "/nowhere", "/")]
    seen += [impatient.ask("/v1/completions", body)[1] for body in BODIES]
    text = json.dumps(seen) + json.dumps(impatient.ask("/metrics")[1])
    assert NAME in text
    for part in ("site-packages", ".py", "/home", "/root", "/tmp", "/usr", "/work"):
        assert part not in text


def test_threads_do_not_grow(impatient: Running) -> None:
    before = threading.active_count()
    for _ in range(20):
        impatient.ask("/v1/completions", {"prompt": "x" * 6000})
    assert threading.active_count() <= before + 8  # those of asyncio's executor


def test_clients_that_go_leave_no_traces_in_the_log(impatient: Running, caplog: pytest.LogCaptureFixture) -> None:
    for stream in (False, True):
        raw(impatient, post({**LONG, "stream": stream})).close()
    assert impatient.is_idle()
    time.sleep(0.1)
    assert not caplog.records


def test_thousands_of_prompts_are_refused_before_they_are_read(impatient: Running) -> None:
    begun = time.monotonic()
    status, answer, _ = impatient.ask("/v1/completions", {"prompt": ["x"] * 10_000})
    assert (status, time.monotonic() - begun < 2) == (400, True)
    assert "10000 continuations; at most 12" in answer["error"]["message"]
