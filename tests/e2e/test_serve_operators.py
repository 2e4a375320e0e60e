"""What operators see of a server of two processes: metrics, access log, the list of models; and lists of different lengths."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.process import ServerProcess, run_command
from tpuembed import export_saved_model

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
LISTS = [[1, 2, 3], [], [5]]
PADDED = np.array([[1, 2, 3], [-1, -1, -1], [5, -1, -1]])
WEIGHTS = np.array([[0.5, 1, 2], [0, 0, 0], [0.25, 0, 0]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("operators")
    checkpoint = tf.train.Checkpoint(videos=tf.Variable(ROWS, name="videos"))
    prefix = checkpoint.write(str(root / "checkpoint" / "ckpt"))
    features = {
        "watched": {"table": "videos", "combiner": "sum", "weighted": True},
        "liked": {"table": "videos", "input": "id"},
    }
    export_saved_model(prefix, root / "rec", serving_config={"features": features}, version=4)
    options = ("--workers", "2", "--grpc-port", "0", "--metrics", "--access-log", str(root / "access.log"))
    with ServerProcess(root / "rec", root / "server.log", *options) as running:
        running.wait_for(4)
        wait_for(lambda: running.request("GET", "/readyz")[0] == 200)
        yield running
        running.stop()


def inputs(rows: int = 3) -> dict[str, Any]:
    return {"watched": PADDED[:rows], "watched_weights": WEIGHTS[:rows], "liked": np.array([0, 4, 5])[:rows]}


def computed(rows: int = 3) -> dict[str, Any]:
    """By numpy: the sums of weighted rows, and the rows."""
    sums = np.einsum("rh,rhd->rd", WEIGHTS, ROWS[np.maximum(PADDED, 0)])
    return {"watched": sums[:rows], "liked": ROWS[[0, 4, 5]][:rows]}


def test_lists_of_different_lengths_are_what_padded_ones_are(server: ServerProcess) -> None:
    weights = [[0.5, 1, 2], [], [0.25]]
    rows = [
        {"watched": ids, "watched_weights": values, "liked": liked}
        for ids, values, liked in zip(LISTS, weights, [0, 4, 5], strict=True)
    ]
    status, reply = server.predict({"instances": rows})
    assert status == 200
    for name, wanted in computed().items():
        np.testing.assert_allclose([row[name] for row in reply["predictions"]], wanted, rtol=1e-6, atol=1e-7)
    rows[0]["watched_weights"] = [0.5]
    status, reply = server.predict({"instances": rows})
    assert (status, "Row 0 has 3 values of watched and 1 of" in reply["error"]) == (400, True)


def counted(server: ServerProcess) -> dict[str, float]:
    """Status -> requests of the model, of all workers."""
    status, page = server.request("GET", "/monitoring/prometheus/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}
    samples = families[":tensorflow:serving:request_count"].samples
    return {one.labels["status"]: one.value for one in samples if one.labels["model_name"] == "rec"}


def test_workers_add_their_counts(server: ServerProcess) -> None:
    before = counted(server)
    body = {"inputs": {name: array.tolist() for name, array in inputs().items()}}
    for _ in range(20):  # each on a connection of its own: the kernel shares them out
        assert server.predict(body)[0] == 200
    after = counted(server)
    assert after["OK"] == before["OK"] + 20


def call(server: ServerProcess, request_id: str) -> tuple[Any, dict[str, str]]:
    """A prediction over gRPC, and the trailing metadata of its answer."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "rec"
    for name, array in inputs().items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        response, done = stub.Predict.with_call(request, metadata=(("x-request-id", request_id),), timeout=60)
        return response, dict(done.trailing_metadata())


def test_requests_are_logged_with_what_they_took(server: ServerProcess) -> None:
    response, trailing = call(server, "over-grpc")
    assert trailing["x-request-id"] == "over-grpc"
    np.testing.assert_allclose(
        tf.make_ndarray(response.outputs["watched"]), computed()["watched"], rtol=1e-6, atol=1e-7
    )
    body = {"inputs": {name: array.tolist() for name, array in inputs().items()}}
    assert server.predict(body, headers={"X-Request-Id": "over-rest"})[0] == 200
    path = server.log_path.with_name("access.log")
    wait_for(lambda: b"over-grpc" in path.read_bytes() and b"over-rest" in path.read_bytes())
    lines = {line["request_id"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert {name: lines[name][name_of] for name, name_of in (("over-grpc", "status"), ("over-rest", "status"))} == {
        "over-grpc": "OK",
        "over-rest": 200,
    }
    for name in ("over-grpc", "over-rest"):
        assert (lines[name]["model"], lines[name]["version"], lines[name]["rows"]) == ("rec", 4, 3)
        assert lines[name]["stages_ms"]["run"] > 0
    assert lines["over-grpc"]["path"] == "/tensorflow.serving.PredictionService/Predict"


def test_models_are_listed(server: ServerProcess) -> None:
    status, body = server.request("GET", "/models")
    ok = {"error_code": "OK", "error_message": ""}
    versions = [{"version": "4", "state": "AVAILABLE", "status": ok}]
    assert (status, json.loads(body)) == (
        200,
        {"models": [{"name": "rec", "labels": {}, "model_version_status": versions}]},
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--access-log", "/nowhere/log"], 1),
        (["--monitoring-config-file", "/nowhere/config"], 1),
        (["--metrics", "--monitoring-config-file", "/x"], 2),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(tmp_path: Path, options: list[str], code: int) -> None:
    done = run_command("serve", tmp_path, "--no-grpc", "--workers", "2", *options)
    assert done.returncode == code
    said(done.stderr)
