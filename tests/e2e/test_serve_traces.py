"""Spans that a server process exports by OTLP, to a collector that is there, that is slow, or that is not."""

import importlib.util
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import FakeLoader, wait_for
from tests.support.serving.load import Load
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess
from tests.support.serving.served import BODY, Served
from tpuembed_serving import TelemetrySettings
from tpuembed_serving.core.status import Code, StatusError

if importlib.util.find_spec("opentelemetry") is None:
    pytest.skip("opentelemetry-sdk and its OTLP exporter are not installed", allow_module_level=True)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

STAGES = {"read", "parse", "queue", "run", "encode"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STOP_SECONDS = 20


class Collector:
    """Takes spans over HTTP; while `hold` is set, it lets exporters wait."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.asked = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                collector.go_on.wait(60)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    save_scale(folder / "scale" / "1", 1.0)
    return folder / "scale"


def server(model_dir: Path, log: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> ServerProcess:
    """It exports to `port` soon after each request."""
    for name, value in {"EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "BSP_SCHEDULE_DELAY": "50"}.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    running = ServerProcess(model_dir, log, "--otel", "--grpc-port", "0", "--drain-seconds", "2")
    running.wait_for(1)
    return running


def ask_with_parent(running: ServerProcess) -> None:
    connection = running.connect()
    connection.request("POST", f"{running.path}:predict", '{"instances": [1.0, 2.0]}', {"traceparent": TRACEPARENT})
    assert connection.getresponse().read()
    connection.close()


def call_with_parent(running: ServerProcess) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "scale"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.0, 2.0, 3.0], tf.float32))
    with grpc.insecure_channel(running.grpc_address) as channel:
        method = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        method(request.SerializeToString(), metadata=(("traceparent", TRACEPARENT),), timeout=60)


def test_spans_of_requests_arrive_below_their_parents(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with server(model_dir, tmp_path / "log", monkeypatch, collector.port) as running:
        ask_with_parent(running)
        call_with_parent(running)
        wait_for(lambda: sum(one.trace_id.hex() == TRACE for one in collector.spans) == 2 * (1 + len(STAGES)))
        assert running.stop() == 0
        assert "Traceback" not in running.log
    ours = [one for one in collector.spans if one.trace_id.hex() == TRACE]
    rest, rpc = [one for one in ours if one.parent_span_id.hex() == PARENT]
    assert [rest.name, rpc.name] == [
        "POST /v1/models/{model}:predict",
        "tensorflow.serving.PredictionService/Predict",
    ]
    for parent, rows in ((rest, 2), (rpc, 3)):
        attributes = {one.key: one.value for one in parent.attributes}
        assert attributes["tpuembed.model"].string_value == "scale"
        assert attributes["tpuembed.rows"].int_value == rows
        stages = [one for one in ours if one.parent_span_id == parent.span_id]
        assert {one.name for one in stages} == STAGES
        for one in stages:
            assert parent.start_time_unix_nano <= one.start_time_unix_nano <= one.end_time_unix_nano


def test_broken_parents_routes_without_a_model_and_faults_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    """A client's fault is no error of the span."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    loader = FakeLoader()

    def fail() -> None:
        raise StatusError(Code.UNAVAILABLE, "busy")

    settings = TelemetrySettings(traces=True)
    with Served(tmp_path, monkeypatch, loader, telemetry=settings, predict_route="/predict") as running:
        wait_for(lambda: running.is_ready)
        for header in ("00-0-0-01", "", "\xff"):
            assert running.send("POST", "/v1/models/m:predict", BODY, traceparent=header).status == 200
        assert running.send("POST", "/v1/models/m:predict", "{").status == 400
        for target in ("/invocations", "/predict"):
            assert running.send("POST", target, BODY).status == 200
        loader.run_hook = fail
        assert running.send("POST", "/v1/models/m:predict", BODY).status == 503

        def roots() -> list[Any]:
            return [one for one in collector.spans if not one.parent_span_id]

        wait_for(lambda: len(roots()) == 7)
    attributes = [{one.key: one.value for one in root.attributes} for root in roots()]
    assert {one["tpuembed.model"].string_value for one in attributes} == {"m"}
    found = sorted(
        (root.name, one["http.response.status_code"].int_value, root.status.code == 2)
        for root, one in zip(roots(), attributes, strict=True)
    )
    route = "POST /v1/models/{model}:predict"
    assert found == [
        ("POST /invocations", 200, False),
        ("POST /predict", 200, False),
        *[(route, status, status == 503) for status in (200, 200, 200, 400, 503)],
    ]


@pytest.mark.parametrize("kind", ["missing", "silent"])
@pytest.mark.nightly
def test_a_collector_costs_no_request_and_no_stop(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Collector, kind: str
) -> None:
    port = collector.port
    if kind == "missing":
        collector.close()
    else:
        collector.go_on.clear()
    with server(model_dir, tmp_path / "log", monkeypatch, port) as running:
        with Load(running, 16) as load:
            wait_for(lambda: len(load.asked) > 3000 and (kind == "missing" or collector.asked > 0))
        assert load.failed == []
        asked = time.monotonic()
        assert running.stop() == 0
        print(f"{kind}: {len(load.asked)} requests, stopped after {time.monotonic() - asked:.1f} s")
        assert time.monotonic() - asked < STOP_SECONDS
        assert not re.search("Traceback", running.log)
