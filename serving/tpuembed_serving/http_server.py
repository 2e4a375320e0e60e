"""The application in uvicorn, until it is told to stop."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from tpuembed_serving.app import ServingApp
from tpuembed_serving.guarded_http import close_slow_connections, protocol_class
from tpuembed_serving.stopping import Stop

__all__ = ["log_to_stderr", "prepare_tensorflow", "run_app"]

logger = logging.getLogger("tpuembed_serving")

_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 seconds after which common load balancers drop an idle connection: the server must not be first."""


def _nobody() -> None:
    """Nobody is told."""


def run_app(app: ServingApp, listener: socket.socket, stop: Stop, on_listening: Callable[[], None] = _nobody) -> None:
    """Serve on `listener` until `stop`; not at all where it was asked before. `on_listening` is called once it answers."""
    tls = app.settings.security.tls
    config = uvicorn.Config(
        app,
        http=protocol_class(app.settings.security.limits, app.direct),
        **(tls.uvicorn_options() if tls else {}),
        access_log=False,
        log_level="warning",
        lifespan="on",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(app.settings.drain_seconds)),
    )
    server = _Server(app, config, on_listening)
    stop.call(server.ask_to_exit)
    if not stop.asked:
        server.run(sockets=[listener])


def prepare_tensorflow() -> None:
    """Before it is imported: its notes are none of a server's, and oneDNN costs more than it saves in runs of few rows."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def log_to_stderr(prefix: str = "") -> None:
    """One line for every message; `prefix` says which process wrote it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


class _Server(uvicorn.Server):
    """A server that takes no new gRPC calls either once it takes no new connections."""

    def __init__(self, app: ServingApp, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._on_listening = app, on_listening

    def ask_to_exit(self) -> None:
        """From a signal's handler, uvicorn's own or another."""
        self.should_exit = True
        if not self.started:
            self._app.stopping.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        super().handle_exit(sig, frame)
        self.ask_to_exit()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._closing_slow = asyncio.create_task(close_slow_connections(self.server_state.connections))
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what is in progress; the application's own shutdown, at the end of it, waits for gRPC's calls."""
        stopping = asyncio.create_task(self._app.stop_grpc())
        await super().shutdown(sockets)
        await stopping
        self._closing_slow.cancel()
