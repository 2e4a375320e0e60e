"""Serves models on a port, in one process or several, until SIGTERM or SIGINT."""

import contextlib
import dataclasses
import logging
import shlex
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tpuembed.errors import ServingError, reason
from tpuembed_serving.core.noop import noop
from tpuembed_serving.http.app import create_app
from tpuembed_serving.http.server import prepare_tensorflow, run_app
from tpuembed_serving.models.config_file import ConfigFile
from tpuembed_serving.models.stores import Puller
from tpuembed_serving.models.versions import GRAPH_FILE, find_versions
from tpuembed_serving.settings import ModelSettings, ServerSettings
from tpuembed_serving.telemetry.observers import check_telemetry
from tpuembed_serving.telemetry.server_log import log_to_stderr
from tpuembed_serving.telemetry.state_log import StateLog
from tpuembed_serving.workers.sockets import bind, reserve
from tpuembed_serving.workers.stopping import Stop, stop_on_signals
from tpuembed_serving.workers.supervisor import Supervisor

__all__ = ["serve"]

logger = logging.getLogger("tpuembed_serving")

_Configure = Callable[[Sequence[ModelSettings]], None]


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, answer the accepted requests, then return.

    The ports are bound at once. The models load in the background. Progress is logged to stderr.

    Raises:
        ServingError: a model's folder is missing, unreadable, or not a folder of versions; or a port cannot be bound.
    """
    prepare_tensorflow(settings.log)
    check_telemetry(settings.telemetry)
    here = () if settings.target else settings.models
    empty = [
        (model, path)
        for model in here
        if isinstance(path := model.base_path, Path) and not _find_versions(path, _source(settings, model))
    ]
    with (
        stop_on_signals() as stop,
        _listener(settings) as listener,
        _reserve_grpc_port(settings) as (grpc_port, no_grpc),
    ):
        settings = dataclasses.replace(settings, rest_port=listener.getsockname()[1], grpc_port=grpc_port)
        log_to_stderr(settings.log)
        if no_grpc:
            logger.warning("gRPC is off: %s", no_grpc)
        for model, path in empty:
            below = next(path.glob(f"*/*/{GRAPH_FILE}"), None)
            hint = "" if below is None else f". {below.parents[1]} has a version: give that folder to serve it"
            logger.warning("model %s: %s has no version yet. Waiting for one%s", model.name, path, hint)
        with _pulling(settings) as configure:
            if settings.workers > 1:
                _supervise(settings, stop, configure)
            else:
                _serve_here(settings, listener, stop, configure)


@contextlib.contextmanager
def _pulling(settings: ServerSettings) -> Iterator[_Configure]:
    """Pull versions from stores inside the block. Yields what takes the models of a reload."""
    if settings.cache is None:
        yield noop
        return
    puller = Puller(settings.cache, settings.poll_seconds)
    with puller.running(settings.models):
        yield puller.configure


def _listener(settings: ServerSettings) -> contextlib.AbstractContextManager[socket.socket]:
    """Bind the REST port, or reserve it for several workers, so that a port in use fails at once."""
    listen = reserve if settings.workers > 1 else bind
    return listen(settings.host, settings.rest_port, "--rest-port")


def _serve_here(settings: ServerSettings, listener: socket.socket, stop: Stop, configure: _Configure) -> None:
    log = StateLog(lambda: _announce_ready(settings))
    app = create_app(settings, on_change=log.note, on_configured=configure)
    with _following_config(settings, app.repository.reload):
        run_app(app, listener, stop, on_listening=lambda: _announce(settings, log))


def _supervise(settings: ServerSettings, stop: Stop, configure: _Configure) -> None:
    log = StateLog(lambda: _announce_ready(settings))
    supervisor = Supervisor(
        settings,
        on_listening=lambda: _announce(settings, log),
        on_change=lambda view: log.note(view.progress, view.ready),
        on_configured=configure,
    )
    stop.call(lambda: supervisor.stop(stop.stage))
    with _following_config(settings, supervisor.reload):
        supervisor.run()


@contextlib.contextmanager
def _following_config(settings: ServerSettings, reload: Callable[[Sequence[ModelSettings]], None]) -> Iterator[None]:
    if settings.config_file is None or settings.config_poll_seconds is None:
        yield
        return
    config = ConfigFile(settings.config_file, settings.models, settings.config_poll_seconds, reload)
    config.start()
    try:
        yield
    finally:
        config.stop()


def _source(settings: ServerSettings, model: ModelSettings) -> str:
    """Return the name of a model's folder for error messages."""
    if settings.config_file is None:
        return f"MODEL_DIR {model.base_path}"
    return f"config {settings.config_file}, model {model.name}: base_path {model.base_path}"


def _find_versions(base_path: Path, source: str) -> dict[int, Path]:
    try:
        versions = find_versions(base_path)
    except OSError as error:
        raise ServingError(f"{source}: cannot be read: {reason(error)}") from None
    if not versions and (base_path / GRAPH_FILE).exists():
        remedy = "Move the model into a folder named by an integer, and serve the parent of that folder"
        if base_path.name.isdecimal():
            remedy = f"It is version {base_path.name}. Give its parent folder, {base_path.parent}"
            if source.startswith("MODEL_DIR"):
                remedy = f"It is version {base_path.name}. Run: tpuembed serve {shlex.quote(str(base_path.parent))}"
        raise ServingError(
            f"{source}: contains {GRAPH_FILE}, so it is one version, not a folder of versions (1/, 2/, ...). {remedy}"
        )
    return versions


@contextlib.contextmanager
def _reserve_grpc_port(settings: ServerSettings) -> Iterator[tuple[int | None, str]]:
    """Reserve the gRPC port inside the block. Yields the port, or None, and why an optional port could not be reserved.

    gRPC binds its port itself, and shares it with other sockets that allow sharing.
    """
    with contextlib.ExitStack() as stack:
        port, fault = None, ""
        try:
            if settings.grpc_port is not None:
                held = stack.enter_context(reserve(settings.host, settings.grpc_port, "--grpc-port"))
                port = int(held.getsockname()[1])
        except ServingError as error:
            if not settings.grpc_optional:
                raise
            fault = str(error)
        yield port, fault


def _announce(settings: ServerSettings, log: StateLog) -> None:
    """Log where the server listens."""
    url = _url(settings, settings.host)
    for model in settings.models:
        logger.info("serving %s at %s", model.name, _model_url(url, model.name))
    if not settings.models:
        logger.info("no model to serve yet, listening at %s", url)
    if settings.grpc_port is not None:
        logger.info("gRPC at %s:%d", _in_url(settings.host), settings.grpc_port)
    log.listening()


def _announce_ready(settings: ServerSettings) -> None:
    """Log how to use the server."""
    url = _url(settings, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host))
    for model in settings.models:
        model_url = _model_url(url, model.name)
        logger.info("ready: %s", model_url, extra={"fields": {"model": model.name, "url": model_url}})
    if not settings.models:
        logger.info("ready: %s", url, extra={"fields": {"url": url}})
    logger.info("docs: %s/docs", url, extra={"fields": {"url": f"{url}/docs"}})


def _url(settings: ServerSettings, host: str) -> str:
    scheme = "https" if settings.security.tls else "http"
    return f"{scheme}://{_in_url(host)}:{settings.rest_port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _model_url(url: str, name: str) -> str:
    return f"{url}/v1/models/{urllib.parse.quote(name, safe='')}"
