"""Creates the observers of requests that the settings ask for: metrics, an access log, traces."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from tpuembed_serving.batching.queue import QueuedRequest
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.request_record import Headers, Observer, RequestRecord
from tpuembed_serving.core.servable import Servable, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.settings import TelemetrySettings
from tpuembed_serving.telemetry.access_log import AccessLog, check_writable
from tpuembed_serving.telemetry.metrics import (
    ServerMetrics,
    Snapshot,
    merge_snapshots,
    process_snapshot,
    to_text,
    version_snapshot,
)
from tpuembed_serving.telemetry.tracing import Tracing, check_tracing, make_provider
from tpuembed_serving.workers.link import WorkerGroup, WorkerLink

__all__ = ["Telemetry", "check_telemetry"]

_METRICS: Final = "metrics"
"""The topic of a worker's question for the metrics of all workers."""
_GATHER_SECONDS: Final = 8.0
"""Less than Prometheus' timeout of ten seconds."""


def check_telemetry(settings: TelemetrySettings) -> None:
    """Raise a TpuEmbedError if `Telemetry` would. Call it before workers start: a failing worker is restarted forever."""
    if settings.traces:
        check_tracing()
    if settings.access_log is not None:
        check_writable(settings.access_log)


class Telemetry:
    """The observers of one process. Their files are opened when it is created.

    Attributes:
        metrics: None if the settings ask for none.
        observes: True if there is any observer.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        executor: ModelExecutor | None,
        worker_group: WorkerGroup,
        keys: ApiKeys | None = None,
    ) -> None:
        """Create the observers that `settings` ask for. The batches of `executor` are counted, if models run here."""
        self._worker_group = worker_group
        self.metrics: ServerMetrics | None = None
        observers: list[Observer] = []
        if settings.metrics_path is not None:
            self.metrics = metrics = ServerMetrics((lambda: executor.waiting) if executor else int, keys)
            worker_group.register(_METRICS, lambda _: metrics.snapshot())
            observers.append(metrics)
        if settings.access_log is not None:
            observers.append(AccessLog(settings.access_log))
        if settings.traces:
            check_tracing()
            observers.append(Tracing(make_provider()))
        self._observers = tuple(observers)
        self.observes = bool(observers)
        self._shows_ids = any(one.wants_request_id for one in observers)
        if observers and executor is not None:
            executor.watch = _Watch(executor.pool_name, self.metrics)

    def begin(self, entrypoint: str, method: str, path: bytes, headers: Headers, api: str = "") -> RequestRecord:
        """Create the record of a request."""
        record = RequestRecord(entrypoint, method, path, headers, api)
        if self._shows_ids:
            record.ensure_request_id()
        return record

    def finish(self, record: RequestRecord) -> None:
        """Pass the record of an answered request to the observers."""
        for observer in self._observers:
            observer.finish(record)

    def close(self) -> None:
        """Close the observers. Each writes its queued records first."""
        for observer in self._observers:
            observer.close()

    async def metrics_text(self, versions: Callable[[], Iterable[tuple[str, Sequence[VersionStatus]]]]) -> str:
        """Return the metrics of all processes of this server in Prometheus' text format.

        Args:
            versions: returns the versions of each model, as all processes have them. It may block.

        Raises:
            TimeoutError: a process is busy with a new config.
        """
        async with asyncio.timeout(_GATHER_SECONDS):
            return to_text(await asyncio.to_thread(self._merged, versions))

    def _merged(self, versions: Callable[[], Iterable[tuple[str, Sequence[VersionStatus]]]]) -> Snapshot:
        parts: list[Snapshot] = self._worker_group.gather(_METRICS)
        if isinstance(self._worker_group, WorkerLink):
            parts.append(process_snapshot(os.getppid()))  # the supervisor, which has no observers
        return merge_snapshots([*parts, version_snapshot(versions())])

    def watching(self, load: Callable[[Path], Servable]) -> Callable[[Path], Servable]:
        """Return `load` with its calls counted."""
        metrics = self.metrics
        if metrics is None:
            return load

        def counted(version_dir: Path) -> Servable:
            started = time.perf_counter()
            ok = False
            try:
                servable = load(version_dir)
                ok = True
            finally:
                metrics.loaded(str(version_dir), time.perf_counter() - started, ok)
            return servable

        return counted

    def logged(self, model: str, code: Code) -> None:
        """Count a sampled request by what became of its log."""
        if self.metrics is not None:
            self.metrics.logged(model, code)

    def warmed_up(self, version_dir: Path, seconds: float, records: int, error: StatusError | None) -> None:
        """Count the warmup of a version, successful or not."""
        if self.metrics is not None:
            self.metrics.warmed_up(str(version_dir), seconds, records, error)


class _Watch:
    """A callback of an executor: stores the times of a batch in the records of its requests, and counts the batch."""

    def __init__(self, pool: str, metrics: ServerMetrics | None) -> None:
        self._pool, self._metrics = pool, metrics

    def __call__(self, requests: Sequence[QueuedRequest], seconds: float, now: float) -> None:
        """Store the times. `now` is the time of the clock that `requests[i].entered` is from."""
        # The event loop's clock does not advance during a run on its own thread.
        waited = [max(0.0, now - seconds - request.entered) for request in requests]
        for request, queue_seconds in zip(requests, waited, strict=True):
            if request.record is not None:
                request.record.ran(request.rows, queue_seconds, seconds)
        if self._metrics is not None:
            self._metrics.ran(self._pool, [request.rows or 1 for request in requests], waited)
