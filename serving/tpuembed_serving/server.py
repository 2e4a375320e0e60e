"""Runs the application on a port until it is told to stop."""

import contextlib
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
from tpuembed_serving.app import create_app
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
    with _stop_on_signals() as stop, _bind(settings.host, settings.rest_port) as listener:
        _log_to_stderr()
        _announce(settings, listener)
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


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server puts the address into strerror; a resolver's error number is none of the system's.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ServingError(f"cannot listen on {host} port {port}: {reason}; choose another with --rest-port") from None


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def _announce(settings: ServerSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    for model in settings.models:
        logger.info(
            "serving %s at http://%s/v1/models/%s", model.name, authority, urllib.parse.quote(model.name, safe="")
        )


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


def _server(settings: ServerSettings) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(settings),
        access_log=False,
        log_level="warning",
        lifespan="on",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    return uvicorn.Server(config)
