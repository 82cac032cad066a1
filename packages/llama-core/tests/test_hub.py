"""Downloading by name, from a server on this machine that drops connections."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import CheckpointError, Llama, LlamaConfig, load_model, save_model
from llama_core.hub import local_path

pytest.importorskip("huggingface_hub")
SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub, for one repository `org/tiny`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files["pytorch_model.bin"] = b"not wanted"
        self.broken = 0
        """So many of the next downloads of the weights end after half of what was asked for."""
        self.slow = 0.0
        self.served: list[tuple[str, str | None, int]] = []
        """Name, range and bytes of every download."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> int:
        return sum(served == name for served, _, _ in self.served)


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = self.server.files
        if path in ("/api/models/org/tiny", *(f"/api/models/org/tiny/revision/{name}" for name in ("main", SHA))):
            siblings = [{"rfilename": name} for name in files]
            self.json({"id": "org/tiny", "sha": SHA, "siblings": siblings, "private": False, "tags": []})
        elif path == f"/api/models/org/tiny/tree/{SHA}":
            oid = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            self.json([{"type": "file", "path": n, "size": len(d), "oid": oid[n]} for n, d in files.items()])
        elif path.startswith("/org/tiny/resolve/") and path.rpartition("/")[2] in files:
            self.file(path.rpartition("/")[2], body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if "tiny" not in path else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def file(self, name: str, body: bool) -> None:
        data, wanted = self.server.files[name], self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        part = data[begin:]
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        breaks = name == WEIGHTS and self.server.broken > 0
        if breaks:
            self.server.broken -= 1
            part = part[: len(part) // 2]
        if name == WEIGHTS:
            threading.Event().wait(self.server.slow)  # the tests have taken the waiting out of time.sleep
        self.server.served.append((name, wanted, len(part)))
        self.wfile.write(part)
        if breaks:
            self.wfile.flush()
            self.close_connection = True


@pytest.fixture
def model() -> Llama:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return Llama(config)


@pytest.fixture
def hub(tmp_path: Path, model: Llama, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the waits between attempts
    save_model(model, tmp_path / "source")
    server = Hub(tmp_path / "source")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_downloads_once(tmp_path: Path, hub: Hub, model: Llama) -> None:
    for _ in range(2):
        folder = local_path("org/tiny", tmp_path / "cache", hub.url)
        loaded = load_model(folder)
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert {name for name, _, _ in hub.served} == {"config.json", "generation_config.json", WEIGHTS}
    assert hub.downloads(WEIGHTS) == 1


@pytest.mark.parametrize("broken", [1, 3])
def test_broken_connections_are_taken_up_where_they_broke(tmp_path: Path, hub: Hub, model: Llama, broken: int) -> None:
    # huggingface_hub keeps what arrived in whole chunks of 10 MB, so the file must be larger than two
    save_model(Llama(model.config.replace(vocab_size=60_000)), tmp_path / "large")
    hub.files |= {path.name: path.read_bytes() for path in (tmp_path / "large").iterdir()}
    hub.broken = broken
    folder = local_path("org/tiny", tmp_path / "cache", hub.url)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert load_model(folder).config.vocab_size == 60_000
    assert hub.broken == 0
    ranges = [wanted for name, wanted, _ in hub.served if name == WEIGHTS]
    assert ranges == [None, *["bytes=10485760-"] * broken]


def test_a_connection_that_never_holds(tmp_path: Path, hub: Hub) -> None:
    hub.broken = 10_000
    with pytest.raises(
        CheckpointError, match="org/tiny is no path on this machine, and the hub gave up after 5 attempts"
    ):
        local_path("org/tiny", tmp_path / "cache", hub.url)


def test_a_tokenizer_alone_needs_no_weights(tmp_path: Path, hub: Hub, model: Llama) -> None:
    folder = local_path("org/tiny", tmp_path / "cache", hub.url, weights=False)
    assert (folder / "config.json").is_file()
    assert hub.downloads(WEIGHTS) == 0
    assert local_path("org/tiny", tmp_path / "cache", hub.url) == folder
    assert hub.downloads(WEIGHTS) == 1
    assert torch.equal(load_model(folder).get_parameter("model.norm.weight"), model.get_parameter("model.norm.weight"))


def test_revision_and_single_file(tmp_path: Path, hub: Hub, model: Llama) -> None:
    save_model(model, tmp_path / "m.gguf", format="gguf")
    hub.files["m.gguf"] = (tmp_path / "m.gguf").read_bytes()
    path = local_path(f"org/tiny/m.gguf@{SHA}", tmp_path / "cache", hub.url)
    assert path.name == "m.gguf"
    assert load_model(path).num_parameters() == model.num_parameters()
    assert {name for name, _, _ in hub.served} == {"m.gguf"}


def test_without_a_connection(tmp_path: Path, hub: Hub) -> None:
    cached = local_path("org/tiny", tmp_path / "cache", hub.url)
    nowhere = "http://127.0.0.1:9"
    assert local_path("org/tiny", tmp_path / "cache", nowhere) == cached
    with pytest.raises(CheckpointError, match="cannot be reached, and the model is not in the cache"):
        local_path("org/tiny", tmp_path / "other", nowhere)


def test_unknown_names(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"org/other is no path on this machine, and the hub has no such model"):
        local_path("org/other", tmp_path / "cache", hub.url)


def test_paths_are_left_alone(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    for source in ("org/tiny", tmp_path, "/a/b", "a", "./a/b", "a/b/c", "../a/b", "a/b/c.safetensors"):
        assert local_path(source, tmp_path / "cache", hub.url) == Path(source)
    assert not hub.served


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(CheckpointError, match=r"org/tiny does not exist; .*install llama-core\[hub\]"):
        load_model("org/tiny")


LOAD = "import sys; from llama_core import load_model; print(load_model(sys.argv[1]).num_parameters())"


def test_of_several_processes_one_downloads(tmp_path: Path, hub: Hub, model: Llama) -> None:
    hub.slow = 2.0
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    arguments = [sys.executable, "-c", LOAD, "org/tiny"]
    processes = [
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    for out, err in results:
        assert out.strip() == str(model.num_parameters()), err
    assert hub.downloads(WEIGHTS) == 1
