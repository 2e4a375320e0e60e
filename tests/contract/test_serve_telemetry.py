"""What operators and browsers see: metrics with TensorFlow Serving's names, the access log, and the page at /."""

import datetime as dt
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.contract_open_inference import message
from tests.support.contract_serve import Server, eventually, predict_request, shared_server

PREFIX = ":tensorflow:serving:"


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def samples(server: Server, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The values of a metric by its labels. prometheus_client's parser would rename counters."""
    reply = server.get("/monitoring/prometheus/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", reply.body.decode(), re.MULTILINE)
    return {tuple(sorted(re.findall(r'(\w+)="([^"]*)"', labels))): float(value) for labels, value in lines}


def ask_three_times(server: Server) -> None:
    assert server.post("scale:predict", {"instances": [1.0]}).status == 200
    assert server.post("scale:predict", {"instances": ["a"]}).status == 400
    server.prediction.Predict(predict_request("scale", {"x": np.array([1], np.float32)}), timeout=60)


def test_requests_are_counted_under_tensorflow_servings_names(server: Server) -> None:
    def counts() -> list[float]:
        found = samples(server, f"{PREFIX}request_count")
        return [found.get((("model_name", "scale"), ("status", status)), 0.0) for status in ("OK", "INVALID_ARGUMENT")]

    before = counts()
    ask_three_times(server)
    assert [after - earlier for after, earlier in zip(counts(), before, strict=True)] == [2, 1]


LATENCIES = [
    ("request_latency_count", {"model_name": "scale", "API": "predict", "entrypoint": "REST"}),
    ("request_latency_count", {"model_name": "scale", "API": "Predict", "entrypoint": "GRPC"}),
    ("request_latency_bucket", {"model_name": "scale", "API": "predict", "entrypoint": "REST", "le": "+Inf"}),
    ("runtime_latency_count", {"model_name": "scale", "API": "Predict"}),
    ("request_latency_count", {"model_name": "scale", "API": "infer", "entrypoint": "REST"}),
    ("request_latency_count", {"model_name": "scale", "API": "ModelInfer", "entrypoint": "GRPC"}),
]


def test_latencies_have_tensorflow_servings_names(server: Server) -> None:
    ask_three_times(server)
    tensor = {"name": "x", "shape": [1], "datatype": "FP32"}
    assert server.ask("POST", "/v2/models/scale/infer", {"inputs": [{**tensor, "data": [1.0]}]}).status == 200
    contents = {"fp32_contents": [1.0]}
    server.inference(
        "ModelInfer", message("ModelInferRequest")(model_name="scale", inputs=[{**tensor, "contents": contents}])
    )
    for metric, labels in LATENCIES:
        found = samples(server, f"{PREFIX}{metric}")
        assert any(value > 0 for key, value in found.items() if labels.items() <= dict(key).items()), (metric, found)


def test_loads_and_examples_are_counted(server: Server) -> None:
    loads = samples(server, ":tensorflow:cc:saved_model:load_attempt_count")
    assert any(dict(key)["model_path"].endswith("scale/2") and dict(key)["status"] == "success" for key in loads)
    before = samples(server, f"{PREFIX}request_example_count_total").get((("model", "half_plus_two"),), 0)
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 1.0}, {"x": 2.0}]}
    assert server.post("half_plus_two:regress", body).status == 200
    after = samples(server, f"{PREFIX}request_example_count_total")[(("model", "half_plus_two"),)]
    assert after == before + 2


def test_the_access_log_is_lines_of_json(server: Server) -> None:
    """One for each request but health checks, of REST and gRPC."""
    file = server.log_path.with_name("access.log")

    def entry(request_id: str) -> dict[str, Any] | None:
        text = Path(file).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return next((line for line in lines if line["request_id"] == request_id), None)

    path = "/v1/models/scale/versions/1:predict"
    reply = server.ask("POST", path, {"instances": [1.0, 2.0]}, {"X-Request-Id": "good-one"})
    assert reply.headers["x-request-id"] == "good-one"
    server.ask("POST", "/v1/models/none:predict", {"instances": [1.0]}, {"X-Request-Id": "bad-one"})
    request = predict_request("scale", {"x": np.array([1, 2, 3], np.float32)})
    _, done = server.prediction.Predict.with_call(request, timeout=60, metadata=(("x-request-id", "call"),))
    assert ("x-request-id", "call") in done.trailing_metadata()
    wanted = {
        "good-one": {
            "entrypoint": "REST",
            "method": "POST",
            "path": path,
            "model": "scale",
            "version": 1,
            "status": 200,
        },
        "bad-one": {"entrypoint": "REST", "model": "none", "status": 404},
        "call": {"entrypoint": "GRPC", "model": "scale", "version": 2, "status": "OK", "rows": 3},
    }
    for request_id, fields in wanted.items():
        eventually(functools.partial(entry, request_id))
        assert fields.items() <= (entry(request_id) or {}).items()
    good = entry("good-one") or {}
    sizes = (2, len('{"instances": [1.0, 2.0]}'), len(reply.body))
    assert (good["rows"], good["bytes_in"], good["bytes_out"]) == sizes
    assert abs(dt.datetime.fromisoformat(good["time"]).timestamp() - time.time()) < 600
    assert good["ms"] >= 0
    for request_id in ("good-one", "call"):
        assert (entry(request_id) or {})["stages_ms"]["run"] > 0


def test_the_root_is_a_page_for_browsers_and_json_for_programs(server: Server) -> None:
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        reply = server.ask("GET", "/", None, headers)
        assert (reply.status, reply.value) == (200, {"status": "alive"})
    page = server.ask("GET", "/", None, {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.body.lower().startswith(b"<!doctype html>")
