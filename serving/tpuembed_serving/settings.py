"""What a server is told when it starts: frozen, and valid once built."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.checks import check_positive
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.models.policies import LatestVersions, VersionPolicy

__all__ = [
    "DEFAULT_LOAD",
    "BatchingSettings",
    "LoadSettings",
    "ModelSettings",
    "ServerSettings",
    "TelemetrySettings",
    "check_models",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model.

    Attributes:
        name: what its URLs call it.
        base_path: the folder whose integer-named children are its versions.
        policy: which of them are served.
        labels: what requests may call a version, such as "stable", and which version that is.
    """

    name: str
    base_path: Path
    policy: VersionPolicy = dataclasses.field(default_factory=LatestVersions)
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"model at {self.base_path}: its name is empty; give one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What a repository does about versions that fail to load, and about labels of versions that are not loaded.

    Attributes:
        max_retries: how often a version that failed is tried again, until its files change.
        retry_seconds: the pause before each retry.
        labels_for_unavailable: whether a new label may name a version that is not available.
    """

    max_retries: int = 5
    retry_seconds: float = 60.0
    labels_for_unavailable: bool = False

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ConfigError(f"max_retries is {self.max_retries}: give 0, for none, or more")
        check_positive("retry_seconds", self.retry_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """Which models' requests share runs, and how many.

    Attributes:
        enabled: of all models, or of none; None is of those whose graphs prove that rows do not depend on each other.
        parameters: TensorFlow Serving's, of all models that have none of their own.
        per_model: whether a version may bring its own, in a file `batching_params.pbtxt`.
        max_rows: of a run of several requests, where there are no parameters.
    """

    enabled: bool | None = None
    parameters: BatchingParameters | None = None
    per_model: bool = False
    max_rows: int = 512

    def __post_init__(self) -> None:
        check_positive("max_rows", self.max_rows)
        if self.parameters is not None and not self.enabled:
            raise ConfigError(
                "batching parameters are given and batching is not enabled; give --enable-batching as well"
            )
        if self.per_model and not self.enabled:
            raise ConfigError(
                "batching parameters of each model are asked for and batching is not enabled; give --enable-batching as well"
            )

    def covers(self, is_proven: bool) -> bool:
        """Whether requests of a signature share runs of which that is proven to change no answer, or is not."""
        return is_proven if self.enabled is None else self.enabled


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """What operators see of requests; nothing by default.

    Attributes:
        metrics_path: where Prometheus finds metrics, on the REST port; None is nowhere.
        access_log: the file that has a line of JSON for every request; "-" is stderr, None is nowhere.
        traces: whether spans are made, and exported as the OTEL_* variables of the environment say.
    """

    metrics_path: str | None = None
    access_log: str | None = None
    traces: bool = False

    def __post_init__(self) -> None:
        path = self.metrics_path
        if path is not None and (
            not path.startswith("/") or path.lower().startswith(_OWN_PATHS) or set(path) & set("?{}")
        ):
            raise ConfigError(f"metrics_path is {path!r}: give a path that starts with / and that nothing else has")


_OWN_PATHS: Final = ("/v1/", "/healthz", "/readyz", "/models", "/docs", "/openapi.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One server.

    Attributes:
        models: what it serves, each under its own name; none is fine for a server that is told over gRPC, or by its config.
        config_file: where `models` came from; read again every `config_poll_seconds`, and never where those are None.
        load: retries and labels.
        workers: how many processes answer requests.
        verify_on_load: compare every file of a version that has a manifest with its checksum before it is loaded.
        host, rest_port: where the REST API listens; port 0 picks a free one.
        grpc_port: where the gRPC API listens, on the same host; None is nowhere.
        grpc_optional: go on without gRPC where its port is taken.
        poll_seconds: the pause between two looks at the models' folders.
        rest_timeout_ms: how long a request may take before it is answered 504.
        run_threads: how many TensorFlow runs are in progress at once.
        max_queued_requests: how many more may wait for a thread before they are answered 503.
        max_body_bytes: the largest request body; None is no limit, as in TensorFlow Serving.
        lame_duck_seconds: how long requests are answered after SIGTERM, and clients are asked to go elsewhere, before the port
            is closed; 0 closes it at once.
        drain_seconds: how long requests in progress may take to finish once the port is closed.
        listen_when_loaded: open the ports only once each model's first load has ended; otherwise they are open from the start,
            and requests of models are UNAVAILABLE until then.
        prewarm: read mapped tables, and compare them with their checksums, before a version is available.
        random_access: have a lookup in a mapped table that is not in memory read one page, without the disk's readahead.
        batching: which requests share runs.
        target: HOST:PORT of the gRPC API of a TensorFlow Serving that runs the models, which are here by name alone; None runs
            them here.
        telemetry: metrics, access log and traces.
        security: API keys, TLS, other sites' pages, limits of connections.
    """

    models: tuple[ModelSettings, ...]
    config_file: Path | None = None
    config_poll_seconds: float | None = None
    load: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    workers: int = 1
    verify_on_load: bool = False
    host: str = "127.0.0.1"
    rest_port: int = 8501
    grpc_port: int | None = None
    grpc_optional: bool = False
    poll_seconds: float = 1.0
    rest_timeout_ms: int = 30_000
    run_threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    max_queued_requests: int = 1000
    max_body_bytes: int | None = None
    lame_duck_seconds: float = 5.0
    drain_seconds: float = 30.0
    listen_when_loaded: bool = False
    prewarm: bool = False
    random_access: bool = False
    batching: BatchingSettings = dataclasses.field(default_factory=BatchingSettings)
    target: str | None = None
    telemetry: TelemetrySettings = dataclasses.field(default_factory=TelemetrySettings)
    security: SecuritySettings = dataclasses.field(default_factory=SecuritySettings)

    def __post_init__(self) -> None:
        check_models(self.models)
        for name in ("rest_port", "grpc_port"):
            _check_port(name, getattr(self, name))
        for name in (
            "poll_seconds",
            "rest_timeout_ms",
            "run_threads",
            "max_queued_requests",
            "drain_seconds",
            "workers",
        ):
            check_positive(name, getattr(self, name))
        if self.lame_duck_seconds < 0:
            raise ConfigError(f"lame_duck_seconds is {self.lame_duck_seconds:g}: give 0, for none, or more")
        for name in ("max_body_bytes", "config_poll_seconds"):
            check_positive(name, getattr(self, name))

    @classmethod
    def for_target(cls, target: str, *, name: str, **options: Any) -> "ServerSettings":
        """Settings for one model that runs in the TensorFlow Serving at `target`, HOST:PORT of its gRPC API."""
        return cls(models=(ModelSettings(name=name, base_path=Path()),), target=target, **options)

    @classmethod
    def for_model_dir(
        cls, model_dir: str | os.PathLike[str], *, name: str | None = None, **options: Any
    ) -> "ServerSettings":
        """Settings for one model; `name` defaults to the folder's own name, symbolic links resolved."""
        base_path = Path(model_dir).absolute()
        model = ModelSettings(name=base_path.resolve().name if name is None else name, base_path=base_path)
        return cls(models=(model,), **options)


def check_models(models: Iterable[ModelSettings]) -> None:
    """Raise ConfigError where two models have one name."""
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"model names must differ: {', '.join(twice)} is given more than once")


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"{name} is {port}: give a port from 0 (any free one) to 65535")


DEFAULT_LOAD: Final = LoadSettings()
"""As TensorFlow Serving: five retries, a minute apart; labels of available versions alone."""
