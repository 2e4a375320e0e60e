"""Metrics of the server: TensorFlow Serving's under their names, and tpuembed's under `:tpuembed:serving:`.

TensorFlow Serving defines its own in servables/tensorflow/util.cc, saved_model_warmup_util.cc and
batching/batching_session.cc, and TensorFlow in cc/saved_model/loader.cc. Latencies are in microseconds. Metrics of
functions that this server lacks are left out: request_log_count, mlmd_map, padding_size.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tpuembed_serving.core.request_record import REST, STAGES, RequestRecord, stage_seconds
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.telemetry.metric_types import Counter, Family, Histogram, Snapshot, exponential

__all__ = ["DEFAULT_PATH", "ServerMetrics"]

DEFAULT_PATH: Final = "/monitoring/prometheus/metrics"

_LATENCY: Final = exponential(10, 1.8, 33)
_QUEUING: Final = exponential(100, 1.2, 52)
_SIZES: Final = exponential(1, 2, 14)
_EXAMPLES: Final = exponential(1, 2, 15)
_INFERENCE: Final = {"predict": "Predict", "classify": "Classify", "regress": "Regress"}
_COUNTED_CALLS: Final = frozenset({"Predict", "Classify", "Regress"})
"""The gRPC methods that are counted, as in TensorFlow Serving."""
_TAKE_EXAMPLES: Final = frozenset({"classify", "regress", "multiinference"})
_MOST_NAMES: Final = 1000
_OTHERS: Final = "(others)"
"""Clients may invent model names. Names after the first `_MOST_NAMES` are counted under this one."""
_FOLDED_AT_ONCE: Final = 512
_MICROS: Final = 1e6

_Run = tuple[str, Sequence[int], Sequence[float]]
"""A batch: the name of its thread pool, the rows of each request, and the seconds that each waited."""


class ServerMetrics:
    """An observer (see `request_record`) of requests, batches and loads.

    The event loop calls `finish` and `ran`. The thread that loads calls `loaded` and `warmed_up`.
    """

    wants_request_id = False

    def __init__(self, queue_depth: Callable[[], int] = lambda: 0) -> None:
        tf_serving, tpuembed = ":tensorflow:serving:", ":tpuembed:serving:"
        self.request_count = Counter(f"{tf_serving}request_count", "model_name", "status")
        self.request_latency = Histogram(f"{tf_serving}request_latency", _LATENCY, "model_name", "API", "entrypoint")
        self.runtime_latency = Histogram(f"{tf_serving}runtime_latency", _LATENCY, "model_name", "API", "runtime")
        self.example_counts = Histogram(f"{tf_serving}request_example_counts", _EXAMPLES, "model")
        self.example_total = Counter(f"{tf_serving}request_example_count_total", "model")
        self.warmup_latency = Histogram(f"{tf_serving}model_warmup_latency", _LATENCY, "model_path", "status")
        self.warmup_records = Counter(f"{tf_serving}model_warmup_records_read", "model_path", "status")
        batching = f"{tf_serving}batching_session:"
        self.queuing_latency = Histogram(f"{batching}queuing_latency", _QUEUING, "thread_pool_name")
        self.run_count = Counter(f"{batching}wrapped_run_count")
        self.input_batch_size = Histogram(f"{batching}input_batch_size", _SIZES)
        self.load_attempts = Counter(":tensorflow:cc:saved_model:load_attempt_count", "model_path", "status")
        self.load_latency = Counter(":tensorflow:cc:saved_model:load_latency", "model_path")
        self.stage_latency = Histogram(f"{tpuembed}stage_latency", _LATENCY, "model_name", "stage")
        self.run_rows = Histogram(f"{tpuembed}run_rows", _SIZES)
        self.run_requests = Histogram(f"{tpuembed}run_requests", _SIZES)
        self._depth_family = Family(f"{tpuembed}queue_depth", "gauge", ())
        self._queue_depth = queue_depth
        self._all: list[Counter | Histogram] = [
            one for one in vars(self).values() if isinstance(one, Counter | Histogram)
        ]
        self._names: set[str] = set()
        self._folding = threading.Lock()
        self._answered: collections.deque[RequestRecord] = collections.deque()
        self._runs: collections.deque[_Run] = collections.deque()

    def finish(self, record: RequestRecord) -> None:
        """Queue a request. Requests are counted many at a time, which is ten times cheaper."""
        self._answered.append(record)
        if len(self._answered) >= _FOLDED_AT_ONCE:
            self._fold()

    def ran(self, pool: str, rows: Sequence[int], queue_seconds: Sequence[float]) -> None:
        """Count a batch of requests of so many rows each, which waited so long."""
        self._runs.append((pool, rows, queue_seconds))
        if len(self._runs) >= _FOLDED_AT_ONCE:
            self._fold()

    def close(self) -> None:
        """Do nothing: metrics have no file."""

    # ---- counting

    def _fold(self) -> None:
        """Count the queued requests and batches. The event loop calls it, or a thread that wants the numbers."""
        with self._folding:
            groups: dict[tuple[str, str, str, Code], list[RequestRecord]] = collections.defaultdict(list)
            for record in _taken(self._answered):
                groups[record.model, record.api, record.entrypoint, record.code].append(record)
            for (model, api, entrypoint, code), records in groups.items():
                if entrypoint == REST or api in _COUNTED_CALLS:
                    self._count(self._name(model), api, entrypoint, code, records)
            self._count_runs(_taken(self._runs))

    def _name(self, model: str) -> str:
        if model not in self._names and len(self._names) >= _MOST_NAMES:
            return _OTHERS
        self._names.add(model)
        return model

    def _count(self, model: str, api: str, entrypoint: str, code: Code, records: list[RequestRecord]) -> None:
        """Count requests. Only those that succeed have a latency, as in TensorFlow Serving."""
        self.request_count.add((model, code.name), len(records))
        if code is not Code.OK:
            return
        micros = _MICROS * np.array([record.ended - record.started for record in records])
        self.request_latency.cell(model, api, entrypoint).add(micros)
        ran = [record for record in records if record.has_run]
        if ran:
            self._count_stages(model, api, ran)

    def _count_stages(self, model: str, api: str, records: list[RequestRecord]) -> None:
        for name, micros in zip(STAGES, _MICROS * stage_seconds(records).T, strict=True):
            self.stage_latency.cell(model, name).add(micros)
            if name == "run" and api.lower() in _INFERENCE:
                self.runtime_latency.cell(model, _INFERENCE[api.lower()], "TF1").add(micros)
        if api.lower() in _TAKE_EXAMPLES:
            rows = [record.rows for record in records if record.rows]
            self.example_counts.cell(model).add(rows)
            self.example_total.add((model,), sum(rows))

    def _count_runs(self, runs: "list[_Run]") -> None:
        if not runs:
            return
        self.run_count.add((), len(runs))
        self.run_requests.cell().add([len(rows) for _, rows, _ in runs])
        self.run_rows.cell().add([sum(rows) for _, rows, _ in runs])
        self.input_batch_size.cell().add([size for _, rows, _ in runs for size in rows])
        for pool in {pool for pool, _, _ in runs}:
            seconds = [waited for other, _, waits in runs if other == pool for waited in waits]
            self.queuing_latency.cell(pool).add(_MICROS * np.array(seconds))

    # ---- loads

    def loaded(self, model_path: str, seconds: float, ok: bool) -> None:
        """Count the load of a version, successful or not."""
        self.load_attempts.add((model_path, "success" if ok else "fail"))
        self.load_latency.add((model_path,), round(seconds * _MICROS))

    def warmed_up(self, model_path: str, seconds: float, records: int, error: StatusError | None) -> None:
        """Count the warmup of a version."""
        status = "OK" if error is None else error.to_string()
        self.warmup_latency.cell(model_path, status).add(seconds * _MICROS)
        self.warmup_records.add((model_path, status), records)

    def snapshot(self) -> Snapshot:
        """Return all values of this process. Any thread may call it."""
        self._fold()
        found = {one.family: one.values() for one in self._all}
        found[self._depth_family] = {(): (float(self._queue_depth()),)}
        return {family: values for family, values in found.items() if values}


def _taken(waiting: "collections.deque[Any]") -> list[Any]:
    """Empty a deque that another thread may append to, and return its items."""
    return [waiting.popleft() for _ in range(len(waiting))]
