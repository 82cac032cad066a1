"""A server in a thread, with the tiny model."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llama_core import Llama, Tokenizer, load_tokenizer
from llama_infer import LLM
from llama_infer.serve.server import Server, listen
from llama_infer.serve.service import Service, Settings

NAME = "tiny"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or () %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


@dataclass
class Running:
    url: str
    service: Service
    server: Server
    port: int

    @property
    def llm(self) -> LLM:
        return self.service.llm

    def ask(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text, got = response.status, response.read().decode(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                status, text, got = error.code, error.read().decode(), dict(error.headers)
        try:
            return status, json.loads(text), got
        except ValueError:
            return status, text, got

    def is_idle(self, seconds: float = 20) -> bool:
        """Whether nothing runs, waits or holds memory, at the latest after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            scheduler = self.llm.engine.scheduler
            busy = scheduler.running or scheduler.waiting or self.service.admission.inside or self.service.live
            if not busy and scheduler.pool.free == scheduler.pool.num_blocks:
                scheduler.pool.check()
                return True
            time.sleep(0.02)
        return False


@contextmanager
def _serving(llm: LLM, **settings: Any) -> Iterator[Running]:
    service = Service(llm, Settings(**{"name": NAME, **settings}))
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{port}", service, server, port)
    finally:
        server.stop()
        thread.join(60)
        service.engine.close()
        assert not thread.is_alive()


Serving = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serving() -> Serving:
    """Context manager: serves an LLM, with `Settings`."""
    return _serving


@pytest.fixture(scope="session")
def tool_tokenizer(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The one of bytes, with a chat template that offers tools."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Llama], tool_tokenizer: Tokenizer) -> Callable[..., LLM]:
    """Makes LLMs of the tiny model, with room for a chat."""

    def make(**settings: Any) -> LLM:
        model = make_model(max_position_embeddings=1024)
        return LLM(model, tokenizer=tool_tokenizer, **{"max_num_seqs": 8, **settings})

    return make


@pytest.fixture(scope="module")
def server(tiny: Callable[..., LLM]) -> Iterator[Running]:
    """One for all tests of a file, idle again at its end."""
    with _serving(tiny()) as running:
        yield running
        assert running.is_idle()
