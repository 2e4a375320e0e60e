"""Metrics of the server: TensorFlow Serving's by their names, and some of ours under `:tpuembed:serving:`.

Theirs are defined in servables/tensorflow/util.cc, saved_model_warmup_util.cc and batching/batching_session.cc of TensorFlow
Serving, and in cc/saved_model/loader.cc of TensorFlow; latencies are in microseconds. What theirs has and this server does not
do has no metric here: request_log_count, mlmd_map, padding_size.
"""

from collections.abc import Callable
from typing import Final

from tpuembed_serving.metric_types import Counter, Family, Histogram, HistogramCell, Snapshot, exponential
from tpuembed_serving.observation import GRPC, RequestRecord
from tpuembed_serving.status import Code, StatusError

__all__ = ["DEFAULT_PATH", "ServerMetrics"]

DEFAULT_PATH: Final = "/monitoring/prometheus/metrics"

_LATENCY: Final = exponential(10, 1.8, 33)
_QUEUING: Final = exponential(100, 1.2, 52)
_SIZES: Final = exponential(1, 2, 14)
_EXAMPLES: Final = exponential(1, 2, 15)
_STAGES: Final = ("read", "parse", "queue", "run", "encode")
_INFERENCE: Final = {"predict": "Predict", "classify": "Classify", "regress": "Regress"}
_COUNTED_CALLS: Final = frozenset({"Predict", "Classify", "Regress"})
"""Of gRPC, as in theirs."""
_TAKE_EXAMPLES: Final = frozenset({"classify", "regress", "multiinference"})
_MOST_SERIES: Final = 1000
_OTHERS: Final = "(others)"
"""Clients may make up names of models without end; from so many on they are counted under this one."""
_MICROS: Final = 1e6


class _RequestCells:
    """The cells of one model, API and entry point."""

    def __init__(self, metrics: "ServerMetrics", model: str, api: str, entrypoint: str) -> None:
        self.latency = metrics.request_latency.cell(model, api, entrypoint)
        self._metrics = metrics
        self._model = model
        self._runtime = _INFERENCE.get(api.lower())
        self._takes_examples = api.lower() in _TAKE_EXAMPLES
        self._stages: list[HistogramCell] | None = None
        self._run: HistogramCell | None = None

    def add_run(self, record: RequestRecord) -> None:
        """Stages and rows of a request that ran."""
        stages = record.stages()
        if self._stages is None:
            self._stages = [self._metrics.stage_latency.cell(self._model, stage) for stage in _STAGES]
            if self._runtime:
                self._run = self._metrics.runtime_latency.cell(self._model, self._runtime, "TF1")
        times = (stages.read, stages.parse, stages.queue, stages.run, stages.encode)
        for cell, seconds in zip(self._stages, times, strict=True):
            cell.add(seconds * _MICROS)
        if self._run is not None:
            self._run.add(stages.run * _MICROS)
        if self._takes_examples and record.rows:
            self._metrics.example_counts.cell(self._model).add(record.rows)
            self._metrics.example_total.add((self._model,), record.rows)


class ServerMetrics:
    """An observer (see `observation`), of runs and of loads too.

    `finish` and `ran` belong to the event loop, `loaded` and `warmed_up` to the thread that loads.
    """

    wants_request_id = False

    def __init__(self, queue_depth: Callable[[], int] = lambda: 0) -> None:
        theirs, ours = ":tensorflow:serving:", ":tpuembed:serving:"
        self.request_count = Counter(f"{theirs}request_count", "model_name", "status")
        self.request_latency = Histogram(f"{theirs}request_latency", _LATENCY, "model_name", "API", "entrypoint")
        self.runtime_latency = Histogram(f"{theirs}runtime_latency", _LATENCY, "model_name", "API", "runtime")
        self.example_counts = Histogram(f"{theirs}request_example_counts", _EXAMPLES, "model")
        self.example_total = Counter(f"{theirs}request_example_count_total", "model")
        self.warmup_latency = Histogram(f"{theirs}model_warmup_latency", _LATENCY, "model_path", "status")
        self.warmup_records = Counter(f"{theirs}model_warmup_records_read", "model_path", "status")
        batching = f"{theirs}batching_session:"
        self.queuing_latency = Histogram(f"{batching}queuing_latency", _QUEUING, "thread_pool_name")
        self.run_count = Counter(f"{batching}wrapped_run_count")
        self.input_batch_size = Histogram(f"{batching}input_batch_size", _SIZES)
        self.load_attempts = Counter(":tensorflow:cc:saved_model:load_attempt_count", "model_path", "status")
        self.load_latency = Counter(":tensorflow:cc:saved_model:load_latency", "model_path")
        self.stage_latency = Histogram(f"{ours}stage_latency", _LATENCY, "model_name", "stage")
        self.run_rows = Histogram(f"{ours}run_rows", _SIZES)
        self.run_requests = Histogram(f"{ours}run_requests", _SIZES)
        self._depth_family = Family(f"{ours}queue_depth", "gauge", ())
        self._queue_depth = queue_depth
        self._all: list[Counter | Histogram] = [
            one for one in vars(self).values() if isinstance(one, Counter | Histogram)
        ]
        self._cells: dict[tuple[str, str, str], _RequestCells] = {}
        self._names: set[str] = set()
        self._queuing: HistogramCell | None = None
        self._input_sizes, self._rows, self._requests = (
            one.cell() for one in (self.input_batch_size, self.run_rows, self.run_requests)
        )

    def finish(self, record: RequestRecord) -> None:
        """See Observer. As in theirs, only what succeeds has a latency."""
        if record.entrypoint == GRPC and record.api not in _COUNTED_CALLS:
            return
        model = record.model if record.model in self._names else self._name(record.model)
        self.request_count.add((model, record.code.name))
        if record.code is not Code.OK:
            return
        key = model, record.api, record.entrypoint
        cells = self._cells.get(key)
        if cells is None:
            cells = self._cells[key] = _RequestCells(self, *key)
        cells.latency.add((record.ended - record.started) * _MICROS)
        if record.has_run:
            cells.add_run(record)

    def _name(self, model: str) -> str:
        if len(self._names) >= _MOST_SERIES:
            return _OTHERS
        self._names.add(model)
        return model

    def close(self) -> None:
        """See Observer."""

    def ran(self, pool: str, rows: list[int], queue_seconds: list[float]) -> None:
        """Requests of so many rows each, which waited so long, shared a run."""
        if self._queuing is None:
            self._queuing = self.queuing_latency.cell(pool)
        self.run_count.add(())
        self._requests.add(len(rows))
        self._rows.add(sum(rows))
        for size, seconds in zip(rows, queue_seconds, strict=True):
            self._input_sizes.add(size)
            self._queuing.add(seconds * _MICROS)

    def loaded(self, model_path: str, seconds: float, ok: bool) -> None:
        """A version was loaded, or failed to."""
        self.load_attempts.add((model_path, "success" if ok else "fail"))
        self.load_latency.add((model_path,), round(seconds * _MICROS))

    def warmed_up(self, model_path: str, seconds: float, records: int, error: StatusError | None) -> None:
        """Records of a version were run."""
        status = "OK" if error is None else error.to_string()
        self.warmup_latency.cell(model_path, status).add(seconds * _MICROS)
        self.warmup_records.add((model_path, status), records)

    def snapshot(self) -> Snapshot:
        """Of this process; from any thread."""
        found = {one.family: one.values() for one in self._all}
        found[self._depth_family] = {(): (float(self._queue_depth()),)}
        return {family: values for family, values in found.items() if values}
