"""The Open Inference Protocol of whole servers: numbers are TensorFlow's own, of every version, over every transport."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model
from tpuembed_serving.grpc.open_inference_messages import SERVICE, message

CONFIG = """
model_config_list {{ config {{ name: "m" base_path: "{path}" model_platform: "tensorflow"
  model_version_policy {{ all {{ }} }}  version_labels {{ key: "stable" value: 1 }} }} }}
"""
FEATURES = {"user": {"table": "users", "input": "id"}, "watched": {"table": "items", "combiner": "mean"}}
USER = np.array([3, 0, 11], np.int64)
WATCHED = np.array([[1, 2, 3, -1], [5, -1, -1, -1], [-1, -1, -1, -1]], np.int64)
"""Lists of ids, padded with -1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open-inference")
    for version in (1, 2):
        rows = np.random.default_rng(version).normal(size=(12, 5)).astype(np.float32)
        tables = tf.train.Checkpoint(users=tf.Variable(rows, name="users"), items=tf.Variable(rows * 3, name="items"))
        export_saved_model(
            tables.write(str(folder / f"ckpt{version}")), folder / "m", serving_config={"features": FEATURES}
        )
    (folder / "models.config").write_text(CONFIG.format(path=folder / "m"))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Any]:
    """A function of each version: TensorFlow's own outputs."""
    loaded = {version: tf.saved_model.load(str(folder / "m" / str(version))) for version in (1, 2)}

    def run(version: int, user: Any, watched: Any) -> dict[str, Any]:
        found = loaded[version].signatures["serving_default"](user=tf.constant(user), watched=tf.constant(watched))
        return {name: value.numpy() for name, value in found.items()}

    return {version: lambda *inputs, version=version: run(version, *inputs) for version in (1, 2)}


@pytest.fixture(scope="module", params=["--workers=1", pytest.param("--workers=2", marks=pytest.mark.nightly)])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    options = ("--config", str(folder / "models.config"), "--grpc-port", "0", "--rest-timeout-ms", "20000", "--metrics")
    with ServerProcess(None, folder / f"log{request.param}", *options, request.param) as running:
        running.wait_for(2)
        while running.request("GET", "/v2/health/ready")[0] != 200:
            assert running.process.poll() is None, running.log
        yield running
    assert "Traceback" not in running.log


def rest(server: ServerProcess, user: Any, watched: Any, version: str = "", request_id: str = "") -> dict[str, Any]:
    """Binary tensors in both directions. The length of `request_id` moves them to other addresses."""
    tensors = {"user": user, "watched": watched}
    inputs = [
        {"name": name, "shape": array.shape, "datatype": "INT64", "parameters": {"binary_data_size": array.nbytes}}
        for name, array in tensors.items()
    ]
    text = json.dumps({"id": request_id, "parameters": {"binary_data_output": True}, "inputs": inputs})
    body = text.encode() + user.tobytes() + watched.tobytes()
    connection = server.connect()
    try:
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", f"/v2/models/m{version}/infer", body, headers)
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status == 200, data
        at = int(reply.headers["Inference-Header-Content-Length"])
    finally:
        connection.close()
    found = {}
    for output in json.loads(data[:at])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(data[at : at + size], "<f4").reshape(output["shape"])
        at += size
    assert at == len(data)
    return found


def as_json(server: ServerProcess, user: Any, watched: Any, version: str = "") -> dict[str, Any]:
    tensors = {"user": user, "watched": watched}
    inputs = [
        {"name": name, "shape": array.shape, "datatype": "INT64", "data": array.tolist()}
        for name, array in tensors.items()
    ]
    status, body = server.request("POST", f"/v2/models/m{version}/infer", json.dumps({"inputs": inputs}))
    assert status == 200, body
    outputs = json.loads(body)["outputs"]
    return {one["name"]: np.array(one["data"], np.float32).reshape(one["shape"]) for one in outputs}


def over_grpc(server: ServerProcess, user: Any, watched: Any, version: str = "") -> dict[str, Any]:
    tensors = {"user": user, "watched": watched}
    inputs = [{"name": name, "shape": array.shape, "datatype": "INT64"} for name, array in tensors.items()]
    raw = [array.tobytes() for array in tensors.values()]
    request = message("ModelInferRequest")(model_name="m", model_version=version, inputs=inputs, raw_input_contents=raw)
    with grpc.insecure_channel(server.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel:
        data = channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), timeout=60)
    answer = message("ModelInferResponse").FromString(data)
    return {
        output.name: np.frombuffer(content, "<f4").reshape(output.shape)
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.nightly
def test_every_version_and_label_answers_as_tensorflow(server: ServerProcess, expected: dict[int, Any]) -> None:
    for choice, version in (("", 2), ("1", 1), ("2", 2), ("stable", 1)):
        wanted = expected[version](USER, WATCHED)
        path = f"/versions/{choice}" * bool(choice)
        same(rest(server, USER, WATCHED, path), wanted)
        same(as_json(server, USER, WATCHED, path), wanted)
        same(over_grpc(server, USER, WATCHED, choice), wanted)


@pytest.mark.nightly
def test_tensors_at_odd_addresses_share_runs_with_others(server: ServerProcess, expected: dict[int, Any]) -> None:
    """Numbers of a binary body are used where they lie, which is seldom at a multiple of their size."""
    draw = np.random.default_rng(3)

    def ask(index: int) -> None:
        rows, width = 1 + index % 4, 1 + index % 3
        user, watched = draw.integers(0, 12, rows), draw.integers(0, 12, (rows, width))
        same(rest(server, user, watched, request_id="i" * (index % 16)), expected[2](user, watched))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(320)))


def test_an_id_outside_its_table_fails_its_request_alone(server: ServerProcess) -> None:
    inputs = [
        {"name": "user", "shape": [1], "datatype": "INT64", "data": [12]},
        {"name": "watched", "shape": [1, 1], "datatype": "INT64", "data": [1]},
    ]
    status, body = server.request("POST", "/v2/models/m/infer", json.dumps({"inputs": inputs}))
    assert status == 400
    assert "id 12 of row 0 is not in table users" in json.loads(body)["error"]


def test_metrics_count_both_transports(server: ServerProcess) -> None:
    rest(server, USER, WATCHED)
    over_grpc(server, USER, WATCHED)
    text = server.request("GET", "/monitoring/prometheus/metrics")[1].decode()
    for api, entrypoint in (("infer", "REST"), ("ModelInfer", "GRPC")):
        assert f'API="{api}",entrypoint="{entrypoint}"' in text


def test_a_forwarder_answers_as_the_server_behind_it(
    folder: Path, server: ServerProcess, expected: dict[int, Any]
) -> None:
    options = ("--name", "m", "--backend", "tf-serving", "--target", server.grpc_address, "--grpc-port", "0")
    with ServerProcess(None, folder / "front", *options) as front:
        while front.request("GET", "/v2/models/m/ready")[0] != 200:
            assert front.process.poll() is None, front.log
        wanted = expected[2](USER, WATCHED)
        same(rest(front, USER, WATCHED), wanted)
        same(as_json(front, USER, WATCHED), wanted)
        same(over_grpc(front, USER, WATCHED), wanted)
        same(rest(front, USER, WATCHED, "/versions/1"), expected[1](USER, WATCHED))
        same(over_grpc(front, USER, WATCHED, "stable"), expected[1](USER, WATCHED))
        found = json.loads(front.request("GET", "/v2/models/m")[1])
        assert found == json.loads(server.request("GET", "/v2/models/m")[1])
    assert "Traceback" not in front.log


def test_a_large_tensor_goes_both_ways(server: ServerProcess, expected: dict[int, Any]) -> None:
    user = np.random.default_rng(4).integers(0, 12, 200_000)
    watched = user[:, None]
    wanted = expected[2](user, watched)
    same(rest(server, user, watched), wanted)
    same(over_grpc(server, user, watched), wanted)
