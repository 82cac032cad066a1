"""From a service to a process that listens: sockets, signals, and an end that leaves nobody without an answer."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from .app import build_app
from .connection import PatientProtocol
from .service import Service

MARGIN = 5.0
"""Seconds between telling the last clients that it is over, and closing on those who don't listen."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: no such host, or a port outside its range.
        OSError: the port is taken, or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"the port must be from 0 (any free one) to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"the host {host!r} is unknown") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM and SIGINT lets requests end and then itself.

    Args:
        service: what it serves; `service.stop` ends it.
    """

    def __init__(self, service: Service) -> None:
        settings = service.settings
        protocol = functools.partial(
            PatientProtocol, request_timeout=settings.request_timeout, write_timeout=settings.write_timeout
        )
        options: dict[str, Any] = {"http": protocol, "ws": "none", "lifespan": "off", "proxy_headers": False}
        config = uvicorn.Config(
            build_app(service),
            **options,
            log_config=None,  # ours has it
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain_timeout + MARGIN) + 1,
        )
        super().__init__(config)
        self.service = service
        service.stop = self.stop

    def stop(self) -> None:
        """Begin the end."""
        self.service.drain()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's: that raises the signal once more at the end, and a drained server ended as it should.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self.service.settings.drain_timeout, self.service.abandon)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve(service: Service, sock: socket.socket) -> None:
    """Serve until a signal, or until there is no hope for the engine."""
    try:
        Server(service).run(sockets=[sock])
    finally:
        service.engine.close()
