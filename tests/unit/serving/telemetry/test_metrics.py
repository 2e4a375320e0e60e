"""Metrics as Prometheus' own parser reads them, against numbers counted by hand."""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.messages import refused
from tests.support.serving.asgi import running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ConfigError
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.request_record import REST, RequestRecord
from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.settings import TelemetrySettings
from tpuembed_serving.telemetry.metrics import (
    DEFAULT_PATH,
    ServerMetrics,
    merge_snapshots,
    process_snapshot,
    to_text,
    version_snapshot,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """(name, labels) -> value, by the parser of Prometheus' own client."""
    return {
        (_written(sample.name, text), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _written(name: str, text: str) -> str:
    """The parser calls a counter `_total` whatever the text says."""
    bare = name.removesuffix("_total")
    return bare if f"# TYPE {bare} counter\n" in text else name


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def record(model: str = "m", api: str = "predict", entrypoint: str = REST, code: Code = Code.OK) -> RequestRecord:
    one = RequestRecord(entrypoint, "POST", b"/v1/models/m:predict", [], api)
    one.model = model
    one.body(10)
    one.answered(code, 200, 20)
    return one


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\u00e9{}"])
def test_labels_of_any_text_come_back(name: str) -> None:
    metrics = ServerMetrics()
    metrics.finish(record(name, code=Code.NOT_FOUND))
    samples = parsed(to_text(metrics.snapshot()))
    assert value(samples, ":tensorflow:serving:request_count", model_name=name, status="NOT_FOUND") == 1


def test_processes_add_up() -> None:
    one, other = ServerMetrics(lambda: 3), ServerMetrics(lambda: 4)
    for metrics, models in ((one, "aab"), (other, "bc")):
        for model in models:
            metrics.finish(record(model, code=Code.NOT_FOUND))
        metrics.ran("p", [2], [0.0])
    samples = parsed(to_text(merge_snapshots(pickle.loads(pickle.dumps([one.snapshot(), other.snapshot()])))))
    count = ":tensorflow:serving:request_count"
    assert [value(samples, count, model_name=model, status="NOT_FOUND") for model in "abc"] == [2, 2, 1]
    assert [value(samples, ":tpuembed:serving:run_rows_bucket", le=le) for le in ("1", "2", "+Inf")] == [0, 2, 2]
    assert value(samples, ":tpuembed:serving:run_rows_sum") == 4
    assert value(samples, ":tpuembed:serving:queue_depth") == 7


def test_names_that_clients_make_up_do_not_fill_the_memory() -> None:
    metrics = ServerMetrics()
    for index in range(3000):
        metrics.finish(record(f"m{index}", code=Code.NOT_FOUND))
    samples = parsed(to_text(metrics.snapshot()))
    counts = {dict(labels)["model_name"]: count for (name, labels), count in samples.items() if "request_count" in name}
    assert len(counts) == 1001
    assert counts["(others)"] == 2000


def test_a_process_that_is_gone_has_no_metrics() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert {family.name for family in process_snapshot(child.pid)} <= {
        ":tpuembed:serving:memory_limit_bytes",
        "process_max_fds",
    }


def test_loads_and_warm_ups_have_tensorflows_names() -> None:
    metrics = ServerMetrics()
    metrics.loaded("/m/1", 1.5, True)
    metrics.loaded("/m/2", 0.5, False)
    metrics.warmed_up("/m/1", 0.25, 7, None)
    metrics.warmed_up("/m/2", 0.25, 0, StatusError(Code.DATA_LOSS, "cut"))
    samples = parsed(to_text(metrics.snapshot()))
    assert value(samples, ":tensorflow:cc:saved_model:load_attempt_count", model_path="/m/1", status="success") == 1
    assert value(samples, ":tensorflow:cc:saved_model:load_attempt_count", model_path="/m/2", status="fail") == 1
    assert value(samples, ":tensorflow:cc:saved_model:load_latency", model_path="/m/1") == 1_500_000
    warmed = ":tensorflow:serving:model_warmup_latency_count"
    assert value(samples, warmed, model_path="/m/1", status="OK") == 1
    assert value(samples, warmed, model_path="/m/2", status="DATA_LOSS: cut") == 1
    assert value(samples, ":tensorflow:serving:model_warmup_records_read", model_path="/m/1", status="OK") == 7


def test_versions_have_a_state() -> None:
    failed = StatusError(Code.DATA_LOSS, "cut")
    versions = [
        VersionStatus(4, State.LOADING, None),
        VersionStatus(3, State.END, failed),
        VersionStatus(2, State.AVAILABLE, None),
        VersionStatus(1, State.END, None),
    ]
    samples = parsed(to_text(version_snapshot([("m", versions), ("empty", [])])))
    state, available = ":tpuembed:serving:version_state", ":tpuembed:serving:available_versions"
    assert samples == {
        (state, frozenset({("model_name", "m"), ("version", version), ("state", name)})): 1.0
        for version, name in (("4", "LOADING"), ("3", "END"), ("2", "AVAILABLE"))
    } | {(available, frozenset({("model_name", name)})): count for name, count in (("m", 1.0), ("empty", 0.0))}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingApp]:
    with measured(tmp_path_factory.mktemp("models")) as app:
        yield app


@contextlib.contextmanager
def measured(folder: Path) -> Iterator[ServingApp]:
    make_version(folder / "m", 7)
    settings = ServerSettings.for_model_dir(folder / "m", telemetry=TelemetrySettings(metrics_path=DEFAULT_PATH))
    app = create_app(settings, load=lambda _: DoublingServable())
    with running(app):
        wait_until_ready(app)
        yield app


def test_what_a_client_did_is_on_the_page(app: ServingApp) -> None:
    send(app, "POST", "/v1/models/m:predict", '{"instances": [1, 2, 3]}')
    send(app, "POST", "/v1/models/m:predict", '{"instances": [1]}')
    send(app, "POST", "/v1/models/m:predict", "{")
    send(app, "POST", "/v1/models/z:predict", '{"instances": [1]}')
    send(app, "GET", "/v1/models/m")
    page = send(app, "GET", DEFAULT_PATH)
    assert page.headers[b"content-type"].startswith(b"text/plain")
    samples = parsed(page.body.decode())
    count = ":tensorflow:serving:request_count"
    assert value(samples, count, model_name="m", status="OK") == 3
    assert value(samples, count, model_name="m", status="INVALID_ARGUMENT") == 1
    assert value(samples, count, model_name="z", status="NOT_FOUND") == 1
    latency = ":tensorflow:serving:request_latency_count"
    assert value(samples, latency, model_name="m", API="predict", entrypoint="REST") == 2
    assert value(samples, latency, model_name="m", API="", entrypoint="REST") == 1
    assert value(samples, ":tensorflow:serving:batching_session:wrapped_run_count") == 2
    assert (
        value(samples, ":tensorflow:serving:batching_session:queuing_latency_count", thread_pool_name="model-run") == 2
    )
    assert value(samples, ":tpuembed:serving:run_rows_sum") == 4
    assert value(samples, ":tpuembed:serving:run_requests_count") == 2
    assert value(samples, ":tpuembed:serving:queue_depth") == 0
    run = value(samples, ":tpuembed:serving:stage_latency_count", model_name="m", version="7", stage="run")
    assert run == 2
    assert value(samples, ":tpuembed:serving:version_state", model_name="m", version="7", state="AVAILABLE") == 1
    assert value(samples, ":tpuembed:serving:available_versions", model_name="m") == 1
    families = list(text_string_to_metric_families(page.body.decode()))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert [family.name for family in families if len(family.documentation) < 3] == []
    path = str(app.settings.models[0].base_path / "7")
    assert value(samples, ":tensorflow:cc:saved_model:load_attempt_count", model_path=path, status="success") == 1


def test_a_server_that_is_not_asked_has_no_metrics(tmp_path: Path) -> None:
    make_version(tmp_path / "m", 1)
    app = create_app(ServerSettings.for_model_dir(tmp_path / "m"), load=lambda _: DoublingServable())
    with running(app):
        assert send(app, "GET", DEFAULT_PATH).status == 404
        assert isinstance(app.executor, ModelExecutor)
        assert app.executor.watch is None
        assert not app.telemetry.observes


@pytest.mark.parametrize("path", ["metrics", "/v1/metrics", "/V1/x", "/v2", "/v2/m", "/readyz", "/a?b", "/docs", ""])
def test_a_path_that_others_have_is_refused(path: str) -> None:
    with refused(ConfigError, match="metrics_path"):
        TelemetrySettings(metrics_path=path)
