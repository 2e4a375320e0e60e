"""The Open Inference Protocol with a model that returns its inputs: datatypes, damaged and refused requests, routes, limits."""

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.contract_open_inference import SERVICE, TENSOR_CONTENTS, message
from tests.support.messages import said
from tests.support.serving.doubles import OPEN_INFERENCE, EchoServable, wait_for
from tests.support.serving.process import Reply
from tests.support.serving.served import Served

INFER = "/v2/models/m/infer"
IDS = {"name": "ids", "shape": [2], "datatype": "INT64", "data": [1, 2]}
WORDS = {"name": "words", "shape": [1], "datatype": "BYTES", "data": ["ü"]}
CONTENTS = TENSOR_CONTENTS | dict.fromkeys(("INT8", "INT16"), "int_contents") | {
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
}  # fmt: skip
NUMBERS = [name for name in OPEN_INFERENCE if name != "BYTES"]
DTYPES = {
    name: np.dtype({"half": "f2", "float": "f4", "double": "f8"}.get(OPEN_INFERENCE[name], OPEN_INFERENCE[name]))
    for name in NUMBERS
}
SHAPES = [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (1, 1, 2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    with (
        pytest.MonkeyPatch.context() as patch,
        Served(folder, patch, lambda _: EchoServable(), max_body_bytes=100_000) as running,
    ):
        wait_for(lambda: running.is_ready)
        yield running


@pytest.fixture(scope="module")
def call(server: Served) -> Iterator[Any]:
    with server.channel() as channel:
        yield channel.unary_unary(f"/{SERVICE}/ModelInfer")


def infer(server: Served, members: Any, binary: Sequence[bytes] = (), **headers: str) -> Reply:
    """The reply to a request; `binary` follows its JSON."""
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    if binary:
        headers["inference_header_content_length"] = str(len(text))
    return server.send("POST", INFER, text + b"".join(binary), **headers)


def outputs(reply: Reply) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Each output of an answer, with its binary data. The sizes are those of the body."""
    assert reply.status == 200, reply.body
    size = int(reply.headers.get("inference-header-content-length", len(reply.body)))
    found, at = {}, size
    for output in json.loads(reply.body[:size])["outputs"]:
        count = output.get("parameters", {}).get("binary_data_size", 0)
        found[output["name"]] = output, reply.body[at : at + count]
        at += count
    assert at == len(reply.body)
    binary = "inference-header-content-length" in reply.headers
    assert reply.headers["content-type"] == ("application/octet-stream" if binary else "application/json")
    return found


def tensor(name: str, array: Any, datatype: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype, **more}


def infer_request(*tensors: dict[str, Any], raw: tuple[bytes, ...] = (), signature: str = "", **fields: Any) -> bytes:
    parameters = {"signature_name": {"string_param": signature}} if signature else {}
    fields = {"model_name": "m", "parameters": parameters, **fields}
    outputs = [_with_parameters(output) for output in fields.pop("outputs", ())]
    inputs = [_with_parameters(tensor) for tensor in tensors]
    fields |= {"inputs": inputs, "outputs": outputs, "raw_input_contents": raw}
    request = message("ModelInferRequest")(**_with_parameters(fields))
    return bytes(request.SerializeToString())


def _with_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Protobuf before version 6 takes no dict for a message in a map."""
    given = fields.get("parameters", {})
    return {**fields, "parameters": {name: message("InferParameter")(**value) for name, value in given.items()}}


def answer_of(call: Any, data: bytes) -> Any:
    return message("ModelInferResponse").FromString(call(data, timeout=60))


def samples(datatype: str) -> list[Any]:
    """Arrays of each shape with the extremes of the datatype, and for floats every kind of number."""
    dtype = DTYPES[datatype]
    if dtype.kind == "b":
        values = np.array([True, False, True])
    elif dtype.kind in "iu":
        values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 7], dtype)
    else:
        values = np.array([1.5, -0.0, np.nan, np.inf, -np.inf, 1e-7], dtype)
    return [np.resize(np.roll(values, -at), shape) for at, shape in itertools.product(range(len(values)), SHAPES)]


def assert_equal(found: Any, wanted: Any) -> None:
    kind = np.float64 if wanted.dtype.kind in "fV" else wanted.dtype  # of bfloat16, numpy compares no NaN
    np.testing.assert_array_equal(found.astype(kind), wanted.astype(kind))


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_come_back_bit_by_bit(server: Served, call: Any, datatype: str) -> None:
    """As binary data over REST, and raw over gRPC."""
    for array in samples(datatype):
        content, x = array.tobytes(), tensor("x", array, datatype)
        members = {
            "parameters": {"signature_name": datatype, "binary_data_output": True},
            "inputs": [x | {"parameters": {"binary_data_size": len(content)}}],
        }
        output, found = outputs(infer(server, members, [content]))["y"]
        assert (output["datatype"], output["shape"], found) == (datatype, list(array.shape), content)
        answer = answer_of(call, infer_request(x, raw=(content,), signature=datatype, id="7"))
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "7")
        (output,) = answer.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("y", datatype, list(array.shape))
        assert list(answer.raw_output_contents) == [content]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_come_back_as_the_same_numbers(server: Served, call: Any, datatype: str) -> None:
    """In JSON, flat and in lists of lists, and over gRPC in the field of the datatype, if it has one."""
    for array in samples(datatype):
        for values in (array.ravel(), array) if array.ndim else (array.ravel(),):
            members = {
                "parameters": {"signature_name": datatype},
                "inputs": [tensor("x", array, datatype, data=values.tolist())],
            }
            output, _ = outputs(infer(server, members))["y"]
            found = np.array(output["data"], array.dtype).reshape(output["shape"])
            assert_equal(found, array)
        if field := CONTENTS.get(datatype):
            x = tensor("x", array, datatype, contents={field: array.ravel().tolist()})
            answer = answer_of(call, infer_request(x, signature=datatype))
            assert not answer.raw_output_contents
            (output,) = answer.outputs
            found = np.array(getattr(output.contents, field), array.dtype).reshape(list(output.shape))
            assert_equal(found, array)


def test_outputs_are_those_that_are_asked_for_in_their_form_and_order(server: Served) -> None:
    asked = [{"name": "words"}, {"name": "ids", "parameters": {"binary_data": True}}]
    reply = infer(server, {"inputs": [WORDS, IDS], "outputs": asked})
    found = outputs(reply)
    assert list(found) == ["words", "ids"]
    assert found["words"][0]["data"] == ["ü"]
    assert found["ids"][1] == struct.pack("<2q", 1, 2)
    asked = [{"name": "ids", "parameters": {"binary_data": False}}, {"name": "words"}]
    found = outputs(
        infer(server, {"inputs": [WORDS, IDS], "outputs": asked, "parameters": {"binary_data_output": True}})
    )
    assert found["ids"][0]["data"] == [1, 2]
    assert found["words"][1] == b"\x02\0\0\0\xc3\xbc"


def test_parameters_of_mlservers_codecs_that_mean_the_tensor_itself_are_taken(server: Served) -> None:
    inputs = [{**IDS, "parameters": {"content_type": "np"}}, {**WORDS, "parameters": {"content_type": "str"}}]
    assert infer(server, {"parameters": {"content_type": "pd"}, "inputs": inputs}).status == 200


def test_null_is_what_a_client_leaves_out(server: Served) -> None:
    inputs = [{**IDS, "parameters": None}, {**WORDS, "parameters": {"content_type": "str", "headers": None}}]
    assert infer(server, {"id": None, "parameters": None, "inputs": inputs, "outputs": None}).status == 200


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
def test_refuses_requests(server: Served, change: dict[str, Any]) -> None:
    reply = infer(server, {"inputs": [IDS, WORDS], **change})
    assert reply.status == (501 if "complex" in str(change) else 400)
    said(reply.error)


@pytest.mark.parametrize(
    "change",
    [
        {"name": None}, {"name": 1}, {"shape": None}, {"shape": 2}, {"shape": [-2]}, {"shape": [True]}, {"shape": [1.0]},
        {"shape": ["1"]}, {"shape": [2, -1, -1]}, {"shape": [2**63]}, {"shape": [0, 2**64]}, {"shape": [1] * 65},
        {"shape": [-1] * 20}, {"shape": [2**62, 2**62]},
        {"datatype": "INT65"}, {"datatype": "INT32"}, {"datatype": None}, {"data": None}, {"data": 1}, {"data": [1]},
        {"data": [1, 2, 3]}, {"data": [[1, 2]]}, {"data": [[1], 2]}, {"data": [1, 2.5]}, {"data": [1, True]}, {"data": [1, "2"]},
        {"data": [1, None]}, {"data": [1, 2**63]}, {"data": [1, {}]}, {"data": []}, {"shape": [2, 2], "data": [[1, 2], [3]]},
        {"shape": [2, 2], "data": [[1, 2], 3]}, {"shape": [1, 2], "data": [[[1, 2]]]}, {"shape": []},
        {"parameters": {"binary_data_size": 16}}, {"parameters": {"shared_memory_region": "a"}},
    ],
)  # fmt: skip
def test_refuses_inputs(server: Served, change: dict[str, Any]) -> None:
    members = {key: value for key, value in {**IDS, **change}.items() if value is not None}
    reply = infer(server, {"inputs": [members, WORDS]})
    assert reply.status == 400
    said(reply.error)


@pytest.mark.parametrize(("datatype", "value"), [("FP32", 1e39), ("FP16", 70000), ("FP64", 10**400), ("UINT8", -1)])
def test_refuses_numbers_that_do_not_fit(server: Served, datatype: str, value: Any) -> None:
    tensors = [{"name": "x", "shape": [1], "datatype": datatype, "data": [value]}]
    reply = infer(server, {"parameters": {"signature_name": datatype}, "inputs": tensors})
    assert reply.status == 400
    said(reply.error)


BINARY = {key: value for key, value in IDS.items() if key != "data"}
SIXTEEN = {"inputs": [{**BINARY, "parameters": {"binary_data_size": 16}}, WORDS]}


@pytest.mark.parametrize("sizes", [(16, 15), (16, 17), (-1, 16), (15, 15), (2**70, 16), (0, 0)])
def test_refuses_binary_data_of_another_size(server: Served, sizes: tuple[int, int]) -> None:
    size, sent = sizes
    members = {"inputs": [{**BINARY, "parameters": {"binary_data_size": size}}, WORDS]}
    text = json.dumps(members).encode()
    reply = server.send("POST", INFER, text + bytes(sent), inference_header_content_length=str(len(text)))
    assert reply.status == 400
    said(reply.error)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [], b""), ("FP32", [0, 3], bytes(4)), ("UINT8", [2**29, 2**29], bytes(4)), ("BOOL", [3], b"\x00\x01\x02"),
        ("BYTES", [2], b"\x01\0\0\0a"), ("BYTES", [2], b"\x00\0\0\0\x00\0\0"), ("BYTES", [1], b"\x02\0\0\0a"),
        ("BYTES", [1], b"\xff\xff\xff\xffa"), ("BYTES", [2], b"\x04\0\0\0aaaa\x01"), ("BYTES", [1], b"\x01\0\0\0ab"),
        ("BYTES", [0], b"a"), ("BYTES", [2**40], bytes(8)),
    ],
)  # fmt: skip
def test_refuses_binary_data_that_does_not_fit(server: Served, datatype: str, shape: list[int], data: bytes) -> None:
    x = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    reply = infer(server, {"parameters": {"signature_name": datatype}, "inputs": [x]}, [data])
    assert reply.status == 400
    said(reply.error)


@pytest.mark.parametrize("length", ["x", "-1", "9" * 30, "99999", "7", "+5"])
def test_refuses_a_header_length_that_is_not_the_jsons(server: Served, length: str) -> None:
    reply = server.send("POST", INFER, json.dumps(SIXTEEN).encode() + bytes(16), inference_header_content_length=length)
    assert reply.status == 400
    said(reply.error)


def test_refuses_binary_data_without_the_header(server: Served) -> None:
    reply = server.send("POST", INFER, json.dumps(SIXTEEN).encode())
    assert reply.status == 400
    said(reply.error)


def test_refuses_strings_that_json_does_not_have(server: Served) -> None:
    tensors = [{"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]
    reply = infer(server, {"parameters": {"signature_name": "BYTES"}, "inputs": tensors}, [b"\x01\0\0\0\xff"])
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
def test_damaged_requests_are_refused_or_answered(server: Served, at: int, gone: int, new: bytes, length: int) -> None:
    """Whatever is cut, changed or inserted, and whatever the header says."""
    body = (VALID + AFTER)[:at] + new + (VALID + AFTER)[at + gone :]
    reply = server.send("POST", INFER, body, inference_header_content_length=str(max(0, len(VALID) + length)))
    assert reply.status in (200, 400, 404, 501), reply.body
    if reply.status == 200:
        for output, content in outputs(reply).values():
            if output["datatype"] == "INT64":
                assert len(content) == 8 * int(np.prod(output["shape"]))
            assert content in body


ROUTES = [
    ("GET", "/v2", 200), ("GET", "/v2/", 200), ("GET", "/v2/models/m", 200), ("GET", "/v2/models/m/versions/1", 200),
    ("GET", "/v2/models/m/ready", 200), ("GET", "/v2/models/m/versions/1/ready", 200),
    ("GET", "/v2/models/m/versions/8/ready", 404), ("GET", "/v2/models/n/ready", 404), ("GET", "/v2/models/n", 404),
    ("GET", "/v2/models/m/versions/8", 404), ("GET", "/v2/models/m/versions/none", 400), ("GET", "/v2/other", 404),
    ("GET", "/v2/models", 404), ("GET", "/v2/models/m/other", 404), ("GET", INFER, 405), ("POST", "/v2", 405),
    ("GET", "/invocations", 405), ("POST", "/v2/models/m/ready", 405), ("DELETE", "/v2/models/m", 405),
    ("POST", "/v2/models/n/infer", 404), ("GET", "/v2/systemsharedmemory/status", 501),
    ("POST", "/v2/systemsharedmemory/region/a/register", 501), ("GET", "/v2/cudasharedmemory/region/a/status", 501),
    ("POST", "/v2/repository/index", 501), ("POST", "/v2/repository/models/m/load", 501),
    ("GET", "/v2/models/stats", 501), ("GET", "/v2/models/m/stats", 501), ("GET", "/v2/models/m/versions/1/stats", 501),
    ("GET", "/v2/models/m/config", 501), ("GET", "/v2/trace/setting", 501), ("GET", "/v2/models/m/trace/setting", 501),
    ("GET", "/v2/logging", 501), ("POST", "/v2/models/m/generate", 501),
]  # fmt: skip


@pytest.mark.parametrize(("method", "target", "status"), ROUTES)
def test_routes(server: Served, method: str, target: str, status: int) -> None:
    body = json.dumps({"inputs": [IDS, WORDS]}) if method == "POST" else ""
    reply = server.send(method, target, body)
    assert reply.status == status
    assert reply.headers.get("allow") == (
        {INFER: "POST", "/invocations": "POST"}.get(target, "GET") if status == 405 else None
    )
    if status >= 400:
        said(reply.error)


def test_binary_data_counts_for_the_memory_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are used where they lie. Strings become objects, also where an escape hides their datatype."""
    with Served(tmp_path, monkeypatch, lambda _: EchoServable(), max_request_memory=10 * 2**20) as server:
        wait_for(lambda: server.is_ready)
        content = bytes(2**20)
        for datatype, shape, status in (
            ("UINT64", [1, 2**17], 200),
            ("BYTES", [2**18], 413),
            ("BY\\u0054ES", [2**18], 413),
        ):
            text = json.dumps(
                {
                    "parameters": {"signature_name": "DATATYPE", "binary_data_output": True},
                    "inputs": [tensor("x", np.empty(shape, bool), "DATATYPE", parameters={"binary_data_size": 2**20})],
                }
            )
            assert infer(server, text.replace("DATATYPE", datatype).encode(), [content]).status == status, datatype


# ---- gRPC

GRPC_IDS = {"name": "ids", "datatype": "INT64", "shape": [2], "contents": {"int64_contents": [1, 2]}}
GRPC_WORDS = {"name": "words", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"\xff"]}}


def test_outputs_of_calls_are_those_that_are_asked_for(call: Any) -> None:
    request = infer_request(GRPC_IDS, GRPC_WORDS, outputs=[{"name": "words"}, {"name": "ids"}])
    words, ids = answer_of(call, request).outputs
    assert (words.name, list(words.contents.bytes_contents)) == ("words", [b"\xff"])
    assert (ids.name, list(ids.contents.int64_contents)) == ("ids", [1, 2])


RAW_IDS, RAW_WORDS = ({key: one[key] for key in ("name", "datatype", "shape")} for one in (GRPC_IDS, GRPC_WORDS))
TWO = struct.pack("<2q", 1, 2)


CALLS = {
    "not a message": b"\xff",
    "one raw for two": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO,)),
    "three raw for two": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a", b"")),
    "short raw": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO[1:], b"\x01\0\0\0a")),
    "short string": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0")),
    "contents and raw": infer_request(GRPC_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a")),
    "other binary_data_size": infer_request(
        {**RAW_IDS, "parameters": {"binary_data_size": {"int64_param": 15}}}, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a")
    ),
    "no contents": infer_request(RAW_IDS, GRPC_WORDS),
    "too few": infer_request({**GRPC_IDS, "shape": [3]}, GRPC_WORDS),
    "too many": infer_request({**GRPC_IDS, "shape": [1]}, GRPC_WORDS),
    "negative": infer_request({**GRPC_IDS, "shape": [-2]}, GRPC_WORDS),
    "huge": infer_request({**GRPC_IDS, "shape": [2**62, 2**62]}, GRPC_WORDS),
    "datatype": infer_request({**GRPC_IDS, "datatype": "INT65"}, GRPC_WORDS),
    "other field": infer_request({**GRPC_IDS, "contents": {"int_contents": [1, 2]}}, GRPC_WORDS),
    "two fields": infer_request({**GRPC_IDS, "contents": {"int64_contents": [1, 2], "fp32_contents": [1]}}, GRPC_WORDS),
    "missing input": infer_request(GRPC_IDS),
    "input twice": infer_request(GRPC_IDS, GRPC_WORDS, GRPC_IDS),
    "sequence": infer_request(GRPC_IDS, GRPC_WORDS, parameters={"sequence_id": {"int64_param": 1}}),
    "bool signature": infer_request(GRPC_IDS, GRPC_WORDS, parameters={"signature_name": {"bool_param": True}}),
    "empty parameter": infer_request(GRPC_IDS, GRPC_WORDS, parameters={"signature_name": {}}),
    "output": infer_request(GRPC_IDS, GRPC_WORDS, outputs=[{"name": "z"}]),
    "classification": infer_request(
        GRPC_IDS, GRPC_WORDS, outputs=[{"name": "ids", "parameters": {"classification": {"int64_param": 1}}}]
    ),
    "int8": infer_request(
        {"name": "x", "datatype": "INT8", "shape": [1], "contents": {"int_contents": [128]}}, signature="INT8"
    ),
    "fp16 without raw": infer_request({"name": "x", "datatype": "FP16", "shape": [1]}, signature="FP16"),
    "signature": infer_request(signature="nothing"),
}


@pytest.mark.parametrize("what", CALLS)
def test_refuses_calls(call: Any, what: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(CALLS[what], timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    said(caught.value.details())


@given(at=st.integers(0, 90), gone=st.integers(0, 20), new=st.binary(max_size=8))
def test_damaged_calls_are_refused_or_answered(call: Any, at: int, gone: int, new: bytes) -> None:
    valid = infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a"))
    data = valid[:at] + new + valid[at + gone :]
    done = call.future(data, timeout=60)
    if done.code() is not grpc.StatusCode.OK:
        assert done.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        return
    for content in message("ModelInferResponse").FromString(done.result()).raw_output_contents:
        assert content in data
