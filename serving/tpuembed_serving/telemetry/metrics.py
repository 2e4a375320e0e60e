"""Metrics of the server: TensorFlow Serving's under their names, and tpuembed's under `:tpuembed:serving:`.

TensorFlow Serving defines its own in servables/tensorflow/util.cc, saved_model_warmup_util.cc and
batching/batching_session.cc, and TensorFlow in cc/saved_model/loader.cc. Latencies are in microseconds. Metrics of
functions that this server lacks are left out: mlmd_map, padding_size.

Clients see the metrics of all workers as one, under TensorFlow Serving's names. prometheus_client merges processes over files, in
a folder that an environment variable names before its import, and ends the names of counters in _total. So they are merged here.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.memory import memory_limit
from tpuembed_serving.core.request_record import REST, STAGES, RequestRecord, stage_seconds
from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError

__all__ = [
    "DEFAULT_PATH",
    "ServerMetrics",
    "Snapshot",
    "merge_snapshots",
    "process_snapshot",
    "to_text",
    "version_snapshot",
]

DEFAULT_PATH: Final = "/monitoring/prometheus/metrics"

_INFERENCE: Final = {"predict": "Predict", "classify": "Classify", "regress": "Regress"}
_COUNTED_CALLS: Final = frozenset({"Predict", "Classify", "Regress", "ModelInfer"})
"""The gRPC methods that are counted, as in TensorFlow Serving, and the Open Inference Protocol's."""
_TAKE_EXAMPLES: Final = frozenset({"classify", "regress", "multiinference"})
_MOST_NAMES: Final = 1000
_OTHERS: Final = "(others)"
"""Clients may invent model names. Names after the first `_MOST_NAMES` are counted under this one."""
_MOST_VERSIONS: Final = 16
"""A server that gets a version every hour would fill the memory: of each model the newest ones to answer are kept."""
_MICROS: Final = 1e6


class Family(NamedTuple):
    """A metric: its name in Prometheus' form, its kind, and its description.

    Its values are added over processes, or with `least` the least one is taken.
    """

    name: str
    kind: str
    description: str
    least: bool = False


Values = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""The number of each sample, by the sample's name and labels."""
Snapshot = Mapping[Family, Values]
"""The values of all metrics of one process."""

_STATES: Final = Family(
    ":tpuembed:serving:version_state", "gauge", "1 for the state of each version that is not unloaded, or has failed"
)
_AVAILABLE: Final = Family(":tpuembed:serving:available_versions", "gauge", "Versions of a model that take requests")

_PROCESS: Final = {
    family.name: family
    for family in (
        Family("process_cpu_seconds_total", "counter", "Processor seconds of all processes of the server"),
        Family("process_resident_memory_bytes", "gauge", "Resident memory of all processes of the server"),
        Family("process_open_fds", "gauge", "Open files of all processes of the server"),
        Family("process_max_fds", "gauge", "The least limit of open files among the processes", least=True),
        Family("process_start_time_seconds", "gauge", "When the first process started, since 1970", least=True),
    )
}
_ANONYMOUS: Final = Family(
    ":tpuembed:serving:anonymous_memory_bytes", "gauge", "Memory of all processes without what they map from files"
)
_LIMIT: Final = Family(
    ":tpuembed:serving:memory_limit_bytes",
    "gauge",
    "The memory that the control group or the machine allows",
    least=True,
)


def _exponential(scale: float, growth: float, count: int) -> tuple[float, ...]:
    """Return upper bounds of buckets without the infinite one, as `Buckets::Exponential` of TensorFlow's sampler.cc."""
    bounds = [scale]
    while len(bounds) < count:
        bounds.append(bounds[-1] * growth)
    return tuple(bounds)


_LATENCY: Final = _exponential(10, 1.8, 33)
_QUEUING: Final = _exponential(100, 1.2, 52)
_SIZES: Final = _exponential(1, 2, 14)
_EXAMPLES: Final = _exponential(1, 2, 15)


class ServerMetrics:
    """An observer (see `request_record`) of requests, batches and loads. Any thread may call it."""

    wants_request_id = False

    def __init__(self, queue_depth: Callable[[], int] = lambda: 0, keys: ApiKeys | None = None) -> None:
        self._keys = keys
        serving, ours, loader = ":tensorflow:serving:", ":tpuembed:serving:", ":tensorflow:cc:saved_model:"
        batching = f"{serving}batching_session:"
        self._families: dict[Family, MetricWrapperBase] = {}
        counter, histogram = self._counter, self._histogram
        self._requests = counter(f"{serving}request_count", "Requests", "model_name", "status")
        self._latency = histogram(
            f"{serving}request_latency",
            "Microseconds of requests that succeed",
            _LATENCY,
            "model_name",
            "API",
            "entrypoint",
        )
        self._runtime = histogram(
            f"{serving}runtime_latency", "Microseconds of the run", _LATENCY, "model_name", "API", "runtime"
        )
        self._example_counts = histogram(
            f"{serving}request_example_counts", "Examples of a request", _EXAMPLES, "model"
        )
        self._example_total = counter(f"{serving}request_example_count_total", "Examples of all requests", "model")
        self._warmup_latency = histogram(
            f"{serving}model_warmup_latency", "Microseconds of a warmup", _LATENCY, "model_path", "status"
        )
        self._warmup_records = counter(
            f"{serving}model_warmup_records_read", "Records of a warmup", "model_path", "status"
        )
        self._request_logs = counter(
            f"{serving}request_log_count",
            "Sampled requests, by the outcome of logging them",
            "model_name",
            "status_code",
        )
        self._queuing = histogram(
            f"{batching}queuing_latency", "Microseconds in the queue", _QUEUING, "thread_pool_name"
        )
        self._run_count = counter(f"{batching}wrapped_run_count", "Batches")
        self._input_batch_size = histogram(f"{batching}input_batch_size", "Rows of a request in a batch", _SIZES)
        self._load_attempts = counter(f"{loader}load_attempt_count", "Loads of a version", "model_path", "status")
        self._load_latency = counter(f"{loader}load_latency", "Microseconds of the loads of a version", "model_path")
        self._stages = histogram(
            f"{ours}stage_latency", "Microseconds of a stage", _LATENCY, "model_name", "version", "stage"
        )
        self._key_requests = counter(f"{ours}api_key_request_count", "Requests by the name of their API key", "key")
        self._run_rows = histogram(f"{ours}run_rows", "Rows of a batch", _SIZES)
        self._run_requests = histogram(f"{ours}run_requests", "Requests of a batch", _SIZES)
        depth = Gauge(f"{ours}queue_depth", "Requests in the queue", registry=None)
        depth.set_function(queue_depth)
        self._families[Family(f"{ours}queue_depth", "gauge", "Requests in the queue")] = depth
        # `labels` of prometheus_client costs more than counting does.
        self._of = functools.lru_cache(maxsize=4096)(_with_labels)
        self._names: set[str] = set()
        self._versions: dict[str, list[str]] = {}

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        metric = Counter(name, description, labels, registry=None)
        self._families[Family(name, "counter", description)] = metric
        return metric

    def _histogram(self, name: str, description: str, bounds: Sequence[float], *labels: str) -> Histogram:
        metric = Histogram(name, description, labels, buckets=bounds, registry=None)
        self._families[Family(name, "histogram", description)] = metric
        return metric

    def finish(self, record: RequestRecord) -> None:
        """Count a request. Only those that succeed have a latency, as in TensorFlow Serving."""
        api, entrypoint = record.api, record.entrypoint
        if self._keys is not None:
            self._of(self._key_requests, self._keys.accept(record.headers) or "").inc()
        if entrypoint != REST and api not in _COUNTED_CALLS:
            return
        model = self._name(record.model)
        self._of(self._requests, model, record.code.name).inc()
        if record.code is Code.OK:
            self._of(self._latency, model, api, entrypoint).observe(_MICROS * (record.ended - record.started))
            if record.has_run:
                self._count_stages(model, api.lower(), record)

    def ran(self, pool: str, rows: Sequence[int], queue_seconds: Sequence[float]) -> None:
        """Count a batch of requests of so many rows each, which waited so long."""
        self._run_count.inc()
        self._run_requests.observe(len(rows))
        self._run_rows.observe(sum(rows))
        queuing = self._of(self._queuing, pool)
        for size, seconds in zip(rows, queue_seconds, strict=True):
            self._input_batch_size.observe(size)
            queuing.observe(_MICROS * seconds)

    def close(self) -> None:
        """Do nothing: metrics have no file."""

    def _name(self, model: str) -> str:
        if model not in self._names and len(self._names) >= _MOST_NAMES:
            return _OTHERS
        self._names.add(model)
        return model

    def _version(self, model: str, number: int | None) -> str:
        """Return the label of a version. Forgets the one that began to answer first if there are too many."""
        version, known = "" if number is None else str(number), self._versions.setdefault(model, [])
        if version not in known:
            known.append(version)
            if len(known) > _MOST_VERSIONS:
                oldest = known.pop(0)
                self._of.cache_clear()
                for name in STAGES:
                    self._stages.remove(model, oldest, name)
        return version

    def _count_stages(self, model: str, api: str, record: RequestRecord) -> None:
        version = self._version(model, record.version)
        for name, seconds in zip(STAGES, stage_seconds(record), strict=True):
            self._of(self._stages, model, version, name).observe(_MICROS * seconds)
            if name == "run" and api in _INFERENCE:
                self._of(self._runtime, model, _INFERENCE[api], "TF1").observe(_MICROS * seconds)
        if api in _TAKE_EXAMPLES and record.rows:
            self._of(self._example_counts, model).observe(record.rows)
            self._of(self._example_total, model).inc(record.rows)

    def loaded(self, model_path: str, seconds: float, ok: bool) -> None:
        """Count the load of a version, successful or not."""
        self._load_attempts.labels(model_path, "success" if ok else "fail").inc()
        self._load_latency.labels(model_path).inc(round(seconds * _MICROS))

    def logged(self, model: str, code: Code) -> None:
        """Count a sampled request."""
        self._request_logs.labels(model, code.name).inc()

    def warmed_up(self, model_path: str, seconds: float, records: int, error: StatusError | None) -> None:
        """Count the warmup of a version."""
        status = "OK" if error is None else error.to_string()
        self._warmup_latency.labels(model_path, status).observe(seconds * _MICROS)
        self._warmup_records.labels(model_path, status).inc(records)

    def snapshot(self) -> Snapshot:
        """Return all values of this process."""
        found = {family: _read_values(family, metric) for family, metric in self._families.items()}
        return {**{family: values for family, values in found.items() if values}, **process_snapshot(os.getpid())}


def version_snapshot(models: Iterable[tuple[str, Sequence[VersionStatus]]]) -> Snapshot:
    """Return the metrics of the versions of each model: their states, and how many are available.

    Versions that were unloaded without a fault are left out, as there are ever more of them.
    """
    states: dict[Any, float] = {}
    available: dict[Any, float] = {}
    for model, statuses in models:
        for one in statuses:
            if one.state is not State.END or one.error is not None:
                labels = (("model_name", model), ("version", str(one.version)), ("state", one.state.name))
                states[_STATES.name, labels] = 1.0
        count = sum(one.state is State.AVAILABLE for one in statuses)
        available[_AVAILABLE.name, (("model_name", model),)] = float(count)
    found: dict[Family, Values] = {_STATES: states, _AVAILABLE: available}
    return {family: values for family, values in found.items() if values}


def _with_labels(metric: Any, *labels: str) -> Any:
    return metric.labels(*labels)


def process_snapshot(pid: int) -> Snapshot:
    """Return the metrics of a process of this user. Those that the system does not tell are left out."""
    found: dict[Family, float] = {}
    for metric in ProcessCollector(registry=None, pid=lambda: pid).collect():
        for sample in metric.samples:
            if sample.name in _PROCESS:
                found[_PROCESS[sample.name]] = sample.value
    with contextlib.suppress(OSError):  # it has exited, or this is not Linux
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                found[_ANONYMOUS] = int(line.split()[1]) * 1024
    limit = memory_limit()
    if limit is not None:
        found[_LIMIT] = limit.size
    return {family: {(family.name, ()): value} for family, value in found.items()}


def merge_snapshots(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the values of several processes as one: their sums, or for a family with `least` the least."""
    total: dict[Family, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for snapshot in snapshots:
        for family, values in snapshot.items():
            known = total.setdefault(family, {})
            for key, number in values.items():
                known[key] = min(known.get(key, number), number) if family.least else known.get(key, 0.0) + number
    return total


def to_text(snapshot: Snapshot) -> str:
    """Return Prometheus' text format, sorted by metric."""
    text = generate_latest(_Collected(snapshot)).decode()
    for family in snapshot:
        if family.kind == "counter":
            # prometheus_client ends the name of every counter in _total. TensorFlow Serving does not.
            for line in ("HELP", "TYPE"):
                text = text.replace(f"# {line} {family.name}_total ", f"# {line} {family.name} ")
    return text


class _Collected(Collector):
    """The metrics of a snapshot as prometheus_client's writer reads them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for family in sorted(self._snapshot):
            metric = Metric(family.name, family.description, family.kind)
            for (name, labels), number in self._snapshot[family].items():
                metric.samples.append(Sample(name, dict(labels), number))
            yield metric


def _read_values(family: Family, metric: MetricWrapperBase) -> Values:
    """Return the values of a metric, with names and bounds of buckets as TensorFlow Serving writes them."""
    values = {}
    for collected in metric.collect():
        for sample in collected.samples:
            suffix = sample.name.removeprefix(collected.name)
            if suffix != "_created":
                name = family.name if family.kind == "counter" else family.name + suffix
                labels = tuple((key, _bound(text) if key == "le" else text) for key, text in sample.labels.items())
                values[name, labels] = sample.value
    return values


def _bound(text: str) -> str:
    return text if text == "+Inf" else f"{float(text):g}"
