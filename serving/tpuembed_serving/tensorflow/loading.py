"""Loads a version of a model: checks its files, loads its graph and variables, and warms it up."""

import threading
import time
from pathlib import Path
from typing import Final, Protocol

from tpuembed.runtime.cpus import available_cpus
from tpuembed_serving.core.servable import Servable
from tpuembed_serving.core.status import Code, LoadStopped, StatusError
from tpuembed_serving.models.warmup import warm_up
from tpuembed_serving.settings import ServerSettings
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW

__all__ = ["WarmedUp", "load_version"]

_ROW_STORE_SECONDS: Final = 2.0
"""How long a node of Redis may take for an answer, while a thread waits that other requests could use."""


class WarmedUp(Protocol):
    """Takes the duration of a warm-up, the number of its records, and its error."""

    def __call__(self, version_dir: Path, seconds: float, records: int, error: StatusError | None, /) -> None:
        """Count the warm-up of a version."""


def load_version(
    version_dir: Path, *, settings: ServerSettings, stopping: threading.Event, warmed_up: WarmedUp
) -> Servable:
    """Load a version. Imports TensorFlow in the loading thread, so that the port can answer before.

    Raises:
        StatusError: a file is missing or damaged, TensorFlow cannot load it, or a warm-up request failed.
        LoadStopped: `stopping` is set.
    """
    with IMPORTING_TENSORFLOW:
        from tpuembed_serving.tensorflow import session as runtime
        from tpuembed_serving.tensorflow.row_store import RowStoreOptions

    def give_up(_: int = 0) -> None:
        if stopping.is_set():
            raise LoadStopped(Code.CANCELLED, f"version {version_dir.name}: the server is stopping")

    options = runtime.RunOptions(
        timeout_ms=settings.rest_timeout_ms,
        threads=settings.run_threads,
        lookups=settings.lookups,
        lookup_threads=max(1, available_cpus() // settings.workers),
        row_store=None
        if settings.row_store is None
        else RowStoreOptions(
            settings.row_store, min(_ROW_STORE_SECONDS, settings.rest_timeout_ms / 1000), settings.max_request_memory
        ),
    )
    servable = runtime.load(version_dir, options=options)
    started = time.perf_counter()
    try:
        records = warm_up(version_dir, servable, give_up)
    except BaseException as error:
        servable.close()
        if isinstance(error, StatusError) and not isinstance(error, LoadStopped):
            warmed_up(version_dir, time.perf_counter() - started, 0, error)
        raise
    if records:
        warmed_up(version_dir, time.perf_counter() - started, records, None)
    return servable
