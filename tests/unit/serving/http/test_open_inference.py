"""The Open Inference Protocol over ASGI, with a servable that returns its inputs: bodies, URLs, refusals, limits."""

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.messages import said
from tests.support.serving.asgi import Reply, running, send, wait_until_ready
from tests.support.serving.doubles import OPEN_INFERENCE, EchoServable, make_version
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.open_inference.tensors import DTYPES

INFER = "/v2/models/m/infer"
IDS = {"name": "ids", "shape": [2], "datatype": "INT64", "data": [1, 2]}
WORDS = {"name": "words", "shape": [1], "datatype": "BYTES", "data": ["ü"]}
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
NUMBERS = [name for name in OPEN_INFERENCE if name != "BYTES"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingApp]:
    base_path = tmp_path_factory.mktemp("models") / "m"
    make_version(base_path, 7)
    settings = ServerSettings.for_model_dir(base_path, max_body_bytes=100_000)
    with running(app := create_app(settings, load=lambda _: EchoServable())):
        wait_until_ready(app)
        yield app


def infer(app: ServingApp, members: Any, binary: Sequence[bytes] = (), target: str = INFER, **headers: str) -> Reply:
    """The reply to a request; `binary` follows its JSON."""
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    if binary:
        headers["inference_header_content_length"] = str(len(text))
    return send(app, "POST", target, text + b"".join(binary), **headers)


def outputs(reply: Reply) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Each output of an answer, with its binary data. The sizes are those of the body."""
    assert reply.status == 200, reply.body
    size = int(reply.headers.get(b"inference-header-content-length", len(reply.body)))
    found, at = {}, size
    for output in json.loads(reply.body[:size])["outputs"]:
        count = output.get("parameters", {}).get("binary_data_size", 0)
        found[output["name"]] = output, reply.body[at : at + count]
        at += count
    assert at == len(reply.body)
    binary = b"inference-header-content-length" in reply.headers
    assert reply.headers[b"content-type"] == (b"application/octet-stream" if binary else b"application/json")
    return found


def tensor(name: str, array: Any, datatype: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype, **more}


def any_array(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BF16":
        return hnp.arrays(np.uint16, SHAPES).map(lambda array: array.view(DTYPES["BF16"]))
    return hnp.arrays(DTYPES[datatype], SHAPES)


@pytest.mark.parametrize("datatype", NUMBERS)
@given(data=st.data())
@pytest.mark.sampled(4)
def test_binary_numbers_come_back_bit_by_bit(app: ServingApp, datatype: str, data: Any) -> None:
    array = data.draw(any_array(datatype))
    content = array.tobytes()
    members = {
        "parameters": {"signature_name": datatype, "binary_data_output": True},
        "inputs": [tensor("x", array, datatype, parameters={"binary_data_size": len(content)})],
    }
    output, found = outputs(infer(app, members, [content]))["y"]
    assert found == content
    assert (output["datatype"], output["shape"]) == (datatype, list(array.shape))


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("is_flat", [True, False])
@given(data=st.data())
@pytest.mark.sampled(6)
def test_json_numbers_come_back_as_the_same_numbers(app: ServingApp, datatype: str, is_flat: bool, data: Any) -> None:
    array = data.draw(any_array(datatype))
    values = (array.ravel() if is_flat or not array.ndim else array).tolist()
    members = {"parameters": {"signature_name": datatype}, "inputs": [tensor("x", array, datatype, data=values)]}
    output, _ = outputs(infer(app, members))["y"]
    if array.dtype.kind in "fV":
        found = (
            np.array(output["data"], np.float64).astype(array.dtype).astype(np.float64)
        )  # of BF16, numpy compares no NaN
        np.testing.assert_array_equal(found.reshape(output["shape"]), array.astype(np.float64))
    else:
        assert (output["data"], output["shape"]) == (array.ravel().tolist(), list(array.shape))


def test_outputs_are_those_that_are_asked_for_in_their_form_and_order(app: ServingApp) -> None:
    asked = [{"name": "words"}, {"name": "ids", "parameters": {"binary_data": True}}]
    reply = infer(app, {"inputs": [WORDS, IDS], "outputs": asked})
    found = outputs(reply)
    assert list(found) == ["words", "ids"]
    assert found["words"][0]["data"] == ["ü"]
    assert found["ids"][1] == struct.pack("<2q", 1, 2)
    asked = [{"name": "ids", "parameters": {"binary_data": False}}, {"name": "words"}]
    found = outputs(infer(app, {"inputs": [WORDS, IDS], "outputs": asked, "parameters": {"binary_data_output": True}}))
    assert found["ids"][0]["data"] == [1, 2]
    assert found["words"][1] == b"\x02\0\0\0\xc3\xbc"


def test_parameters_of_mlservers_codecs_that_mean_the_tensor_itself_are_taken(app: ServingApp) -> None:
    inputs = [{**IDS, "parameters": {"content_type": "np"}}, {**WORDS, "parameters": {"content_type": "str"}}]
    assert infer(app, {"parameters": {"content_type": "pd"}, "inputs": inputs}).status == 200


def test_null_is_what_a_client_leaves_out(app: ServingApp) -> None:
    inputs = [{**IDS, "parameters": None}, {**WORDS, "parameters": {"content_type": "str", "headers": None}}]
    assert infer(app, {"id": None, "parameters": None, "inputs": inputs, "outputs": None}).status == 200


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {}}, {"inputs": [1]}, {"inputs": []}, {"inputs": [IDS]}, {"inputs": [IDS, IDS, WORDS]},
        {"inputs": [IDS, WORDS, {**IDS, "name": "<b>"}]}, {"outputs": 1}, {"outputs": [{}]}, {"outputs": [{"name": "z"}]},
        {"outputs": [{"name": "ids"}, {"name": "ids"}]}, {"id": 1}, {"parameters": []}, {"output": []},
        {"parameters": {"signature_name": "z"}}, {"parameters": {"signature_name": 1}}, {"parameters": {"signatur": "z"}},
        {"parameters": {"timeout": 1}}, {"parameters": {"content_type": "base64"}},
        {"outputs": [{"name": "ids", "parameters": {"classification": 2}}]},
        {"outputs": [{"name": "ids", "parameters": {"binary_data": 1}}]},
        {"parameters": {"signature_name": "complex"}, "inputs": [{**IDS, "name": "x"}]},
    ],
)  # fmt: skip
def test_refuses_requests(app: ServingApp, change: dict[str, Any]) -> None:
    reply = infer(app, {"inputs": [IDS, WORDS], **change})
    assert reply.status == (501 if "complex" in str(change) else 400)
    said(reply.error)


@pytest.mark.parametrize(
    "change",
    [
        {"name": None}, {"name": 1}, {"shape": None}, {"shape": 2}, {"shape": [-2]}, {"shape": [True]}, {"shape": [2**62, 2**62]},
        {"datatype": "INT65"}, {"datatype": "INT32"}, {"datatype": None}, {"data": None}, {"data": 1}, {"data": [1]},
        {"data": [1, 2, 3]}, {"data": [[1, 2]]}, {"data": [[1], 2]}, {"data": [1, 2.5]}, {"data": [1, True]}, {"data": [1, "2"]},
        {"data": [1, None]}, {"data": [1, 2**63]}, {"data": [1, {}]}, {"data": []}, {"shape": [2, 2], "data": [[1, 2], [3]]},
        {"shape": [2, 2], "data": [[1, 2], 3]}, {"shape": [1, 2], "data": [[[1, 2]]]}, {"shape": []},
        {"parameters": {"binary_data_size": 16}}, {"parameters": {"shared_memory_region": "a"}},
    ],
)  # fmt: skip
def test_refuses_inputs(app: ServingApp, change: dict[str, Any]) -> None:
    members = {key: value for key, value in {**IDS, **change}.items() if value is not None}
    reply = infer(app, {"inputs": [members, WORDS]})
    assert reply.status == 400
    said(reply.error)


@pytest.mark.parametrize(("datatype", "value"), [("FP32", 1e39), ("FP16", 70000), ("FP64", 10**400), ("UINT8", -1)])
def test_refuses_numbers_that_do_not_fit(app: ServingApp, datatype: str, value: Any) -> None:
    tensors = [{"name": "x", "shape": [1], "datatype": datatype, "data": [value]}]
    reply = infer(app, {"parameters": {"signature_name": datatype}, "inputs": tensors})
    assert reply.status == 400
    said(reply.error)


BINARY = {key: value for key, value in IDS.items() if key != "data"}
SIXTEEN = {"inputs": [{**BINARY, "parameters": {"binary_data_size": 16}}, WORDS]}


@pytest.mark.parametrize("sizes", [(16, 15), (16, 17), (-1, 16), (15, 15), (2**70, 16), (0, 0)])
def test_refuses_binary_data_of_another_size(app: ServingApp, sizes: tuple[int, int]) -> None:
    size, sent = sizes
    members = {"inputs": [{**BINARY, "parameters": {"binary_data_size": size}}, WORDS]}
    text = json.dumps(members).encode()
    reply = send(app, "POST", INFER, text + bytes(sent), inference_header_content_length=str(len(text)))
    assert reply.status == 400
    said(reply.error)


@pytest.mark.parametrize("length", ["x", "-1", "9" * 30, "99999", "7", "+5"])
def test_refuses_a_header_length_that_is_not_the_jsons(app: ServingApp, length: str) -> None:
    reply = send(app, "POST", INFER, json.dumps(SIXTEEN).encode() + bytes(16), inference_header_content_length=length)
    assert reply.status == 400
    said(reply.error)


def test_refuses_binary_data_without_the_header(app: ServingApp) -> None:
    reply = send(app, "POST", INFER, json.dumps(SIXTEEN).encode())
    assert reply.status == 400
    said(reply.error)


def test_refuses_strings_that_json_does_not_have(app: ServingApp) -> None:
    tensors = [{"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]
    reply = infer(app, {"parameters": {"signature_name": "BYTES"}, "inputs": tensors}, [b"\x01\0\0\0\xff"])
    assert reply.status == 400
    said(reply.error)


VALID = json.dumps(
    {
        "id": "1",
        "parameters": {"binary_data_output": True},
        "inputs": [
            {"name": "words", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 11}},
            {"name": "ids", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}},
        ],
    }
).encode()
AFTER = b"\x03\0\0\0abc\x00\0\0\0" + struct.pack("<2q", 1, 2)


@given(
    at=st.integers(0, len(VALID + AFTER)),
    gone=st.integers(0, 20),
    new=st.binary(max_size=8) | st.sampled_from([b"-1", b"9" * 30, b"null", b"[", b"\xff\xff\xff\xff", b"1e400"]),
    length=st.integers(-3, 30) | st.just(0),
)
def test_damaged_requests_are_refused_or_answered(app: ServingApp, at: int, gone: int, new: bytes, length: int) -> None:
    """Whatever is cut, changed or inserted, and whatever the header says."""
    body = (VALID + AFTER)[:at] + new + (VALID + AFTER)[at + gone :]
    reply = send(app, "POST", INFER, body, inference_header_content_length=str(max(0, len(VALID) + length)))
    assert reply.status in (200, 400, 404, 501), reply.body
    if reply.status == 200:
        for output, content in outputs(reply).values():
            if output["datatype"] == "INT64":
                assert len(content) == 8 * int(np.prod(output["shape"]))
            assert content in body


ROUTES = [
    ("GET", "/v2", 200), ("GET", "/v2/", 200), ("GET", "/v2/models/m", 200), ("GET", "/v2/models/m/versions/7", 200),
    ("GET", "/v2/models/m/ready", 200), ("GET", "/v2/models/m/versions/7/ready", 200),
    ("GET", "/v2/models/m/versions/8/ready", 404), ("GET", "/v2/models/n/ready", 404), ("GET", "/v2/models/n", 404),
    ("GET", "/v2/models/m/versions/8", 404), ("GET", "/v2/models/m/versions/none", 400), ("GET", "/v2/other", 404),
    ("GET", "/v2/models", 404), ("GET", "/v2/models/m/other", 404), ("GET", INFER, 405), ("POST", "/v2", 405),
    ("POST", "/v2/models/m/ready", 405), ("DELETE", "/v2/models/m", 405), ("POST", "/v2/models/n/infer", 404),
    ("GET", "/v2/systemsharedmemory/status", 501), ("POST", "/v2/systemsharedmemory/region/a/register", 501),
    ("GET", "/v2/cudasharedmemory/region/a/status", 501), ("POST", "/v2/repository/index", 501),
    ("POST", "/v2/repository/models/m/load", 501), ("GET", "/v2/models/stats", 501), ("GET", "/v2/models/m/stats", 501),
    ("GET", "/v2/models/m/versions/7/stats", 501), ("GET", "/v2/models/m/config", 501), ("GET", "/v2/trace/setting", 501),
    ("GET", "/v2/models/m/trace/setting", 501), ("GET", "/v2/logging", 501), ("POST", "/v2/models/m/generate", 501),
]  # fmt: skip


@pytest.mark.parametrize(("method", "target", "status"), ROUTES)
def test_routes(app: ServingApp, method: str, target: str, status: int) -> None:
    body = json.dumps({"inputs": [IDS, WORDS]}) if method == "POST" else ""
    reply = send(app, method, target, body)
    assert reply.status == status
    assert reply.headers.get(b"allow") == ({INFER: b"POST"}.get(target, b"GET") if status == 405 else None)
    if status >= 400:
        said(reply.error)


def test_a_server_that_loads_or_leaves_is_live_and_not_ready(tmp_path: Path) -> None:
    make_version(tmp_path / "m", 1)
    go_on = threading.Event()

    def load(_: Path) -> EchoServable:
        assert go_on.wait(30)
        return EchoServable()

    with running(app := create_app(ServerSettings.for_model_dir(tmp_path / "m"), load=load)):
        assert send(app, "GET", "/v2/health/live").status == 200
        for target in ("/v2/health/ready", "/v2/models/m/ready"):
            reply = send(app, "GET", target)
            assert (reply.status, json.loads(reply.body)["ready"]) == (503, False)
        assert infer(app, {"inputs": [IDS, WORDS]}).status == 503
        go_on.set()
        wait_until_ready(app)
        assert send(app, "GET", "/v2/health/ready").status == 200
        app.leaving = True
        assert send(app, "GET", "/v2/health/ready").status == 503
        assert send(app, "GET", "/v2/health/live").status == 200


def test_binary_data_counts_for_the_memory_of_requests(tmp_path: Path) -> None:
    """Numbers are used where they lie. Strings become objects, also where an escape hides their datatype."""
    make_version(tmp_path / "m", 7)
    settings = ServerSettings.for_model_dir(tmp_path / "m", max_request_memory=10 * 2**20)
    with running(app := create_app(settings, load=lambda _: EchoServable())):
        wait_until_ready(app)
        content = bytes(2**20)
        size = {"binary_data_size": len(content)}
        for datatype, shape, status in (
            ("UINT64", [1, 2**17], 200),
            ("BYTES", [2**18], 413),
            ("BY\\u0054ES", [2**18], 413),
        ):
            name = datatype.replace("\\u0054", "T")
            members = {
                "parameters": {"signature_name": name, "binary_data_output": True},
                "inputs": [{"name": "x", "shape": shape, "datatype": name, "parameters": size}],
            }
            text = json.dumps(members).replace(f'"datatype": "{name}"', f'"datatype": "{datatype}"')
            text = text.replace(f'"signature_name": "{name}"', f'"signature_name": "{datatype}"')
            assert infer(app, text.encode(), [content]).status == status, datatype
