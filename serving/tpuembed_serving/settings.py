"""Settings of a server: frozen, and checked when they are created."""

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tpuembed.errors import ConfigError
from tpuembed.files import FilePath, UrlPath, as_path
from tpuembed.runtime.cpus import available_cpus
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.reload_paths import ReloadPaths
from tpuembed_serving.core.request_record import RequestLogging
from tpuembed_serving.core.security import SecuritySettings, check_positive
from tpuembed_serving.models.policies import LatestVersions, VersionPolicy

__all__ = [
    "LOG_FORMATS",
    "REST_BODY_BYTES",
    "BatchingSettings",
    "LogSettings",
    "ModelSettings",
    "ServerSettings",
    "TelemetrySettings",
    "check_models",
    "reload_paths",
]


# Parsing JSON keeps Python's lock for 6 ms per MB, and other requests wait meanwhile. A body of this size is rare enough.
REST_BODY_BYTES: Final = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model to serve.

    Attributes:
        name: its name in URLs and requests.
        base_path: its folder, or its URL in an object store. The children whose names are integers are its versions.
        policy: which versions are served.
        labels: names that requests may use for versions, such as "stable" -> 3.
        request_logging: how its requests are logged; None is not at all.
        within: where its base path must lead whenever a version is loaded, because a client chose it; None for the operator's.
    """

    name: str
    base_path: FilePath
    policy: VersionPolicy = dataclasses.field(default_factory=LatestVersions)
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    request_logging: RequestLogging | None = None
    within: ReloadPaths | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"model at {self.base_path}: its name is empty. Give it a name")


def reload_paths(models: Sequence[ModelSettings]) -> ReloadPaths:
    """Return the folders that clients of a server that starts with `models` may reload."""
    prefixes = [model.request_logging.filename_prefix for model in models if model.request_logging is not None]
    return ReloadPaths.of([model.base_path for model in models], prefixes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """Settings of batching.

    Attributes:
        enabled: True batches requests of all models, False of none. None batches those whose graphs prove that rows are
            independent.
        parameters: TensorFlow Serving's batching parameters.
        max_rows: the most rows of a batch of several requests, if there are no parameters.
    """

    enabled: bool | None = None
    parameters: BatchingParameters | None = None
    max_rows: int = 512

    def __post_init__(self) -> None:
        check_positive("max_rows", self.max_rows)
        if self.parameters is not None and not self.enabled:
            raise ConfigError(
                "batching parameters are given, but batching is not enabled. Give --enable-batching as well"
            )

    def covers(self, is_proven: bool) -> bool:
        """Returns True if requests of a signature are batched, given whether its rows are proven independent."""
        return is_proven if self.enabled is None else self.enabled


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Metrics, access log and traces; all off by default.

    Attributes:
        metrics_path: the URL path of Prometheus metrics on the REST port; None is off.
        access_log: the file that gets a line of JSON for every request; "-" is stderr, None is off.
        traces: whether spans are exported, as the OTEL_* environment variables configure.
    """

    metrics_path: str | None = None
    access_log: str | None = None
    traces: bool = False

    def __post_init__(self) -> None:
        path = self.metrics_path
        if path is not None and (
            not path.startswith("/") or _is_own(path) or path.lower().startswith("/v1/") or set(path) & set("?{}")
        ):
            taken = ", ".join(("/v1/", *_OWN_PATHS[1:]))
            raise ConfigError(
                f"metrics_path is {path!r}. Give a path that starts with /, has no ? {{ }}, and is none of {taken}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings of the log on stderr.

    Attributes:
        format: "text", or "json" for one object per line.
        level: the least level, of the module `logging`. DEBUG also shows TensorFlow's own messages, in its own format.
    """

    format: str = "text"
    level: int = logging.INFO

    def __post_init__(self) -> None:
        if self.format not in LOG_FORMATS:
            raise ConfigError(f"format of the log is {self.format!r}. Give one of {', '.join(LOG_FORMATS)}")


LOG_FORMATS: Final = ("text", "json")
_OWN_PATHS: Final = (
    *("/v1/models", "/v2", "/healthz", "/readyz", "/models", "/docs", "/openapi.json", "/console", "/ping"),
    "/invocations",
)
_ROUTE: Final = re.compile(r"/[\w.~!$&'()*+,;=:@/-]*", re.ASCII)
"""A URL path without a query and without escapes."""


def _is_own(path: str) -> bool:
    """Returns True if `path` is a route of the server, or below one."""
    lowered = path.lower()
    return path == "/" or any(lowered == own or lowered.startswith(f"{own}/") for own in _OWN_PATHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        models: the models, each with another name. They may be empty: gRPC or the config file may add models later.
        config_file: the file of `models`. It is read again every `config_poll_seconds`; None is never.
        cache: the folder, of this server alone, into which versions are pulled from object stores; None refuses models in stores.
        workers: how many processes answer requests.
        host, rest_port: the address of the REST API; port 0 picks a free port.
        grpc_port: the port of the gRPC API on the same host; None is off.
        grpc_optional: serve without gRPC if its port is in use.
        poll_seconds: the pause between two polls of the models' folders.
        rest_timeout_ms: the longest duration of a request, which is then answered 504.
        run_threads: how many TensorFlow runs are in progress at once.
        max_queued_requests: how many more requests may wait for a thread. Others are answered 503.
        max_body_bytes: the largest request body, over REST and gRPC. None is REST_BODY_BYTES over REST, and no limit over
            gRPC, as in TensorFlow Serving.
        max_request_memory: about how many bytes a request, and all requests in flight together, may take in one process:
            the body, its decoding, the inputs and the outputs. Requests beyond it are refused before the work starts.
        lame_duck_seconds: how long requests are still answered after SIGTERM, while clients are told to use another server.
            Then the port is closed; 0 closes it at once.
        drain_seconds: how long requests in progress may take after the port is closed.
        lookups: what runs the lookups of exports with layout mmap: "native" (the C library), "tensorflow", or "auto", the
            faster one for each request.
        batching: which requests are batched.
        target: HOST:PORT of the gRPC API of a TensorFlow Serving that runs the models; None runs them here.
        row_store: the URL of the Redis that has the rows of versions without tables; None if there is none.
        telemetry: metrics, access log and traces.
        default_model: the model of requests whose URL names none. None is the only model; with several, they are refused.
        health_route: a URL path that answers as /readyz does, besides it; None is none.
        predict_route: a URL path that answers predict requests for the default model, as /invocations does; None is none.
        log: the format and the level of the log.
        security: API keys, TLS, CORS, limits of connections.
        reload_paths: the folders that clients may reload. None computes them from `models`; a copy of the settings keeps them.
    """

    models: tuple[ModelSettings, ...]
    config_file: Path | None = None
    config_poll_seconds: float | None = None
    cache: Path | None = None
    workers: int = 1
    host: str = "127.0.0.1"
    rest_port: int = 8501
    grpc_port: int | None = None
    grpc_optional: bool = False
    poll_seconds: float = 1.0
    rest_timeout_ms: int = 30_000
    run_threads: int = dataclasses.field(default_factory=available_cpus)
    max_queued_requests: int = 1000
    max_body_bytes: int | None = None
    max_request_memory: int = 1 << 30
    lame_duck_seconds: float = 5.0
    drain_seconds: float = 30.0
    lookups: Literal["auto", "native", "tensorflow"] = "auto"
    batching: BatchingSettings = dataclasses.field(default_factory=BatchingSettings)
    target: str | None = None
    row_store: str | None = None
    telemetry: TelemetrySettings = dataclasses.field(default_factory=TelemetrySettings)
    default_model: str | None = None
    health_route: str | None = None
    predict_route: str | None = None
    log: LogSettings = dataclasses.field(default_factory=LogSettings)
    security: SecuritySettings = dataclasses.field(default_factory=SecuritySettings)
    reload_paths: ReloadPaths | None = None

    def __post_init__(self) -> None:
        if self.reload_paths is None:
            object.__setattr__(self, "reload_paths", reload_paths(self.models))
        self.check_served(self.models)
        for model in self.models:
            if self.cache is None and isinstance(model.base_path, UrlPath):
                raise ConfigError(
                    f"model {model.name}: {model.base_path} is in a store, and there is no cache. Give cache=FOLDER"
                )
        if self.row_store is not None:
            from tpuembed.row_store import check_url  # here, because it imports numpy

            check_url(self.row_store)
        if self.lookups not in ("auto", "native", "tensorflow"):
            raise ConfigError(f"lookups must be auto, native or tensorflow, got {self.lookups!r}")
        if self.lookups == "native":
            from tpuembed.native.lookup import available  # here, because it imports numpy

            if fault := available():
                raise ConfigError(f"lookups is native, but there is no C library for them: {fault}. Or choose auto")
        for name in ("rest_port", "grpc_port"):
            _check_port(name, getattr(self, name))
        for name in (
            "poll_seconds",
            "rest_timeout_ms",
            "run_threads",
            "max_queued_requests",
            "drain_seconds",
            "workers",
            "max_request_memory",
        ):
            check_positive(name, getattr(self, name))
        if self.lame_duck_seconds < 0:
            raise ConfigError(f"lame_duck_seconds is {self.lame_duck_seconds:g}. Give 0 (close at once) or more")
        for name in ("max_body_bytes", "config_poll_seconds"):
            check_positive(name, getattr(self, name))
        self._check_routes()

    def check_served(self, models: Sequence[ModelSettings]) -> None:
        """Raise ConfigError if `models` do not fit together, or leave a route that names no model without one.

        They are those of the start, or of a reload.
        """
        check_models(models)
        names = [model.name for model in models]
        if self.default_model is not None and self.default_model not in names:
            raise ConfigError(
                f"default_model is {self.default_model!r}, and the models are {', '.join(names) or 'none'}. Name one of them"
            )
        if self.predict_route is not None and self.default_model is None and len(names) > 1:
            raise ConfigError(
                f"predict_route {self.predict_route} names no model, and the models are {', '.join(names)}. "
                "Give default_model as well"
            )

    def _check_routes(self) -> None:
        routes = (("health_route", self.health_route, "/health"), ("predict_route", self.predict_route, "/predict"))
        for name, route, example in routes:
            if route is None:
                continue
            if not _ROUTE.fullmatch(route):
                raise ConfigError(
                    f"{name} is {route!r}. Give a path that starts with /, such as {example}, without ? # % {{ }} and spaces"
                )
            if _is_own(route) or route == self.telemetry.metrics_path:
                raise ConfigError(
                    f"{name} is {route}, which is a route of this server. Give another path, such as {example}"
                )
        if self.health_route is not None and self.health_route == self.predict_route:
            raise ConfigError(f"health_route and predict_route are both {self.health_route}. Give two paths")

    @classmethod
    def for_target(cls, target: str, *, name: str, **options: Any) -> "ServerSettings":
        """Return settings for one model that runs in the TensorFlow Serving at `target`, HOST:PORT of its gRPC API."""
        return cls(models=(ModelSettings(name=name, base_path=Path()),), target=target, **options)

    @classmethod
    def for_model_dir(
        cls, model_dir: str | os.PathLike[str], *, name: str | None = None, keep_versions: int = 1, **options: Any
    ) -> "ServerSettings":
        """Return settings for one model, in a folder or at a URL.

        Args:
            model_dir: the folder or URL.
            name: the model's name. The default is the folder's name after resolving symbolic links, or the last part of the URL.
            keep_versions: how many of the newest versions are served.
            options: other fields.
        """
        base_path = as_path(os.fspath(model_dir))
        if isinstance(base_path, UrlPath):
            default = base_path.name or base_path.bucket
        else:
            base_path = base_path.absolute()
            default = base_path.resolve().name
        name = default if name is None else name
        model = ModelSettings(name=name, base_path=base_path, policy=LatestVersions(keep_versions))
        return cls(models=(model,), **options)


def check_models(models: Iterable[ModelSettings]) -> None:
    """Raise ConfigError if two models have the same name."""
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"model names must be unique. Given more than once: {', '.join(twice)}")


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"{name} is {port}. Give a port from 0 (any free port) to 65535")
