"""Runs the application in uvicorn, and stops it without losing a request.

- Lame duck: requests and new connections are still answered. `/readyz` and gRPC's health report the coming stop, each
  HTTP answer closes its connection, and gRPC clients get GOAWAY.
- Drain: new connections are refused. Established connections are accepted and their requests answered.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import uvicorn

from tpuembed_serving.core.changed_files import follow_files
from tpuembed_serving.core.noop import noop
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.http.protocol import close_slow_connections, protocol_class
from tpuembed_serving.settings import LogSettings
from tpuembed_serving.workers.sockets import refuse_new_connections, waiting_connections
from tpuembed_serving.workers.stopping import Stop, StopStage

__all__ = ["prepare_tensorflow", "run_app"]

_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s after which common load balancers close an idle connection. The server must not close it first."""
_HANDSHAKE_SECONDS: Final = 0.3
"""How long after the start of the drain a connection that has begun may take to be established."""
_POLL_SECONDS: Final = 0.02


def run_app(app: ServingApp, listener: socket.socket, stop: Stop, on_listening: Callable[[], None] = noop) -> None:
    """Serve on `listener` until `stop`. Returns at once if the stop has begun. `on_listening` is called once it answers."""
    tls = app.settings.security.tls
    config = uvicorn.Config(
        app,
        http=protocol_class(app.settings.security.limits, app.direct),
        **(tls.uvicorn_options() if tls else {}),
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="on",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    server = _Server(app, config, stop, on_listening)
    stop.call(server.ask_to_stop)
    if stop.stage is StopStage.RUNNING:
        server.run(sockets=[listener])


def prepare_tensorflow(log: LogSettings) -> None:
    """Set the environment variables of TensorFlow and gRPC before their import. Silences their notes, and turns off oneDNN.

    oneDNN costs more than it saves in batches of few rows. What gRPC notes, such as a connection that is refused, each call's
    own error says too.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if log.level <= logging.DEBUG:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    else:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


class _Server(uvicorn.Server):
    """uvicorn's server with a lame duck stage and a drain, for HTTP and gRPC; see the module."""

    def __init__(self, app: ServingApp, config: uvicorn.Config, stop: Stop, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._stop, self._on_listening = app, stop, on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_leaving = False

    def ask_to_stop(self) -> None:
        """Move on to the stage of `stop`. A signal handler or another thread may call it."""
        if self._loop is None:  # not started, so there is no request to answer
            self.should_exit = True
            self._app.stopping.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._enter_stage)

    def _enter_stage(self) -> None:
        seconds = self._app.settings.lame_duck_seconds
        if self._stop.stage is StopStage.LAME_DUCK and seconds and not self._app.repository.loading:
            self._leave(hands_over=True)
            assert self._loop is not None
            self._loop.call_later(seconds, self._drain)
        elif self._stop.stage is not StopStage.RUNNING:
            self._drain()
            self.force_exit = self._stop.stage is StopStage.CUT_OFF

    def _leave(self, *, hands_over: bool) -> None:
        """Tell clients to use another server."""
        if not self._is_leaving:
            self._is_leaving = True
            self._app.leave(hands_over=hands_over)
            protocol: Any = self.config.http_protocol_class
            protocol.is_leaving = True
            for connection in self._connections():
                connection.leave()

    def _drain(self) -> None:
        self.should_exit = True

    def _connections(self) -> list[Any]:
        """Return all connections, which are instances of `protocol_class`."""
        return list(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals: `stop` does; see uvicorn."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; see uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._tasks = [asyncio.create_task(close_slow_connections(self.server_state.connections))]
            tls = self._app.settings.security.tls
            if tls is not None and self.config.ssl is not None:
                reload = functools.partial(tls.reload, self.config.ssl)
                self._tasks.append(asyncio.create_task(follow_files(tls.files, reload)))
            self._loop = asyncio.get_running_loop()
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer all accepted requests of HTTP and gRPC, then shut down; see uvicorn."""
        end = time.monotonic() + self._app.settings.drain_seconds
        self._leave(hands_over=False)
        stopping = asyncio.create_task(self._app.stop_grpc())
        await self._accept_the_rest(sockets or [], end)
        await self._answer_the_rest(end)
        while not stopping.done() and not self.force_exit:
            await asyncio.wait([stopping], timeout=_POLL_SECONDS)
        self.config.timeout_graceful_shutdown = max(1, math.ceil(end - time.monotonic()))
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    async def _accept_the_rest(self, sockets: Sequence[socket.socket], end: float) -> None:
        """Accept every connection that is established for its client, refuse the others, and close the port."""
        for one in sockets:
            refuse_new_connections(one)
        earliest = time.monotonic() + _HANDSHAKE_SECONDS
        while not self.force_exit and (now := time.monotonic()) < end:
            if now > earliest and not any(map(waiting_connections, sockets)):
                break
            await asyncio.sleep(_POLL_SECONDS)
        for server in self.servers:
            server.close()
        for one in sockets:
            one.close()

    async def _answer_the_rest(self, end: float) -> None:
        """Wait until connections end with their last answers. Requests that are unfinished at `end` are answered 503."""
        since = time.monotonic()
        while self.server_state.connections and not self.force_exit and (now := time.monotonic()) < end:
            for connection in self._connections():
                connection.close_if_silent(since, now)
            await asyncio.sleep(_POLL_SECONDS)
        for connection in self._connections():
            connection.give_up()
