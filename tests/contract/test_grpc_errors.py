"""gRPC requests that are refused: TensorFlow Serving's codes and texts."""

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import get_model_status_pb2, predict_pb2

from tests.support.contract_serve import TABLES, Server, draw_ids, outputs_of, predict_request, refusal, shared_server

CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


REFUSED: Mapping[str, tuple[str, str, Any, Any, str]] = {
    "no model": ("", "", {}, CODES.INVALID_ARGUMENT, "Missing ModelSpec"),
    "unknown model": ("none", "", {}, CODES.NOT_FOUND, "Servable not found for request: Latest(none)"),
    "unknown signature": ("zoo", "S", {}, CODES.FAILED_PRECONDITION, 'Serving signature key "S" not found.'),
    "missing input": (
        "zoo",
        "mixed",
        {"ids": [1], "on": [True]},
        CODES.INVALID_ARGUMENT,
        "input size does not match signature: 2!=3 len({ids,on}) != len({ids,on,weights}). Sent extra: {}. "
        "Missing but required: {weights}.",
    ),
    "extra input": (
        "zoo",
        "",
        {"ids": [[1, 2]], "x": [1]},
        CODES.INVALID_ARGUMENT,
        "input size does not match signature: 2!=1 len({ids,x}) != len({ids}). Sent extra: {x}. Missing but required: {}.",
    ),
}


def test_requests_that_are_refused(server: Server) -> None:
    for why, (model, signature, inputs, code, text) in REFUSED.items():
        request = predict_request(model, inputs, signature) if model else predict_pb2.PredictRequest()
        assert refusal(server.prediction.Predict, request) == (code, text), why


def test_versions_and_labels_that_are_not_there(server: Server) -> None:
    request = predict_request("scale", {"x": np.array([1], np.float32)})
    request.model_spec.version.value = 3
    text = "Servable not found for request: Specific(scale, 3)"
    assert refusal(server.prediction.Predict, request) == (CODES.NOT_FOUND, text)
    request.model_spec.version_label = "beta"
    text = "Unrecognized servable version label: beta"
    assert refusal(server.prediction.Predict, request) == (CODES.INVALID_ARGUMENT, text)
    status = get_model_status_pb2.GetModelStatusRequest()
    assert refusal(server.models.GetModelStatus, status) == (CODES.INVALID_ARGUMENT, "Missing ModelSpec")
    status.model_spec.name = "none"
    assert refusal(server.models.GetModelStatus, status) == (
        CODES.NOT_FOUND,
        "Could not find any versions of model none",
    )


def test_a_long_text_is_cut_by_bytes(server: Server) -> None:
    start = "Servable not found for request: Latest("
    for name in ("m" * 5000, "\u00e9" * 2500):
        code, text = refusal(server.prediction.Predict, predict_request(name, {}))
        assert code is CODES.NOT_FOUND
        assert text == (start + name).encode()[:1024].decode(errors="replace") + "...TRUNCATED"


def test_tensors_that_are_not_the_signatures(server: Server) -> None:
    """Another dtype, values in the field of another dtype, and more values than the shape has room for."""
    request = predict_request("zoo", {"ids": np.array([[1, 2]], np.int32)})
    assert refusal(server.prediction.Predict, request)[0] is CODES.INVALID_ARGUMENT
    request = predict_request("zoo", {"ids": np.array([[1, 2]])})
    tensor = request.inputs["ids"]
    tensor.tensor_content = b""
    tensor.int_val.extend([1, 2])
    assert refusal(server.prediction.Predict, request)[0] is CODES.INVALID_ARGUMENT
    tensor.ClearField("int_val")
    tensor.int64_val.extend([1, 2, 3])
    assert refusal(server.prediction.Predict, request)[0] is CODES.INVALID_ARGUMENT


def test_a_bad_id_fails_its_own_call_only(server: Server) -> None:
    """Three hundred calls at once, so that they share runs. Two in seven have an id outside of the table."""
    inputs = draw_ids(11, 1, 3)
    users = [number % 7 + 55 if number % 7 > 4 else number % 60 for number in range(300)]
    calls = [
        server.prediction.Predict.future(predict_request("mapped", inputs | {"user": np.array([user])}), timeout=60)
        for user in users
    ]
    for user, call in zip(users, calls, strict=True):
        if user < 60:
            np.testing.assert_array_equal(outputs_of(call.result())["user"], TABLES["users"][[user]])
        else:
            assert call.code() is CODES.INVALID_ARGUMENT
            assert f"feature user: id {user} of row 0 is not in table users, which has 60 rows" in call.details()
