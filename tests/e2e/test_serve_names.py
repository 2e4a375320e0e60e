"""Whole servers whose features take names: every API, many clients at once, and clients that send anything."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import said
from tests.support.serving.process import ServerProcess
from tpuembed import Vocabulary, export_saved_model
from tpuembed.config import ServingConfig, ServingFeature
from tpuembed_serving.grpc.open_inference_messages import SERVICE, message
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

HOSTILE = [b"a\0b", b"\xff\xfe", "naïve 東京".encode(), b"'", b'"\\', b"\n", b"x" * (1 << 20), b"[UNK]", b"0"]
USERS = [*HOSTILE, *(f"user {number}".encode() for number in range(200))]
ITEMS = [2**53 + 1, 2**53, -5, 2**63 - 1, -(2**63), *range(100, 300)]
ROWS = 300
VALUES = {"users": random_table(ROWS, 6), "items": random_table(ROWS, 4, seed=1)}
CONFIG = """
model_config_list {{ config {{ name: "m" base_path: "{path}/m" model_platform: "tensorflow" }}
                     config {{ name: "v" base_path: "{path}/v" model_platform: "tensorflow" }} }}
"""


def row_of_user(name: bytes) -> Any:
    return VALUES["users"][USERS.index(name)]


def row_of_item(name: int) -> Any:
    return VALUES["items"][2 + ITEMS.index(name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    users, items = Vocabulary(USERS), Vocabulary(ITEMS, dtype="int64", oov_buckets=2)
    served = ServingConfig(
        features={
            "user": ServingFeature(table="users", input="id", vocabulary=users),
            "friends": ServingFeature(table="users", combiner="sum", vocabulary=users),
            "item": ServingFeature(table="items", input="id", vocabulary=items),
        }
    )
    write_checkpoint(folder / "ckpt", VALUES)
    for name, layout in (("m", "mmap"), ("v", "variables")):
        export_saved_model(folder / "ckpt", folder / name, serving_config=served, layout=layout)
    (folder / "models.config").write_text(CONFIG.format(path=folder))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = ("--grpc-port", "0", "--lookups", "native", "--metrics", "--verify-on-load", "--prewarm")
    with ServerProcess(None, folder / "log", "--config", str(folder / "models.config"), *options) as running:
        running.wait_for(1)
        while running.request("GET", "/v2/health/ready")[0] != 200:
            assert running.process.poll() is None, running.log
        yield running
    assert "Traceback" not in running.log


def value_of(name: bytes) -> Any:
    try:
        text = name.decode()
        return {"b64": base64.b64encode(name).decode()} if "x" in text else text
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(name).decode()}


def predict(server: ServerProcess, body: Any, model: str = "m", method: str = "predict") -> tuple[int, Any]:
    status, reply = server.request("POST", f"/v1/models/{model}:{method}", json.dumps(body))
    return status, json.loads(reply)


def row(user: bytes, friends: list[bytes], item: int) -> dict[str, Any]:
    return {"user": value_of(user), "friends": [value_of(one) for one in friends], "item": item}


def check(found: dict[str, Any], lines: list[tuple[bytes, list[bytes], int]]) -> None:
    users, friends, items = zip(*lines, strict=True)
    np.testing.assert_array_equal(np.float32(found["user"]), [row_of_user(one) for one in users])
    np.testing.assert_array_equal(np.float32(found["item"]), [row_of_item(one) for one in items])
    sums = [np.sum([row_of_user(one) for one in many if one] or [np.zeros(6)], 0) for many in friends]
    np.testing.assert_allclose(found["friends"], sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["m", "v"])
def test_rest_takes_text_base64_and_exact_integers(server: ServerProcess, model: str) -> None:
    lines = [(name, [name, b"user 1"], ITEMS[index % 5]) for index, name in enumerate(HOSTILE)]
    status, reply = predict(server, {"instances": [row(*line) for line in lines]}, model)
    assert status == 200, reply
    check({key: [one[key] for one in reply["predictions"]] for key in ("user", "friends", "item")}, lines)
    columns = [row(*line) for line in lines]
    body = {"inputs": {key: [one[key] for one in columns] for key in columns[0]}}
    status, reply = predict(server, body, model)
    assert status == 200, reply
    check(reply["outputs"], lines)


def test_ragged_lists_are_padded_with_empty_text(server: ServerProcess) -> None:
    lines = [(b"user 1", [], 100), (b"user 2", [b"user 5"], 101), (b"user 3", [b"user 5", b"", b"user 6"], 102)]
    status, reply = predict(server, {"instances": [row(*line) for line in lines]})
    assert status == 200, reply
    check({key: [one[key] for one in reply["predictions"]] for key in ("user", "friends", "item")}, lines)


def over_grpc(
    server: ServerProcess, lines: list[tuple[bytes, list[bytes], int]], signature: str = ""
) -> dict[str, Any]:
    users, friends, items = zip(*lines, strict=True)
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "m", signature
    arrays = {"user": np.array(users, object), "friends": np.array(friends, object), "item": np.array(items, np.int64)}
    for name, value in arrays.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value.tolist() if value.dtype == object else value))
    with grpc.insecure_channel(server.grpc_address, [("grpc.max_send_message_length", -1)]) as channel:
        reply = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    return {name: tf.make_ndarray(tensor) for name, tensor in reply.outputs.items()}


def test_grpc_takes_bytes(server: ServerProcess) -> None:
    lines = [(name, [name, b"user 1"], ITEMS[index % 5]) for index, name in enumerate(HOSTILE)]
    check(over_grpc(server, lines), lines)


def test_the_open_inference_protocol_takes_bytes(server: ServerProcess) -> None:
    lines = [(name, [name, b"user 1"], ITEMS[index % 5]) for index, name in enumerate(HOSTILE)]
    users, friends, items = zip(*lines, strict=True)

    def raw(names: Any) -> bytes:
        return b"".join(len(name).to_bytes(4, "little") + name for name in names)

    inputs = [
        {"name": "user", "shape": [len(lines)], "datatype": "BYTES"},
        {"name": "friends", "shape": [len(lines), 2], "datatype": "BYTES"},
        {"name": "item", "shape": [len(lines)], "datatype": "INT64"},
    ]
    contents = [raw(users), raw(name for many in friends for name in many), np.array(items, np.int64).tobytes()]
    request = message("ModelInferRequest")(model_name="m", inputs=inputs, raw_input_contents=contents)
    with grpc.insecure_channel(server.grpc_address, [("grpc.max_send_message_length", -1)]) as channel:
        data = channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), timeout=60)
    answer = message("ModelInferResponse").FromString(data)
    found = {
        output.name: np.frombuffer(content, "<f4").reshape(output.shape)
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    check(found, lines)
    body = {
        "inputs": [
            {"name": "user", "shape": [1], "datatype": "BYTES", "data": ["naïve 東京"]},
            {"name": "friends", "shape": [1, 1], "datatype": "BYTES", "data": ["user 3"]},
            {"name": "item", "shape": [1], "datatype": "INT64", "data": [2**53 + 1]},
        ]
    }
    status, reply = server.request("POST", "/v2/models/m/infer", json.dumps(body))
    assert status == 200, reply
    outputs = {one["name"]: np.float32(one["data"]).reshape(one["shape"]) for one in json.loads(reply)["outputs"]}
    check(outputs, [("naïve 東京".encode(), [b"user 3"], 2**53 + 1)])


def test_examples_hold_names(server: ServerProcess) -> None:
    def bytes_list(*names: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=names))

    features = {
        "user": bytes_list(b"\xff\xfe"),
        "friends": bytes_list(b"user 1", b"user 2"),
        "item": tf.train.Feature(int64_list=tf.train.Int64List(value=[2**53 + 1])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    body = {"signature_name": "serving_examples", "instances": [{"b64": base64.b64encode(example).decode()}]}
    status, reply = predict(server, body)
    assert status == 200, reply
    (found,) = reply["predictions"]
    check({name: [value] for name, value in found.items()}, [(b"\xff\xfe", [b"user 1", b"user 2"], 2**53 + 1)])


def test_an_unknown_name_has_a_sentence(server: ServerProcess) -> None:
    for name in (b"nobody", b"\xffno\0body", b"y" * (1 << 20), "Ünbekannt'\\".encode()):
        status, reply = predict(server, {"instances": [row(b"user 1", [], 1), row(name, [], 1)]})
        assert status == 400
        said(reply["error"])
        assert len(reply["error"]) < 300


def test_a_wrong_type_has_a_sentence(server: ServerProcess) -> None:
    for user, item in ((3, 1), ("user 1", "x"), (None, 1), ("user 1", 1.5), ("user 1", 2**63)):
        status, reply = predict(server, {"instances": [{"user": user, "friends": [], "item": item}]})
        assert status == 400
        said(reply["error"])


def test_an_unknown_name_fails_its_request_alone(server: ServerProcess) -> None:
    """Many clients at once share runs; one of five sends a name that nobody has."""

    def ask(index: int) -> None:
        name, friends = f"user {index % 200}".encode(), [f"user {n}".encode() for n in range(index % 4)]
        if index % 5:
            status, reply = predict(server, {"instances": [row(name, friends, 100 + index % 50)]})
            assert status == 200, reply
            check({key: [value] for key, value in reply["predictions"][0].items()}, [(name, friends, 100 + index % 50)])
        else:
            status, reply = predict(server, {"instances": [row(b"nobody %d" % index, friends, 100)]})
            assert status == 400
            assert f"name 'nobody {index}' of row 0 is not in the vocabulary of table users" in reply["error"]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(400)))


@pytest.mark.parametrize("lookups", ["native", "auto", "tensorflow"])
@pytest.mark.sampled(1)
def test_integers_that_are_names_are_never_rows(tmp_path: Path, lookups: Any) -> None:
    """Names that are row numbers of other names: a lookup of rows would answer, and wrongly."""
    names = [*range(1, ROWS), 0]
    vocabulary = Vocabulary(names, dtype="int64")
    write_checkpoint(tmp_path / "ckpt", {"users": VALUES["users"]})
    features = {"x": ServingFeature(table="users", combiner="sum", vocabulary=vocabulary)}
    config = ServingConfig(features=features)
    version = export_saved_model(tmp_path / "ckpt", tmp_path / "m", serving_config=config, layout="mmap").path
    servable = runtime.load(version, options=runtime.RunOptions(lookups=lookups))
    try:
        signature = servable.signatures["serving_default"]
        assert servable.merging(signature) is not None
        assert signature.ids is not None
        assert signature.ids.error([np.full((1, 2), 10 * ROWS)]) is None
        ids = np.random.default_rng(0).integers(0, ROWS, (64, 40))  # as many as native lookups take
        (found,) = servable.run(signature, [ids])
        np.testing.assert_allclose(found, VALUES["users"][(ids - 1) % ROWS].sum(1), rtol=1e-4, atol=1e-4)
        (rows,) = servable.run(servable.signatures["packed"], [ids])
        np.testing.assert_allclose(rows, VALUES["users"][ids].sum(1), rtol=1e-4, atol=1e-4)
    finally:
        servable.close()


def test_descriptions_say_string(server: ServerProcess) -> None:
    status, body = server.request("GET", "/v1/models/m/metadata")
    inputs = json.loads(body)["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
    assert (inputs["user"]["dtype"], inputs["item"]["dtype"]) == ("DT_STRING", "DT_INT64")
    status, body = server.request("GET", "/v2/models/m")
    assert {one["name"]: one["datatype"] for one in json.loads(body)["inputs"]} == {
        "user": "BYTES",
        "friends": "BYTES",
        "item": "INT64",
    }
    assert status == 200
    status, body = server.request("GET", "/openapi.json")
    assert status == 200
    assert b'"user"' in body
