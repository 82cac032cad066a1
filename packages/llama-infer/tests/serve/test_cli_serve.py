"""`llama-infer serve` as a process: what it says, what it listens on, how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from llama_infer import cli, cli_serve

Save = Callable[..., Path]
COMMAND = [sys.executable, "-m", "llama_infer", "serve", "--port", "0"]


@contextmanager
def process(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and what it said before."""
    with subprocess.Popen([*COMMAND, *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            said = ""
            while (found := re.search(r"at (http://\S+)", said)) is None:
                line = running.stderr.readline()
                assert line, said
                said += line
            yield running, found[1], said
        finally:
            if running.poll() is None:
                running.kill()


def test_a_stream_outlives_sigterm(save: Save) -> None:
    path = save(max_position_embeddings=1024)
    with process("--model", str(path), "--device", "cpu") as (running, url, said):
        assert "anybody" not in said
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["model"]
            asked: dict[str, Any] = {"model": "model", "prompt": "x", "max_tokens": 400, "stream": True}
            stream = iter(client.completions.create(extra_body={"ignore_eos": True}, **asked))
            next(stream)
            running.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.choices[0].finish_reason == "length"
        assert running.wait(30) == 0
        assert running.stderr is not None
        assert running.stderr.read() == "llama-infer: ended\n"
        assert running.stdout is not None
        assert running.stdout.read() == ""


def test_the_embedded_model_answers_openais_client() -> None:
    with process() as (running, url, said):
        assert "SmolLM2-135M-Instruct at http://127.0.0.1:" in said
        assert "temperature 0.2" in said  # the model's defaults are told
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            asked: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
            stream = client.chat.completions.create(
                model="SmolLM2-135M-Instruct", messages=asked, temperature=0, stream=True
            )
            assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0


def test_everybody_without_a_key_is_warned_of(save: Save, tmp_path: Path) -> None:
    model = ["--model", str(save()), "--device", "cpu", "--host", "0.0.0.0"]
    with process(*model) as (_, _, said):
        assert "anybody who reaches 0.0.0.0 can use this server; --api-key asks for a key" in said
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with process(*model, "--api-key-file", str(key), "--served-model-name", "mine") as (_, url, said):
        assert "anybody" not in said
        assert "s3cret" not in said
        address = url.replace("0.0.0.0", "127.0.0.1")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            assert client.with_options(api_key="s3cret").models.list().data[0].id == "mine"


def test_mistakes_are_one_line_and_early(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        begun = time.monotonic()
        for argv, status, words in (
            (["--port", port], 1, "Address already in use"),
            (["--port", "70000"], 2, "the port must be from 0"),
            (["--host", "no.such.host.invalid"], 2, "the host 'no.such.host.invalid' is unknown"),
            (["--api-key", "a", "--api-key-file", "b"], 2, "not both"),
            (["--api-key-file", str(tmp_path / "none")], 1, "No such file"),
            (["--api-key-file", str(tmp_path / "empty")], 2, "has no key"),
            (["--api-key", "é"], 2, "must be printable ASCII"),
            (["--max-queue", "-1"], 2, "max_queue must be at least 0"),
            (["--model", "nowhere", "--port", "0"], 2, "nowhere does not exist"),
        ):
            assert cli.main(["serve", *argv]) == status
            out, err = capfd.readouterr()
            assert not out
            assert words in err
            assert err.count("\n") == 1
    assert time.monotonic() - begun < 20
    monkeypatch.setattr(cli_serve, "NEEDS", ("fastapi", "no_such_package"))
    assert cli.main(["serve"]) == 2
    assert 'serve needs no_such_package; pip install "llama-infer[serve]"' in capfd.readouterr().err
