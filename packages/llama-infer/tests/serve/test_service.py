"""The server's life: an engine that fails, a drain, and what /metrics says of it."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from llama_infer import LLM
from llama_infer.serve.limits import Admission
from llama_infer.serve.service import RESTARTS, Settings

from .conftest import NAME, Running, Serving

LONG: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def break_at(llm: LLM, step: int) -> Any:
    """Has the engine fail in a later pass of the model, once."""
    passes = 0

    def hook(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == step:
            raise MemoryError("no room")

    return llm.model.model.layers[0].register_forward_pre_hook(hook)


def test_an_engine_that_fails_is_replaced_and_everybody_hears_of_it(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        expected = client.completions.create(model=NAME, prompt="abc", temperature=0, max_tokens=8).choices[0].text
        old = server.llm.engine
        handle = break_at(server.llm, 40)

        def streamed() -> str:
            try:
                return "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **LONG))
            except openai.APIError as error:
                return f"error: {error}"

        def whole() -> str:
            try:
                return client.completions.create(**LONG).choices[0].text
            except openai.InternalServerError as error:
                return f"error: {error}, {error.status_code}, again in {error.response.headers['retry-after']}"

        with ThreadPoolExecutor(8) as threads:
            answers = [task.result() for task in [threads.submit(f) for f in [streamed, whole] * 4]]
        handle.remove()
        # Each was either told, or came before or after and was answered whole.
        told = [answer for answer in answers if answer.startswith("error: ")]
        assert told
        assert all("the engine has failed and is being restarted" in answer for answer in told)
        assert all("503" in answer for answer in told if "again in" in answer)
        end = time.monotonic() + 20
        while server.ask("/ready")[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert server.llm.engine is not old
        again = client.completions.create(model=NAME, prompt="abc", temperature=0, max_tokens=8).choices[0].text
        assert again == expected
        assert server.is_idle()
        assert "llama_infer_engine_restarts_total 1.0" in server.ask("/metrics")[1]
        assert server.ask("/health")[0] == 200


def test_an_engine_that_always_fails_ends_the_server(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny()) as server:
        handle = server.llm.model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            for _ in range(RESTARTS + 1):
                while server.service.state == "restarting":
                    time.sleep(0.01)
                assert server.ask("/v1/completions", {"prompt": "x"})[0] == 503
            end = time.monotonic() + 20
            while not server.server.should_exit:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert server.service.state == "failed"
        finally:
            handle.remove()


def test_a_draining_server_finishes_what_it_began(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        stream = iter(client.completions.create(stream=True, **{**LONG, "max_tokens": 300}))
        next(stream)
        server.server.stop()
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):  # it listens no longer
            client.models.list()


def test_a_drain_has_an_end(tiny: Callable[..., LLM], serving: Serving) -> None:
    llm = tiny()
    handle = llm.model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    with (
        serving(llm, drain_timeout=0.5) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = iter(client.completions.create(stream=True, **LONG))
        next(stream)
        begun = time.monotonic()
        server.server.stop()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert time.monotonic() - begun < 5
    handle.remove()


def test_who_comes_while_it_drains_is_sent_away(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny()) as server:
        server.service.drain()
        for path in ("/ready", "/v1/completions"):
            status, answer, headers = server.ask(path, None if path == "/ready" else {"prompt": "x"})
            assert status == 503
            assert answer["error"]["message"] == "the server is shutting down"
            assert headers["retry-after"] == "5"
        assert server.ask("/health")[0] == 200


def test_metrics_count_what_happened(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny(max_num_seqs=2)) as server:

        def metrics() -> dict[str, float]:
            lines = server.ask("/metrics")[1].splitlines()
            return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"llama_infer_(\S+) (\S+)", line))}

        begin = metrics()
        assert begin["requests_running"] == begin["requests_waiting"] == begin["cache_usage_ratio"] == 0
        body = {"prompt": "x" * 100, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        server.ask("/v1/completions", body)
        server.ask("/v1/completions", {**body, "stream": True})
        found = metrics()
        assert found['requests_total{reason="length"}'] == 2
        assert found["prompt_tokens_total"] == 2 * 101
        assert found["prompt_tokens_cached_total"] == 100
        assert found["generation_tokens_total"] == 12
        assert found["time_to_first_token_seconds_count"] == found["request_seconds_count"] == 2
        assert found["time_between_tokens_seconds_count"] <= 5
        assert 0 < found["time_to_first_token_seconds_sum"] < found["request_seconds_sum"]
        long = {"prompt": "y", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(long).encode())
        request.add_header("content-type", "application/json")
        answers = [urllib.request.urlopen(request, timeout=30) for _ in range(3)]
        for answer in answers[:2]:
            answer.read(20)
        found = metrics()
        assert (found["requests_running"], found["requests_waiting"]) == (2, 1)
        assert 0 < found["cache_usage_ratio"] < 1
        for answer in answers:
            answer.close()
        assert server.is_idle()
        assert metrics()['requests_total{reason="abort"}'] == 3


def test_admission_guesses_from_the_pace() -> None:
    admission = Admission(4)
    assert admission.seconds_until_room(1) == 1
    admission.enter(4)
    admission.leave(2)
    time.sleep(0.3)
    admission.leave(2)
    assert admission.seconds_until_room(2) == 1
    assert admission.seconds_until_room(1000) == 60


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"max_queue": -1}, {"max_body": 0}, {"api_key": ""}, {"api_key": "é"}, {"drain_timeout": 0}],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Settings(**{"name": "x", **wrong})


def test_two_servers_in_a_process(tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny()) as one, serving(tiny(), name="other") as two:
        ask: list[Running] = [one, two]
        threads = [threading.Thread(target=server.ask, args=("/v1/completions", {"prompt": "x"})) for server in ask]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [server.ask("/v1/models")[1]["data"][0]["id"] for server in ask] == [NAME, "other"]
