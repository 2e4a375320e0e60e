"""What operators see of requests: metrics, an access log, traces; each off unless the settings ask for it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from tpuembed_serving.batching.queue import QueuedRequest
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.servable import Servable
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.settings import TelemetrySettings
from tpuembed_serving.telemetry.access_log import AccessLog, check_writable
from tpuembed_serving.telemetry.metric_types import merge_snapshots, to_text
from tpuembed_serving.telemetry.metrics import ServerMetrics
from tpuembed_serving.telemetry.request_record import Headers, Observer, RequestRecord, set_current_record
from tpuembed_serving.telemetry.tracing import Tracing, check_tracing, make_provider
from tpuembed_serving.workers.link import WorkerGroup

__all__ = ["Telemetry", "check_telemetry"]

_METRICS: Final = "metrics"
"""The topic by which workers ask each other for theirs."""
_GATHER_SECONDS: Final = 8.0
"""Less than the ten seconds that Prometheus waits."""


def check_telemetry(settings: TelemetrySettings) -> None:
    """Raise a TpuEmbedError where `Telemetry.of` would: before workers do, which are started again and again."""
    if settings.traces:
        check_tracing()
    if settings.access_log is not None:
        check_writable(settings.access_log)


class Telemetry:
    """The observers of one process. It opens their files, so it is made where the server starts.

    Attributes:
        metrics: None where nobody asks for them.
        observes: whether there is any observer.
    """

    def __init__(self, metrics: ServerMetrics | None, observers: Sequence[Observer], worker_group: WorkerGroup) -> None:
        self.metrics = metrics
        self._observers = tuple(observers)
        self.observes = bool(self._observers)
        self._shows_ids = any(one.wants_request_id for one in self._observers)
        self._worker_group = worker_group
        if metrics is not None:
            worker_group.register(_METRICS, lambda _: metrics.snapshot())

    @classmethod
    def of(cls, settings: TelemetrySettings, executor: object, worker_group: WorkerGroup) -> Self:
        """What `settings` ask for; runs of `executor` are counted where it is one of this process."""
        observers: list[Observer] = []
        metrics = None
        if settings.metrics_path is not None:
            local = executor if isinstance(executor, ModelExecutor) else None
            metrics = ServerMetrics((lambda: local.waiting) if local else int)
            observers.append(metrics)
        if settings.access_log is not None:
            observers.append(AccessLog(settings.access_log))
        if settings.traces:
            check_tracing()
            observers.append(Tracing(make_provider()))
        if observers and isinstance(executor, ModelExecutor):
            executor.watch = _Watch(executor.pool_name, metrics)
        return cls(metrics, observers, worker_group)

    def begin(self, entrypoint: str, method: str, path: bytes, headers: Headers, api: str = "") -> RequestRecord:
        """A request came. What this task does from here on belongs to the record."""
        record = RequestRecord(entrypoint, method, path, headers, api)
        if self._shows_ids:
            record.ensure_request_id()
        set_current_record(record)
        return record

    def finish(self, record: RequestRecord) -> None:
        """It was answered."""
        for observer in self._observers:
            observer.finish(record)

    def close(self) -> None:
        """Write what is not written yet."""
        for observer in self._observers:
            observer.close()

    async def metrics_text(self) -> str:
        """Prometheus' text, of all processes of this server.

        Raises:
            TimeoutError: one of them is busy with a new config.
        """
        async with asyncio.timeout(_GATHER_SECONDS):
            return to_text(merge_snapshots(await asyncio.to_thread(self._worker_group.gather, _METRICS)))

    def watching(self, load: Callable[[Path], Servable]) -> Callable[[Path], Servable]:
        """`load`, with its loads counted."""
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

    def warmed_up(self, version_dir: Path, seconds: float, records: int, error: StatusError | None) -> None:
        """A version's records were run, or failed."""
        if self.metrics is not None:
            self.metrics.warmed_up(str(version_dir), seconds, records, error)


class _Watch:
    """Told of runs by an executor: gives requests their times, and counts the run."""

    def __init__(self, pool: str, metrics: ServerMetrics | None) -> None:
        self._pool, self._metrics = pool, metrics

    def __call__(self, requests: Sequence[QueuedRequest], seconds: float, now: float) -> None:
        """`now` is on the clock that the requests' times are on."""
        # The event loop's clock stands still while a run is on its own thread.
        waited = [max(0.0, now - seconds - request.entered) for request in requests]
        for request, queue_seconds in zip(requests, waited, strict=True):
            if request.record is not None:
                request.record.ran(request.rows, queue_seconds, seconds)
        if self._metrics is not None:
            self._metrics.ran(self._pool, [request.rows or 1 for request in requests], waited)
