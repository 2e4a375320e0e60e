"""The Open Inference Protocol, over REST with JSON and binary tensors, and over gRPC: the numbers are TensorFlow's or numpy's."""

import concurrent.futures
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.contract_open_inference import SERVICE, TENSOR_CONTENTS, message
from tests.support.contract_serve import (
    LOOKUPS,
    TABLES,
    ZOO,
    Server,
    assert_near,
    draw_ids,
    look_up,
    run_tensorflow,
    saved_models,
    shared_server,
    zoo_inputs,
)

Array = npt.NDArray[Any]
DATATYPES = {
    "int64": "INT64", "int32": "INT32", "uint8": "UINT8", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "object": "BYTES",
}  # fmt: skip
DTYPES: Mapping[str, Any] = {datatype: np.dtype(dtype) for dtype, datatype in DATATYPES.items()}
SIZE_HEADER = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def packed(array: Array) -> bytes:
    """The binary data of a tensor: of texts, each with its length before it."""
    if array.dtype != object:
        return array.tobytes()
    texts = [one.encode() if isinstance(one, str) else one for one in array.reshape(-1).tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def unpacked(data: bytes, datatype: str, shape: Any) -> Array:
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    texts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return np.array(texts, object).reshape(shape)


def described(name: str, array: Array) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype.name]}


def infer_json(server: Server, path: str, inputs: Mapping[str, Array], **parameters: str) -> dict[str, Array]:
    tensors = [{**described(name, array), "data": array.tolist()} for name, array in inputs.items()]
    reply = server.ask("POST", f"/v2/models/{path}/infer", {"id": "seven", "parameters": parameters, "inputs": tensors})
    assert reply.status == 200, reply.body
    assert (reply.value["model_name"], reply.value["id"]) == (path.partition("/")[0], "seven")
    found = {}
    for output in reply.value["outputs"]:
        values = [one.encode() if isinstance(one, str) else one for one in output["data"]]
        found[output["name"]] = np.array(values, DTYPES[output["datatype"]]).reshape(output["shape"])
    return found


def infer_binary(
    server: Server, path: str, inputs: Mapping[str, Array], request_id: str = "", **parameters: str
) -> dict[str, Array]:
    """Binary tensors in both directions. The length of `request_id` moves them to other addresses."""
    data = {name: packed(array) for name, array in inputs.items()}
    tensors = [
        {**described(name, array), "parameters": {"binary_data_size": len(data[name])}}
        for name, array in inputs.items()
    ]
    members = {"id": request_id, "parameters": {"binary_data_output": True, **parameters}, "inputs": tensors}
    text = json.dumps(members).encode()
    reply = server.ask(
        "POST", f"/v2/models/{path}/infer", text + b"".join(data.values()), {SIZE_HEADER: str(len(text))}
    )
    assert reply.status == 200, reply.body
    at = int(reply.headers[SIZE_HEADER])
    found = {}
    for output in json.loads(reply.body[:at])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = unpacked(reply.body[at : at + size], output["datatype"], output["shape"])
        at += size
    assert at == len(reply.body)
    return found


def infer_grpc(
    server: Server, path: str, inputs: Mapping[str, Array], *, raw: bool, **parameters: str
) -> dict[str, Array]:
    request = message("ModelInferRequest")(model_name=path)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    for name, array in inputs.items():
        tensor = request.inputs.add(**described(name, array))
        if raw:
            request.raw_input_contents.append(packed(array))
        else:
            values = [one.encode() if isinstance(one, str) else one for one in array.reshape(-1).tolist()]
            getattr(tensor.contents, TENSOR_CONTENTS[tensor.datatype]).extend(values)
    answer = server.inference("ModelInfer", request)
    assert bool(answer.raw_output_contents) is raw
    found = {}
    for index, output in enumerate(answer.outputs):
        if raw:
            found[output.name] = unpacked(answer.raw_output_contents[index], output.datatype, output.shape)
        else:
            values = list(getattr(output.contents, TENSOR_CONTENTS[output.datatype]))
            found[output.name] = np.array(values, DTYPES[output.datatype]).reshape(output.shape)
    return found


FORMS: Mapping[str, Any] = {
    "json": infer_json,
    "binary": infer_binary,
    "grpc raw": lambda *arguments, **parameters: infer_grpc(*arguments, raw=True, **parameters),
    "grpc contents": lambda *arguments, **parameters: infer_grpc(*arguments, raw=False, **parameters),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_tensorflows(server: Server, models: Path, form: str) -> None:
    """Of every datatype that the signatures have. Texts that are not UTF-8 are left out, as JSON has none."""
    for signature in ZOO:
        inputs = zoo_inputs(12, rows=3)[signature]
        wanted = run_tensorflow(models / "zoo" / "3", signature, inputs)
        found = FORMS[form](server, "zoo", inputs, signature_name=signature)
        assert sorted(found) == sorted(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.parametrize("form", FORMS)
def test_lookups_have_the_tables_rows(server: Server, form: str) -> None:
    for model in LOOKUPS:
        for seed, (batch, width) in enumerate([(1, 2), (200, 9)]):
            inputs = draw_ids(seed + 20, batch, width)
            found = FORMS[form](server, model, inputs)
            assert_near(found, look_up(inputs))
            np.testing.assert_array_equal(found["user"], TABLES["users"][inputs["user"]], strict=True)


def test_tensors_at_odd_addresses_share_runs(server: Server) -> None:
    """Numbers of a binary body are used where they lie, which is seldom at a multiple of their size."""

    def ask(index: int) -> None:
        inputs = draw_ids(index, 1 + index % 4, 1 + index % 3)
        assert_near(infer_binary(server, "mapped", inputs, "i" * (index % 16)), look_up(inputs))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(160)))


def test_a_path_chooses_a_version_or_a_label(server: Server) -> None:
    """The model multiplies by its version."""
    inputs = {"x": np.array([1.5, -2], np.float32)}
    for choice, version in (("", 2), ("1", 1), ("2", 2), ("stable", 1), ("canary", 2)):
        path = f"scale/versions/{choice}" if choice else "scale"
        np.testing.assert_array_equal(infer_json(server, path, inputs)["y"], inputs["x"] * version)
        request = message("ModelInferRequest")(model_name="scale", model_version=choice)
        request.inputs.add(name="x", shape=[2], datatype="FP32").contents.fp32_contents.extend([1.5, -2])
        answer = server.inference("ModelInfer", request)
        assert answer.model_version == str(version)
        assert list(answer.outputs[0].contents.fp32_contents) == [1.5 * version, -2.0 * version]


def test_metadata(server: Server) -> None:
    wanted = {
        "inputs": {
            "history": ("INT64", [-1, -1]),
            "liked": ("INT64", [-1, -1]),
            "rated": ("INT64", [-1, -1]),
            "rated_weights": ("FP32", [-1, -1]),
            "user": ("INT64", [-1]),
            "watched": ("INT64", [-1, -1]),
        },
        "outputs": {
            "history": ("FP32", [-1, 3, 5]),
            "liked": ("FP32", [-1, 8]),
            "rated": ("FP32", [-1, 8]),
            "user": ("FP32", [-1, 5]),
            "watched": ("FP32", [-1, 8]),
        },
    }
    found = server.get("/v2/models/mapped").value
    assert (found["name"], found["versions"]) == ("mapped", ["1"])
    answer = server.inference("ModelMetadata", message("ModelMetadataRequest")(name="mapped"))
    assert (answer.name, list(answer.versions), answer.platform) == ("mapped", ["1"], found["platform"])
    for side, tensors in wanted.items():
        assert {one["name"]: (one["datatype"], one["shape"]) for one in found[side]} == tensors
        assert {one.name: (one.datatype, list(one.shape)) for one in getattr(answer, side)} == tensors
    assert server.get("/v2/models/scale").value["versions"] == ["2", "1"]


def test_health_and_readiness(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/zoo/ready", "/v2/models/scale/versions/1/ready"):
        assert server.get(path).status == 200, path
    assert server.get("/v2/models/none/ready").status == 404
    assert "binary_tensor_data" in server.get("/v2").value["extensions"]
    assert server.inference("ServerLive", message("ServerLiveRequest")()).live
    assert server.inference("ServerReady", message("ServerReadyRequest")()).ready
    assert server.inference("ModelReady", message("ModelReadyRequest")(name="zoo")).ready
    assert not server.inference("ModelReady", message("ModelReadyRequest")(name="scale", version="9")).ready
    assert "binary_tensor_data" in server.inference("ServerMetadata", message("ServerMetadataRequest")()).extensions


IDS: Mapping[str, Any] = {"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
REFUSED: Mapping[str, tuple[str, Any, int, str]] = {
    "unknown model": ("none", {"inputs": [IDS]}, 404, "none"),
    "unknown version": ("zoo/versions/9", {"inputs": [IDS]}, 404, "9"),
    "unknown signature": ("zoo", {"parameters": {"signature_name": "S"}, "inputs": [IDS]}, 400, "S"),
    "another input": ("zoo", {"inputs": [{**IDS, "name": "x"}]}, 400, "x"),
    "another shape": ("zoo", {"inputs": [{**IDS, "shape": [1, 3]}]}, 400, "[1, 3]"),
    "a bad id": ("zoo", {"inputs": [{**IDS, "data": [1, 5]}]}, 400, "5 is not in [0, 5)"),
    "no JSON": ("zoo", "{", 400, ""),
}


def test_requests_that_are_refused(server: Server) -> None:
    for why, (path, body, status, word) in REFUSED.items():
        reply = server.ask("POST", f"/v2/models/{path}/infer", body)
        assert reply.status == status, why
        assert word in reply.error, why


def test_calls_that_are_refused(server: Server) -> None:
    codes = grpc.StatusCode
    for model, shape, ids, code in (
        ("none", [1, 2], [1, 2], codes.NOT_FOUND),
        ("zoo", [1, 3], [1, 2], codes.INVALID_ARGUMENT),
        ("zoo", [1, 2], [1, 5], codes.INVALID_ARGUMENT),
    ):
        request = message("ModelInferRequest")(model_name=model)
        request.inputs.add(name="ids", shape=shape, datatype="INT64").contents.int64_contents.extend(ids)
        with pytest.raises(grpc.RpcError) as caught:
            server.inference("ModelInfer", request)
        assert caught.value.code() is code
    with pytest.raises(grpc.RpcError) as caught:
        server.channel.unary_unary(f"/{SERVICE}/RepositoryIndex")(b"", timeout=60)
    assert caught.value.code() is codes.UNIMPLEMENTED
