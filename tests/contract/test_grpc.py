"""TensorFlow Serving's gRPC API: the numbers are TensorFlow's or numpy's, codes and texts are TensorFlow Serving's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    regression_pb2,
)

from tests.support.contract_serve import (
    LOOKUPS,
    TABLES,
    ZOO,
    Server,
    assert_near,
    draw_ids,
    look_up,
    outputs_of,
    predict_request,
    refusal,
    run_tensorflow,
    saved_models,
    shared_server,
    zoo_inputs,
)

SECONDS = 60
HALF = "half_plus_two"
CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def as_typed_fields(value: Any) -> Any:
    """A tensor whose values are in the field of its dtype, such as int64_val."""
    array = np.asarray(value)
    dtype = tf.as_dtype(array.dtype if array.dtype != object else "string")
    tensor = tf.make_tensor_proto(np.zeros(0, dtype.as_numpy_dtype), dtype, array.shape if array.size == 0 else (0,))
    tensor.tensor_shape.CopyFrom(tf.TensorShape(array.shape).as_proto())
    field = {
        "int64": "int64_val",
        "float32": "float_val",
        "float64": "double_val",
        "bool": "bool_val",
        "string": "string_val",
    }
    flat = array.reshape(-1).tolist()
    flat = [one.encode() if isinstance(one, str) else one for one in flat]
    getattr(tensor, field.get(dtype.name, "int_val")).extend(flat)
    return tensor


def request_of(model: str, inputs: Mapping[str, Any], signature: str = "", *, typed: bool = False) -> Any:
    request = predict_request(model, inputs, signature)
    if typed:
        for alias, value in inputs.items():
            request.inputs[alias].CopyFrom(as_typed_fields(value))
    return request


@pytest.mark.parametrize("signature", ZOO)
def test_answers_are_tensorflows(server: Server, models: Path, signature: str) -> None:
    """Tensors in tensor_content, as make_tensor_proto writes numbers, and in the typed fields."""
    inputs = zoo_inputs(8, rows=5)[signature]
    wanted = run_tensorflow(models / "zoo" / "3", signature, inputs)
    for typed in (False, True):
        reply = server.prediction.Predict(request_of("zoo", inputs, signature, typed=typed), timeout=SECONDS)
        found = outputs_of(reply)
        assert sorted(found) == sorted(wanted)
        for alias, array in wanted.items():
            np.testing.assert_array_equal(found[alias], array, strict=True)


@pytest.mark.parametrize("model", LOOKUPS)
def test_lookups_have_the_tables_rows(server: Server, model: str) -> None:
    for seed, (batch, width) in enumerate([(1, 1), (5, 3), (400, 12)]):
        inputs = draw_ids(seed + 10, batch, width)
        for typed in (False, True):
            found = outputs_of(server.prediction.Predict(request_of(model, inputs, typed=typed), timeout=SECONDS))
            assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
            assert_near(found, look_up(inputs))
            np.testing.assert_array_equal(found["user"], TABLES["users"][inputs["user"]], strict=True)


def test_a_whole_model_has_tensorflows_values(server: Server, models: Path) -> None:
    random = np.random.default_rng(9)
    seen = np.where(np.arange(5) < random.integers(0, 6, (30, 1)), random.integers(0, 90, (30, 5)), -1)
    inputs = {"user": random.integers(0, 60, 30), "seen": seen, "price": random.random((30, 1), np.float32)}
    wanted = run_tensorflow(models / "ranker" / "1", "serving_default", inputs)
    found = outputs_of(server.prediction.Predict(request_of("ranker", inputs), timeout=SECONDS))
    np.testing.assert_allclose(found["score"], wanted["score"], rtol=1e-5, atol=1e-6, strict=True)


def test_the_answer_names_model_version_and_signature(server: Server) -> None:
    request = request_of("scale", {"x": np.array([3.0], np.float32)})
    for choice, version in (({}, 2), ({"version": 1}, 1), ({"label": "stable"}, 1), ({"label": "canary"}, 2)):
        request.model_spec.ClearField("version_choice")
        if "version" in choice:
            request.model_spec.version.value = choice["version"]
        if "label" in choice:
            request.model_spec.version_label = choice["label"]
        reply = server.prediction.Predict(request, timeout=SECONDS)
        spec = reply.model_spec
        assert (spec.name, spec.version.value, spec.signature_name) == ("scale", version, "serving_default")
        np.testing.assert_array_equal(outputs_of(reply)["y"], np.array([3 * version], np.float32))


def test_output_filter(server: Server) -> None:
    inputs = {"ids": np.array([1, 2]), "weights": np.array([1, 2], np.float32), "on": [True, False]}
    request = request_of("zoo", inputs, "mixed")
    request.output_filter.extend(["next", "off"])
    assert sorted(server.prediction.Predict(request, timeout=SECONDS).outputs) == ["next", "off"]
    request.output_filter[:] = ["next", "none"]
    code, text = refusal(server.prediction.Predict, request)
    assert code is CODES.INVALID_ARGUMENT
    assert text.startswith("output tensor alias not found in signature: none Outputs expected to be in the set {")
    request.output_filter[:] = ["next", "next"]
    assert refusal(server.prediction.Predict, request) == (
        CODES.INVALID_ARGUMENT,
        "duplicate output tensor alias: next",
    )


def add_examples(request: Any) -> None:
    for value in (2.0, 80.0):
        request.input.example_list.examples.add().features.feature["x"].float_list.value.append(value)


def choose(spec: Any, signature: str, model: str = HALF) -> None:
    spec.name, spec.signature_name = model, signature


def test_classify_and_regress(server: Server) -> None:
    """y is x / 2 + 2."""
    classify, regress = classification_pb2.ClassificationRequest(), regression_pb2.RegressionRequest()
    for request, signature in ((classify, "classify_x_to_y"), (regress, "regress_x_to_y")):
        choose(request.model_spec, signature)
        add_examples(request)
    classified = server.prediction.Classify(classify, timeout=SECONDS)
    scores = [[(label.label, label.score) for label in one.classes] for one in classified.result.classifications]
    assert scores == [[("", 3.0)], [("", 42.0)]]
    assert classified.model_spec.version.value == 123
    regressed = server.prediction.Regress(regress, timeout=SECONDS)
    assert [one.value for one in regressed.result.regressions] == [3.0, 42.0]
    assert regressed.model_spec.signature_name == "regress_x_to_y"


def test_multi_inference(server: Server) -> None:
    request = inference_pb2.MultiInferenceRequest()
    for method in ("regress", "classify"):
        choose(request.tasks.add(method_name=f"tensorflow/serving/{method}").model_spec, f"{method}_x_to_y")
    add_examples(request)
    regressed, classified = server.prediction.MultiInference(request, timeout=SECONDS).results
    assert [one.value for one in regressed.regression_result.regressions] == [3.0, 42.0]
    classes = classified.classification_result.classifications
    assert [[label.score for label in one.classes] for one in classes] == [[3.0], [42.0]]


def test_metadata_is_the_graphs(server: Server, models: Path) -> None:
    for model, version in ((HALF, "00000123"), ("mapped", "1")):
        saved = saved_model_pb2.SavedModel.FromString((models / model / version / "saved_model.pb").read_bytes())
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        reply = server.prediction.GetModelMetadata(request, timeout=SECONDS)
        assert (reply.model_spec.name, reply.model_spec.version.value) == (model, int(version))
        found = get_model_metadata_pb2.SignatureDefMap()
        assert reply.metadata["signature_def"].Unpack(found)
        assert dict(found.signature_def) == dict(saved.meta_graphs[0].signature_def)


def test_status(server: Server) -> None:
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "scale"
    found = server.models.GetModelStatus(request, timeout=SECONDS).model_version_status
    assert [(one.version, one.state, one.status.error_code) for one in found] == [(2, 30, 0), (1, 30, 0)]
    request.model_spec.version.value = 1
    (one,) = server.models.GetModelStatus(request, timeout=SECONDS).model_version_status
    assert (one.version, one.state) == (1, 30)


def test_health(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)
    services = ("ModelService", "PredictionService")
    for service in ("", "zoo", *services, *(f"tensorflow.serving.{one}" for one in services)):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, service
    request = health_pb2.HealthCheckRequest(service="SessionService")
    assert refusal(stub.Check, request)[0] is CODES.NOT_FOUND


def test_a_deadline_ends_a_call(server: Server) -> None:
    endless = request_of("zoo", {"n": np.array([10**12])}, "slow")
    assert refusal(server.prediction.Predict, endless, timeout=0.3)[0] is CODES.DEADLINE_EXCEEDED
    good = request_of("zoo", {"n": np.array([3])}, "slow")
    assert outputs_of(server.prediction.Predict(good, timeout=SECONDS))["n"].tolist() == [3]


def test_a_message_of_many_megabytes(server: Server) -> None:
    ids = np.random.default_rng(0).integers(0, 5, (400_000, 2))
    reply = server.prediction.Predict(request_of("zoo", {"ids": ids}), timeout=SECONDS)
    table = np.arange(15, dtype=np.float32).reshape(5, 3) / np.float32(7)
    np.testing.assert_array_equal(outputs_of(reply)["embedding"], table[ids], strict=True)
