"""An integer that its input's type cannot hold is refused at every door. The smallest and the largest come back as they are."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import EchoServable, wait_for
from tests.support.serving.served import PREDICT, Served
from tpuembed_serving.grpc.open_inference_messages import SERVICE, message

TYPES: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FORMS: Final[Mapping[str, Callable[[list[int]], dict[str, Any]]]] = {
    "rows": lambda values: {"instances": values},
    "objects": lambda values: {"instances": [{"x": value} for value in values]},
    "column": lambda values: {"inputs": values},
    "named column": lambda values: {"inputs": {"x": values}},
}
"""How a predict request carries the values of input `x`."""
FIELDS: Final = dict.fromkeys(TYPES, "int_val") | {
    "int64": "int64_val", "uint32": "uint32_val", "uint64": "uint64_val",
}  # fmt: skip
CONTENTS: Final = dict.fromkeys(TYPES, "int_contents") | {
    "int64": "int64_contents", "uint8": "uint_contents", "uint16": "uint_contents", "uint32": "uint_contents",
    "uint64": "uint64_contents",
}  # fmt: skip
NARROW_FIELDS: Final = {"int_val": "int32", "int_contents": "int32", "uint_contents": "uint32"}
"""The types of the fields that carry narrower integers. The other fields hold nothing that does not fit."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("integers")
    with pytest.MonkeyPatch.context() as patch, Served(folder, patch, lambda _: EchoServable()) as running:
        wait_for(lambda: running.listens and running.ask("GET", "/readyz")[0] == 200)
        yield running


def limits(dtype: str) -> tuple[int, int]:
    found = np.iinfo(dtype)
    return int(found.min), int(found.max)


def holds(dtype: str, value: int) -> bool:
    least, most = limits(dtype)
    return least <= value <= most


def outside(dtype: str) -> list[int]:
    """Integers beside the range, and far from it."""
    least, most = limits(dtype)
    values = {least - 1, most + 1, most + 45, 2 * most + 6, -(2**31) + 1, 2**32 + 7, 2**63, 2**64, -(2**63) - 1}
    return sorted(value for value in values if not holds(dtype, value))


def text_of(kind: str, value: int | str) -> str:
    least, most = limits(kind.lower())
    return f"Input x is {kind}, which cannot hold {value}. Send integers from {least} to {most}."


def predict(server: Served, form: str, dtype: str, values: list[int]) -> tuple[int, Any]:
    body = {"signature_name": dtype.upper(), **FORMS[form](values)}
    return server.ask("POST", "/v1/models/m:predict", json.dumps(body).encode())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_predict(server: Served, form: str, dtype: str) -> None:
    """Its words, where TensorFlow Serving refuses too, and then ours. In its words an integer beyond 64 bits is a double."""
    values = [*limits(dtype), 0]
    status, answer = predict(server, form, dtype, values)
    if dtype == "uint16":  # TensorFlow Serving's JSON has none
        assert "Conversion of JSON Value: 0 to type: uint16" in answer["error"]
        return
    assert (status, answer) in ((200, {"predictions": values}), (200, {"outputs": values}))
    for value in [*outside(dtype), 2**64 + 1]:
        status, answer = predict(server, form, dtype, [1, value])
        assert status == 400
        is_double = not -(2**63) <= value < 2**64
        assert answer["error"].endswith(text_of(dtype, value))
        assert f" Type: Number is not of expected type: {dtype}. " in answer["error"]
        assert f"JSON Value: {value} " in answer["error"] or is_double


@pytest.mark.parametrize("form", FORMS)
def test_predict_with_a_long_body(server: Served, form: str) -> None:
    status, answer = predict(server, form, "uint8", [1] * 200_000 + [257])
    assert (status, answer["error"].endswith(text_of("uint8", 257))) == (400, True)


def infer(server: Served, datatype: str, data: Any, shape: list[int]) -> tuple[int, Any]:
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": data}
    body = {"parameters": {"signature_name": datatype}, "inputs": [tensor]}
    return server.ask("POST", "/v2/models/m/infer", json.dumps(body).encode())


@pytest.mark.parametrize("dtype", TYPES)
def test_open_inference_in_json(server: Served, dtype: str) -> None:
    datatype, values = dtype.upper(), [*limits(dtype), 0]
    status, answer = infer(server, datatype, values, [3])
    assert (status, answer["outputs"][0]["data"]) == (200, values)
    for value in [*outside(dtype), 2**64 + 1]:
        for data, shape in (([1, value], [2]), ([[1], [value]], [2, 1])):
            assert infer(server, datatype, data, shape) == (400, {"error": text_of(datatype, value)})


def test_open_inference_in_a_long_body(server: Served) -> None:
    value = 2**64 + 1
    status, answer = infer(server, "UINT64", [1] * 200_000 + [value], [200_001])
    assert (status, answer) == (400, {"error": text_of("UINT64", value)})


def predict_request(dtype: str, field: str, values: list[int], count: int) -> bytes:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "m"
    request.model_spec.signature_name = {"half": "FP16", "bfloat16": "BF16"}.get(dtype, dtype.upper())
    tensor = request.inputs["x"]
    tensor.dtype = tf.as_dtype(dtype).as_datatype_enum
    tensor.tensor_shape.dim.add().size = count
    getattr(tensor, field).extend(values)
    return bytes(request.SerializeToString())


def carried(field: str, dtype: str) -> list[int]:
    """What does not fit into `dtype`, and yet into the field."""
    return [value for value in outside(dtype) if holds(NARROW_FIELDS.get(field, dtype), value)]


@pytest.mark.parametrize("dtype", TYPES)
def test_grpc(server: Served, dtype: str) -> None:
    field = FIELDS[dtype]
    data = predict_request(dtype, field, list(limits(dtype)), 3)
    with server.channel() as channel:
        answer = channel.unary_unary(PREDICT, None, predict_pb2.PredictResponse.FromString)(data, timeout=30)
    assert tf.make_ndarray(answer.outputs["y"]).tolist() == [*limits(dtype), limits(dtype)[1]]
    for value in carried(field, dtype):
        for count in (2, 7):  # of 7 elements, the last value fills 6
            found = server.call(data=predict_request(dtype, field, [1, value], count))
            assert found == ("INVALID_ARGUMENT", text_of(dtype, value))


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_grpc_with_a_float_of_more_than_16_bits(server: Served, dtype: str) -> None:
    for value in (-1, 2**16, 2**31 - 1):
        code, text = server.call(data=predict_request(dtype, "half_val", [0, value], 2))
        said = f"Input x is {dtype} in 16 bits, which cannot hold {value}. Send integers from 0 to 65535."
        assert (code, text) == ("INVALID_ARGUMENT", said)


@pytest.mark.parametrize("dtype", TYPES)
def test_grpc_open_inference(server: Served, dtype: str) -> None:
    datatype, field = dtype.upper(), CONTENTS[dtype]
    for value in carried(field, dtype):
        tensor = {"name": "x", "datatype": datatype, "shape": [2], "contents": {field: [1, value]}}
        request = message("ModelInferRequest")(
            model_name="m",
            inputs=[tensor],
            parameters={"signature_name": message("InferParameter")(string_param=datatype)},
        )
        found = server.call(method=f"/{SERVICE}/ModelInfer", data=request.SerializeToString())
        assert found == ("INVALID_ARGUMENT", text_of(datatype, value))
