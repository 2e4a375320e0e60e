"""What a server is told when it starts: frozen, and valid once built."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from tpuembed.errors import ConfigError

__all__ = ["ModelSettings", "ServerSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model.

    Attributes:
        name: what its URLs call it.
        base_path: the folder whose integer-named children are its versions.
    """

    name: str
    base_path: Path

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"model at {self.base_path}: its name is empty; give one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One server.

    Attributes:
        models: what it serves, each under its own name.
        host, rest_port: where the REST API listens; port 0 picks a free one.
        poll_seconds: the pause between two looks at the models' folders.
        rest_timeout_ms: how long a request may take before it is answered 504.
        run_threads: how many TensorFlow runs are in progress at once.
        max_queued_requests: how many more may wait for a thread before they are answered 503.
        max_body_bytes: the largest request body; None is no limit, as in TensorFlow Serving.
        drain_seconds: how long requests in progress may take to finish after SIGTERM.
        prewarm: read mapped tables, and compare them with their checksums, before a version is available.
        random_access: have a lookup in a mapped table that is not in memory read one page, without the disk's readahead.
    """

    models: tuple[ModelSettings, ...]
    host: str = "127.0.0.1"
    rest_port: int = 8501
    poll_seconds: float = 1.0
    rest_timeout_ms: int = 30_000
    run_threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    max_queued_requests: int = 1000
    max_body_bytes: int | None = None
    drain_seconds: float = 30.0
    prewarm: bool = False
    random_access: bool = False

    def __post_init__(self) -> None:
        self._check_models()
        if not 0 <= self.rest_port <= 65535:
            raise ConfigError(f"rest_port is {self.rest_port}: give a port from 0 (any free one) to 65535")
        for name in ("poll_seconds", "rest_timeout_ms", "run_threads", "max_queued_requests", "drain_seconds"):
            _check_positive(name, getattr(self, name))
        if self.max_body_bytes is not None:
            _check_positive("max_body_bytes", self.max_body_bytes)

    def _check_models(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ConfigError("no model to serve: give at least one")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"model names must differ: {', '.join(twice)} is given more than once")

    @classmethod
    def for_model_dir(
        cls, model_dir: str | os.PathLike[str], *, name: str | None = None, **options: Any
    ) -> "ServerSettings":
        """Settings for one model; `name` defaults to the folder's own name, symbolic links resolved."""
        base_path = Path(model_dir).absolute()
        model = ModelSettings(name=base_path.resolve().name if name is None else name, base_path=base_path)
        return cls(models=(model,), **options)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}: give a number above 0")
