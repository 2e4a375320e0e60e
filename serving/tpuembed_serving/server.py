"""Runs the application on a port until it is told to stop."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from tpuembed.errors import ServingError
from tpuembed_serving.app import ServingApp, create_app
from tpuembed_serving.settings import ServerSettings
from tpuembed_serving.versions import GRAPH_FILE, find_versions

__all__ = ["serve"]

logger = logging.getLogger("tpuembed_serving")

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 seconds after which common load balancers drop an idle connection: the server must not be first."""


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress and return.

    The port listens at once; the models load in the background. Progress is logged on stderr.

    Raises:
        ServingError: a model's folder is missing, unreadable or no model folder; or the port cannot be bound.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    empty = [model for model in settings.models if not _find_versions(model.base_path)]
    with (
        _stop_on_signals() as stop,
        _bind(settings.host, settings.rest_port) as listener,
        _reserve_grpc_port(settings) as (grpc_port, no_grpc),
    ):
        settings = dataclasses.replace(settings, grpc_port=grpc_port)
        _log_to_stderr()
        _announce(settings, listener)
        if no_grpc:
            logger.warning("gRPC is off: %s", no_grpc)
        for model in empty:
            logger.warning("no version of %s under %s yet; waiting for one", model.name, model.base_path)
        stop.run(_server(settings), listener)


def _find_versions(base_path: Path) -> dict[int, Path]:
    try:
        versions = find_versions(base_path)
    except OSError as error:
        raise ServingError(f"MODEL_DIR {base_path}: cannot be read: {error.strerror}") from None
    if not versions and (base_path / GRAPH_FILE).exists():
        raise ServingError(
            f"MODEL_DIR {base_path}: holds a {GRAPH_FILE} itself, where a folder of versions (1/, 2/, ...) is wanted; "
            f"put the model into a folder named by an integer and serve the folder around it"
        )
    return versions


def _bind(host: str, port: int, option: str = "--rest-port") -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server puts the address into strerror; a resolver's error number is none of the system's.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ServingError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None


@contextlib.contextmanager
def _reserve_grpc_port(settings: ServerSettings) -> Iterator[tuple[int | None, str]]:
    """The port for gRPC, held for as long as the block runs, or None; and why there is none though one was asked for.

    gRPC binds its port itself, and shares it with whoever does so too (SO_REUSEPORT). So the port is first bound alone,
    which says whether it is free, and then held by a socket that does not listen.
    """
    if settings.grpc_port is None:
        yield None, ""
        return
    try:
        with _bind(settings.host, settings.grpc_port, "--grpc-port") as alone:
            family, address = alone.family, alone.getsockname()
    except ServingError as error:
        if not settings.grpc_optional:
            raise
        yield None, str(error)
        return
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        yield int(address[1]), ""


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def _announce(settings: ServerSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    for model in settings.models:
        name = urllib.parse.quote(model.name, safe="")
        logger.info("serving %s at http://%s:%d/v1/models/%s", model.name, shown, port, name)
    if settings.grpc_port is not None:
        logger.info("gRPC at %s:%d", shown, settings.grpc_port)


class _Stop:
    """Whether SIGTERM or SIGINT came. A flag: what a handler raises is lost where Python ignores exceptions, as in the
    weak references' callbacks that every import runs."""

    def __init__(self) -> None:
        self._asked = False
        self._server: uvicorn.Server | None = None

    def handle(self, *_: object) -> None:
        """A signal handler."""
        self._asked = True
        if self._server is not None:
            self._server.should_exit = True

    def run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        """Run `server` until a signal comes; not at all where one came before."""
        self._server = server
        if not self._asked:
            server.run(sockets=[listener])


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """Notes SIGTERM and SIGINT inside the block. uvicorn handles both while it runs and raises them once more after."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """A server that takes no new gRPC calls either once it takes no new connections."""

    def __init__(self, app: ServingApp, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what is in progress; the application's own shutdown, at the end of it, waits for gRPC's calls."""
        stopping = asyncio.create_task(self._app.stop_grpc())
        await super().shutdown(sockets)
        await stopping


def _server(settings: ServerSettings) -> uvicorn.Server:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        lifespan="on",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    return _Server(app, config)
