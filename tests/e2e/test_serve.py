"""A server process answers over HTTP what TensorFlow itself computes from the same SavedModel."""

import base64
import concurrent.futures
import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.models import TABLE, save_zoo
from tests.support.serving.process import ServerProcess

FEEDS: dict[str, dict[str, Any]] = {
    "serving_default": {"ids": np.array([[0, 4], [2, 2], [1, 3]])},
    "mixed": {
        "ids": np.array([3, 0]),
        "weights": np.array([0.1, -2.5], np.float32),
        "on": np.array([True, False]),
    },
    "text": {"s": np.array(["abc", "\u00e9\u4e2d", "", 'q"\\\n'], dtype=object)},
    "double": {"x": np.array([1.0, -0.1, 1e300])},
    "int32": {"x": np.array([[1, -2], [3, 2**30 - 1]], np.int32)},
    "uint8": {"x": np.array([0, 255], np.uint8)},
    "logic": {"b": np.array([True, False, True])},
}


BODIES: list[dict[str, Any]] = [
    {"instances": [1, 2]},
    {"instances": [{"ids": 1, "weights": 0.5, "on": True}]},
    {"instances": [["a"], ["b"]]},
    {"inputs": {"ids": [1, 2], "weights": [0.5, 1], "on": [True, False]}},
    {"inputs": [[1, 2], [3, 4]]},
    {"inputs": {"s": ["a", {"b64": "aGk="}]}},
    {"inputs": [1.5, -2]},
    {"inputs": [[True]]},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "zoo"
    save_zoo(path / "3")
    return path


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model_dir, model_dir.with_name("server.log")) as running:
        running.wait_for(3)
        yield running


@pytest.fixture(scope="module")
def signatures(model_dir: Path) -> Any:
    return tf.saved_model.load(str(model_dir / "3")).signatures


def computed(signatures: Any, name: str) -> dict[str, Any]:
    feeds = {alias: tf.constant(value) for alias, value in FEEDS[name].items()}
    return {alias: value.numpy() for alias, value in signatures[name](**feeds).items()}


def decoded(alias: str, value: Any, like: Any) -> Any:
    """JSON as an array of the dtype that TensorFlow's own result has."""
    if like.dtype != object:
        return np.array(value, dtype=like.dtype)
    return [base64.b64decode(text["b64"]) if alias.endswith("_bytes") else text.encode() for text in value]


def check(answers: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(answers) == sorted(wanted)
    for alias, want in wanted.items():
        found = decoded(alias, answers[alias], want)
        np.testing.assert_array_equal(np.asarray(found, dtype=want.dtype), want)


@pytest.mark.parametrize("name", FEEDS)
@pytest.mark.sampled(2)
def test_row_form_equals_tensorflow(server: ServerProcess, signatures: Any, name: str) -> None:
    columns = {alias: value.tolist() for alias, value in FEEDS[name].items()}
    rows: list[Any] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    wanted = computed(signatures, name)
    forms = [rows, [next(iter(row.values())) for row in rows]] if len(columns) == 1 else [rows]
    for instances in forms:
        status, answer = server.predict({"signature_name": name, "instances": instances})
        assert (status, list(answer)) == (200, ["predictions"]), answer
        predictions = answer["predictions"]
        if len(wanted) == 1:
            predictions = [{alias: row} for alias in wanted for row in predictions]
        check({alias: [row[alias] for row in predictions] for alias in wanted}, wanted)


@pytest.mark.parametrize("name", FEEDS)
def test_columnar_form_equals_tensorflow(server: ServerProcess, signatures: Any, name: str) -> None:
    inputs: Any = {alias: value.tolist() for alias, value in FEEDS[name].items()}
    wanted = computed(signatures, name)
    for form in [inputs, *(inputs.values() if len(inputs) == 1 else [])]:
        status, answer = server.predict({"signature_name": name, "inputs": form})
        assert (status, list(answer)) == (200, ["outputs"]), answer
        outputs = dict.fromkeys(wanted, answer["outputs"]) if len(wanted) == 1 else answer["outputs"]
        check(outputs, wanted)


def test_a_float32_has_the_fewest_digits_that_read_back(server: ServerProcess) -> None:
    _, body = server.request("POST", f"{server.path}:predict", '{"instances": [[0, 1]]}')
    assert body == b'{"predictions":[[[0.0,0.14285715,0.2857143],[0.42857143,0.5714286,0.71428573]]]}'


def test_the_graph_decides_about_a_rank_that_is_not_the_signatures(server: ServerProcess) -> None:
    status, answer = server.predict({"inputs": [[[1], [2]]]})
    assert status == 200
    np.testing.assert_array_equal(np.array(answer["outputs"], np.float32), TABLE[np.array([[[1], [2]]])])
    status, answer = server.predict({"inputs": 4})
    np.testing.assert_array_equal(np.array(answer["outputs"], np.float32), TABLE[4])


@pytest.mark.parametrize(
    ("body", "status", "pattern"),
    [
        ({"instances": [[0, 5]]}, 400, r"^indices\[0,1\] = 5 is not in \[0, 5\)"),
        ({"instances": [[-1, 0]]}, 400, r"^indices\[0,0\] = -1 is not in \[0, 5\)"),
        ({"instances": [[1.0, 0]]}, 400, r"JSON Value: 1\.0 Type: Number is not of expected type: int64$"),
        ({"instances": [["1", 0]]}, 400, r'JSON Value: "1" Type: String is not of expected type: int64$'),
        (
            {"signature_name": "mixed", "inputs": {"ids": [1, 2], "weights": [1, 2, 3], "on": [True]}},
            400,
            r"(?i)incompatible shapes|required broadcastable shapes",
        ),
        ({"signature_name": "half", "inputs": [1.0]}, 501, r"^Conversion of JSON Value: 1\.0 to type: half$"),
        ({"signature_name": "to_half", "inputs": [1]}, 400, r"^Failed to write JSON value for tensor type: half$"),
        ({"signature_name": "total", "instances": [1]}, 400, r"^Tensor name: y has no shape information $"),
        (
            {"signature_name": "uneven", "instances": [1, 2]},
            400,
            r"^Tensor name: b has inconsistent batch size: 1 expecting: 2$",
        ),
        ({"signature_name": "none", "instances": [1]}, 400, r'^Serving signature name: "none" not found'),
    ],
)
def test_errors(server: ServerProcess, body: Any, status: int, pattern: str) -> None:
    found, answer = server.predict(body)
    assert found == status
    assert list(answer) == ["error"]
    assert re.search(pattern, answer["error"]), answer
    assert "Traceback" not in answer["error"]
    assert "/" not in answer["error"]


def test_a_large_batch(server: ServerProcess) -> None:
    ids = np.random.default_rng(0).integers(0, 5, (60_000, 2))
    for form, key in (("instances", "predictions"), ("inputs", "outputs")):
        status, answer = server.predict({form: ids.tolist()})
        assert status == 200
        np.testing.assert_array_equal(np.array(answer[key], np.float32), TABLE[ids])


def test_a_compressed_body(server: ServerProcess) -> None:
    body = gzip.compress(b'{"instances": [[4, 0]]}')
    target = f"http://{server.host}:{server.port}{server.path}:predict"
    reply = httpx.post(target, content=body, headers={"Content-Encoding": "gzip"})
    np.testing.assert_array_equal(np.array(reply.json()["predictions"], np.float32), TABLE[[[4, 0]]])


def test_bad_ids_fail_no_other_request(server: ServerProcess) -> None:
    def ask(row: int) -> tuple[int, tuple[int, Any]]:
        return row, server.predict({"instances": [[row, row]]})

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, [n % 7 for n in range(400)]))
    assert {(row, status) for row, (status, _) in answers} == {(row, 200 if row < 5 else 400) for row in range(7)}
    for row, (status, answer) in answers:
        if status == 200:
            np.testing.assert_array_equal(np.array(answer["predictions"], np.float32), TABLE[[[row, row]]])


def test_a_scalar_output_in_columns(server: ServerProcess) -> None:
    assert server.predict({"signature_name": "total", "inputs": [1, 2.5]}) == (200, {"outputs": 3.5})


def test_a_scalar_string_keeps_its_last_bytes(server: ServerProcess) -> None:
    value = {"b64": base64.b64encode(b"a\0b\0\0").decode()}
    assert server.predict({"signature_name": "first", "inputs": [value]}) == (200, {"outputs": value})
    status, answer = server.predict({"signature_name": "text", "inputs": value})
    assert (status, answer["outputs"]["raw_bytes"]) == (200, value)
    assert answer["outputs"]["length"] == 5


def test_an_empty_batch(server: ServerProcess) -> None:
    assert server.predict({"signature_name": "double", "inputs": []}) == (200, {"outputs": []})


def test_what_is_not_finite_goes_both_ways(server: ServerProcess) -> None:
    target, body = f"{server.path}:predict", '{"signature_name": "double", "instances": [NaN, Infinity, -Infinity]}'
    assert server.request("POST", target, body)[1] == b'{"predictions":[NaN,Infinity,-Infinity]}'


def test_versions_are_addressed_by_number(server: ServerProcess) -> None:
    assert server.predict({"instances": [[0, 1]]}, "/versions/3")[0] == 200
    status, answer = server.predict({"instances": [[0, 1]]}, "/versions/4")
    assert (status, answer) == (404, {"error": "Servable not found for request: Specific(zoo, 4)"})


def test_metadata_is_the_signatures(server: ServerProcess) -> None:
    status, body = server.request("GET", f"{server.path}/metadata")
    metadata = json.loads(body)
    assert status == 200
    assert metadata["model_spec"] == {"name": "zoo", "signature_name": "", "version": "3"}
    found = metadata["metadata"]["signature_def"]["signature_def"]
    assert found["serving_default"]["inputs"]["ids"] == {
        "dtype": "DT_INT64",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False},
        "name": "serving_default_ids:0",
    }
    assert found["serving_default"]["method_name"] == "tensorflow/serving/predict"
    assert {*FEEDS} <= {*found}


def test_no_broken_body_is_the_servers_fault(server: ServerProcess) -> None:
    random = np.random.default_rng(5)
    pieces = np.frombuffer(b'[]{}",:019.-etn\\\0', np.uint8)
    signatures = [*FEEDS, "half", "total", "uneven", "first", "none"]
    bodies = [json.dumps({"signature_name": name, **form}) for name in signatures for form in BODIES]
    target = f"http://{server.host}:{server.port}{server.path}:predict"
    codes = set()
    with httpx.Client() as client:
        for _ in range(1500):
            body = bytearray(bodies[random.integers(len(bodies))].encode())
            for _ in range(random.integers(0, 3)):
                at = random.integers(len(body))
                body[at : at + random.integers(0, 3)] = random.choice(pieces, random.integers(0, 3)).tobytes()
            reply = client.post(target, content=bytes(body))
            codes.add(reply.status_code)
            assert reply.status_code in (200, 400, 501), (body, reply.text)
            assert reply.status_code == 200 or list(reply.json()) == ["error"]
    assert codes == {200, 400, 501}


def test_one_connection_answers_many_requests(server: ServerProcess) -> None:
    with httpx.Client(base_url=f"http://{server.host}:{server.port}") as client:
        for row in range(5):
            reply = client.post(f"{server.path}:predict", json={"instances": [[row, 0]]})
            assert reply.headers["content-type"] == "application/json"
            np.testing.assert_array_equal(np.array(reply.json()["predictions"], np.float32)[0, 0], TABLE[row])
        assert client.get("/readyz").status_code == 200
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/docs").status_code == 200
        assert "/v1/models/{model}:predict" in client.get("/openapi.json").json()["paths"]
        assert client.get("/elsewhere").status_code == 404


def test_a_run_that_takes_too_long_is_504_and_a_stop_does_not_wait_for_it(model_dir: Path, tmp_path: Path) -> None:
    """The run goes on for a minute, unless the stop ends it."""
    with ServerProcess(model_dir, tmp_path / "server.log", "--rest-timeout-ms", "1500") as own:
        own.wait_for(3)
        status, answer = own.predict({"signature_name": "slow", "instances": [20_000_000]})
        assert (status, answer) == (504, {"error": "Timed out waiting for notification"})
        assert own.predict({"signature_name": "slow", "instances": [3]}) == (200, {"predictions": [3]})
        started = time.monotonic()
        assert own.stop() == 0
        assert time.monotonic() - started < 15
