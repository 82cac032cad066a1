"""`llama-infer serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from .cli_options import ModelOptions
from .embedded import NAME

NEEDS = ("fastapi", "uvicorn", "httptools", "prometheus_client")
INSTALL = 'pip install "llama-infer[serve]"'


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Serve a model to OpenAI's clients, and a page to chat with it. Ctrl-C and SIGTERM let running requests end."""

    host: str = "127.0.0.1"
    """The address to listen on. Default: this machine only; 0.0.0.0 lets everybody in, so give a key."""
    port: int = 8000
    """The port; 0 takes a free one."""
    api_key: str | None = None
    """Who uses the server must have this key. Other users of this machine can see it here; --api-key-file hides it."""
    api_key_file: Path | None = None
    """A file whose first line is the key."""
    served_model_name: str | None = None
    """What clients call the model. Default: the last part of --model."""
    max_queue: int = 512
    """Requests that may wait; what is more is told to come back later (429)."""
    max_body_mb: float = 4.0
    """The largest request, in MB."""
    drain_timeout: float = 30.0
    """Seconds that running requests have after SIGTERM."""
    log_requests: bool = False
    """Log a line for each request, without its words."""
    log_prompts: bool = False
    """Log prompts and answers too."""

    def run(self) -> int:
        missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"serve needs {', '.join(missing)}; {INSTALL}")
        key = self._key()
        from .serve.server import is_loopback, listen, serve
        from .serve.service import Service, Settings

        settings = Settings(
            name=self.served_model_name or self._name(),
            max_queue=self.max_queue,
            max_body=int(self.max_body_mb * 1e6),
            api_key=key,
            log_requests=self.log_requests,
            log_prompts=self.log_prompts,
            drain_timeout=self.drain_timeout,
        )
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="llama-infer: %(message)s")
        logging.getLogger("llama_infer.serve").setLevel(logging.INFO)
        with listen(self.host, self.port) as sock:  # a port that is taken should not wait for the model
            service = Service(self.load(), settings)
            if key is None and not is_loopback(self.host):
                _tell(f"anybody who reaches {self.host} can use this server; --api-key asks for a key")
            for notice in service.llm.model_sampling.notices({}):
                _tell(notice)
            host = f"[{self.host}]" if ":" in self.host else self.host
            _tell(f"{settings.name} at http://{host}:{sock.getsockname()[1]} (a page to chat, and /v1 for clients)")
            serve(service, sock)
            failed = service.state == "failed"
        _tell("the engine has failed" if failed else "ended")
        return 1 if failed else 0

    def _key(self) -> str | None:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("give --api-key or --api-key-file, not both")
        if self.api_key_file is None:
            return self.api_key
        lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        if not lines or not lines[0].strip():
            raise ValueError(f"{self.api_key_file} has no key in its first line")
        return lines[0].strip()

    def _name(self) -> str:
        if self.model is None:
            return NAME
        path = Path(self.model).expanduser()
        return path.resolve().name if path.exists() else self.model  # a name on a hub is one as it is


def _tell(text: str) -> None:
    print(f"llama-infer: {text}", file=sys.stderr, flush=True)
