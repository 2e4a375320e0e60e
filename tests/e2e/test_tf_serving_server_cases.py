"""The cases of TensorFlow Serving's own server tests, restated against this server.

Source: tensorflow_serving/model_servers/tensorflow_model_server_test.py. The first line of a test is the name that its case
has there. Cases that do not hold are in NOT_HELD, with the reason. The models are our own, with the names, signatures
and numbers that the cases expect. Each case waits for the server as upstream's tests do: by a request for a model that is
missing.
"""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import grpc
import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from tests.support.serving.doubles import wait_for
from tests.support.serving.half_plus_two import VERSION, save_all
from tests.support.serving.process import ServerProcess, run_command

HELD = {
    "testGetModelStatus",
    "testGetModelMetadata",
    "testClassify",
    "testClassifyTf2",
    "testRegress",
    "testRegressTf2",
    "testMultiInference",
    "testMultiInferenceTf2",
    "testPredictSavedModel",
    "testGoodModelConfig",
    "testBadModelConfig",
    "testModelConfigReload",
    "testModelConfigReloadWithZeroPollPeriod",
    "testClassifyREST",
    "testRegressREST",
    "testPredictREST",
    "testPredictColumnarREST",
    "testGetStatusREST",
    "testGetModelMetadataREST",
    "testPrometheusEndpoint",
    "test_tf_saved_model_save",
    "test_tf_saved_model_save_multiple_signatures",
    "test_sequential_keras_saved_model_save",
    "test_distrat_sequential_keras_saved_model_save",
}

NOT_HELD = {
    "testGoodGrpcChannelArgs": "there are no options for gRPC's channel arguments",
    "testPredictUDS": "gRPC listens on a port only",
    "testPredictOnTfLite": "this server runs SavedModels. It has no TFLite interpreter",
    "testPredictWithSignatureDefOnTfLite": "this server runs SavedModels. It has no TFLite interpreter",
    "test_profiler_service_with_valid_trace_request": "there is no ProfilerService. `--otel` exports traces of requests",
    "test_tf_text": "this server does not load the library with TensorFlow Text's operations",
    "test_session": "inherited from `tf.test.TestCase`: it starts no server, so there is nothing to restate",
}

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve-reference.md"
PREDICT = "tensorflow/serving/predict"
READY_SECONDS = 120.0


def test_every_case_is_a_test_or_has_a_reason() -> None:
    """Their 30 tests, and the one that a test runner counts as the 31st. docs/serve-reference.md counts them too."""
    functions = [one for one in vars(sys.modules[__name__]).values() if isinstance(one, FunctionType)]
    restated = [str(one.__doc__).split(".")[0] for one in functions if one.__doc__ and one.__name__.startswith("test_")]
    assert sorted(name for name in restated if " " not in name) == sorted(HELD)
    assert len({*HELD, *NOT_HELD}) == len(HELD) + len(NOT_HELD) == 31
    assert f"This server passes {len(HELD)}." in DOCUMENT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_all(folder)
    return folder


class Server(ServerProcess):
    """A server whose gRPC has a free port, and calls to it."""

    def __init__(self, model_dir: Path | None, log: Path, *options: str) -> None:
        super().__init__(model_dir, log, "--grpc-port", "0", "--lame-duck-seconds", "0", *options)
        self.channel = grpc.insecure_channel(self.grpc_address)
        self.prediction: Any = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models: Any = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def ready(self) -> "Server":
        """Wait as upstream's tests do: a request for a missing model names its servable once the server is ready."""
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "intentionally_missing_model"
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                self.prediction.Predict(request, timeout=5)
            except grpc.RpcError as error:
                if "Servable" in error.details():
                    return self
            time.sleep(0.1)
        raise TimeoutError(self.log)

    def rest(self, path: str, body: Any = None) -> Any:
        """The decoded answer to a request that must succeed."""
        text = None if body is None else json.dumps(body)
        status, answer = self.request("GET" if body is None else "POST", path, text)
        assert status == 200, answer
        return json.loads(answer)

    def __exit__(self, *error: Any) -> None:
        self.channel.close()
        super().__exit__(*error)


def config_of(folder: Path, *names: str) -> str:
    configs = (
        f'config: {{ name: "{one}", base_path: "{folder / one}", model_platform: "tensorflow" }}' for one in names
    )
    return f"model_config_list: {{ {', '.join(configs)} }}"


@pytest.fixture(scope="module")
def started(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Servers that start side by side. `default` has the options that upstream's tests give to every server."""
    folder = tmp_path_factory.mktemp("servers")
    several, polled = folder / "several.config", folder / "polled.config"
    names = ("half_plus_two", "half_plus_three", "half_plus_two_tf2", "tf_saved_model_save", "two_signatures")
    several.write_text(config_of(models, *names, "sequential", "mirrored", "half_plus_two_tflite"))
    polled.write_text(config_of(models, "half_plus_two"))
    default = ("--name", "default", "--rest-timeout-ms", "20000", "--metrics")
    options: dict[str, tuple[Path | None, tuple[str, ...]]] = {
        "default": (models / "half_plus_two", default),
        "several": (None, ("--config", str(several))),
        "polled": (None, ("--config", str(polled), "--config-poll-seconds", "1")),
    }
    servers: dict[str, Server] = {}
    try:
        for name, (model_dir, more) in options.items():
            servers[name] = Server(model_dir, folder / f"{name}.log", *more)
        yield servers
    finally:
        for server in servers.values():
            server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def default(started: dict[str, Server]) -> Server:
    return started["default"].ready()


@pytest.fixture(scope="module")
def several(started: dict[str, Server]) -> Server:
    return started["several"].ready()


def check_spec(spec: Any, name: str, signature: str) -> None:
    assert (spec.name, spec.signature_name, spec.version.value) == (name, signature, int(VERSION))


def check_predict(
    prediction: Any,
    expected: float,
    *,
    model: str = "default",
    signature: str = "serving_default",
    shape: tuple[int, ...] = (1,),
    filtered: bool = False,
    aliases: tuple[str, str] = ("x", "y"),
) -> None:
    """Predict x = 2 and compare the one output with `expected`."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    tensor = request.inputs[aliases[0]]
    tensor.dtype = types_pb2.DT_FLOAT
    tensor.float_val.append(2.0)
    for size in shape:
        tensor.tensor_shape.dim.add().size = size
    if filtered:
        request.output_filter.append(aliases[1])
    response = prediction.Predict(request, timeout=20)
    output = response.outputs[aliases[1]]
    assert output.dtype == types_pb2.DT_FLOAT
    assert list(output.float_val) == [expected]
    check_spec(response.model_spec, model, signature)


def add_example(request: Any) -> None:
    request.input.example_list.examples.add().features.feature["x"].float_list.value.append(2.0)


def check_classify(server: Server, model: str) -> None:
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name, request.model_spec.signature_name = model, "classify_x_to_y"
    add_example(request)
    response = server.prediction.Classify(request, timeout=20)
    ((found,),) = (one.classes for one in response.result.classifications)
    assert found.score == 3.0
    check_spec(response.model_spec, model, "classify_x_to_y")


def check_regress(server: Server, model: str) -> None:
    request = regression_pb2.RegressionRequest()
    request.model_spec.name, request.model_spec.signature_name = model, "regress_x_to_y"
    add_example(request)
    response = server.prediction.Regress(request, timeout=20)
    assert [one.value for one in response.result.regressions] == [3.0]
    check_spec(response.model_spec, model, "regress_x_to_y")


def check_multi_inference(server: Server, model: str) -> None:
    request = inference_pb2.MultiInferenceRequest()
    for method in ("regress", "classify"):
        task = request.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.name, task.model_spec.signature_name = model, f"{method}_x_to_y"
    add_example(request)
    regressed, classified = server.prediction.MultiInference(request, timeout=20).results
    assert [one.value for one in regressed.regression_result.regressions] == [3.0]
    assert [[label.score for label in one.classes] for one in classified.classification_result.classifications] == [
        [3.0]
    ]
    check_spec(regressed.model_spec, model, "regress_x_to_y")
    check_spec(classified.model_spec, model, "classify_x_to_y")


def test_status(default: Server) -> None:
    """testGetModelStatus."""
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "default"
    (status,) = default.models.GetModelStatus(request, timeout=20).model_version_status
    assert (status.version, status.status.error_code) == (int(VERSION), 0)


def test_metadata(default: Server) -> None:
    """testGetModelMetadata."""
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "default"
    response = default.prediction.GetModelMetadata(request, timeout=20)
    assert (response.model_spec.name, response.model_spec.version.value) == ("default", int(VERSION))
    assert list(response.metadata) == ["signature_def"]


def test_classify(default: Server) -> None:
    """testClassify."""
    check_classify(default, "default")


def test_classify_of_tensorflow_2(several: Server) -> None:
    """testClassifyTf2."""
    check_classify(several, "half_plus_two_tf2")


def test_regress(default: Server) -> None:
    """testRegress."""
    check_regress(default, "default")


def test_regress_of_tensorflow_2(several: Server) -> None:
    """testRegressTf2."""
    check_regress(several, "half_plus_two_tf2")


def test_multi_inference(default: Server) -> None:
    """testMultiInference."""
    check_multi_inference(default, "default")


def test_multi_inference_of_tensorflow_2(several: Server) -> None:
    """testMultiInferenceTf2."""
    check_multi_inference(several, "half_plus_two_tf2")


def test_predict(default: Server) -> None:
    """testPredictSavedModel."""
    check_predict(default.prediction, 3.0, filtered=True)
    check_predict(default.prediction, 3.0)


def test_a_good_config(several: Server) -> None:
    """testGoodModelConfig."""
    for filtered in (True, False):
        check_predict(several.prediction, 3.0, model="half_plus_two", filtered=filtered)
        check_predict(several.prediction, 4.0, model="half_plus_three", filtered=filtered)


def test_a_bad_config(tmp_path: Path) -> None:
    """testBadModelConfig."""
    path = tmp_path / "bad.config"
    path.write_text("improperly formatted file")
    ended = run_command("serve", "--config", path, "--rest-port", "0", "--no-grpc")
    assert ended.returncode == 1
    assert "Error parsing text-format tensorflow.serving.ModelServerConfig" in ended.stderr


def test_a_config_that_is_polled(started: dict[str, Server], models: Path) -> None:
    """testModelConfigReload. Upstream sleeps 10 seconds after the change."""
    server = started["polled"].ready()
    check_predict(server.prediction, 3.0, model="half_plus_two")
    server.log_path.with_name("polled.config").write_text(config_of(models, "half_plus_three"))
    wait_for(lambda: b"AVAILABLE" in server.request("GET", "/v1/models/half_plus_three")[1])
    check_predict(server.prediction, 4.0, model="half_plus_three")


def test_a_config_that_is_not_polled(several: Server, models: Path) -> None:
    """testModelConfigReloadWithZeroPollPeriod. Their flag's 0 is our option left out."""
    path = several.log_path.with_name("several.config")
    before = path.read_text()
    path.write_text(config_of(models, "half_plus_three"))
    time.sleep(1)
    check_predict(several.prediction, 3.0, model="half_plus_two")
    path.write_text(before)


def test_classify_over_rest(default: Server) -> None:
    """testClassifyREST."""
    body = {"signature_name": "classify_x_to_y", "examples": [{"x": 2.0}]}
    assert default.rest("/v1/models/default:classify", body) == {"results": [[["", 3.0]]]}


def test_regress_over_rest(default: Server) -> None:
    """testRegressREST."""
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 2.0}]}
    assert default.rest("/v1/models/default:regress", body) == {"results": [3.0]}


def test_predict_over_rest(default: Server) -> None:
    """testPredictREST. Numbers stand where the model wants lists of one: TensorFlow broadcasts them."""
    body = {"instances": [2.0, 3.0, 4.0]}
    assert default.rest("/v1/models/default:predict", body) == {"predictions": [3.0, 3.5, 4.0]}


def test_columnar_predict_over_rest(default: Server) -> None:
    """testPredictColumnarREST."""
    body = {"inputs": [2.0, 3.0, 4.0]}
    assert default.rest("/v1/models/default:predict", body) == {"outputs": [3.0, 3.5, 4.0]}


def test_status_over_rest(default: Server) -> None:
    """testGetStatusREST."""
    assert default.rest("/v1/models/default") == {
        "model_version_status": [
            {"version": "123", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }


def test_metadata_over_rest(default: Server, models: Path) -> None:
    """testGetModelMetadataREST. What is expected is protobuf's own JSON of the model's graph."""
    graph = saved_model_pb2.SavedModel.FromString((models / "half_plus_two" / VERSION / "saved_model.pb").read_bytes())
    signatures = {
        name: json_format.MessageToDict(
            definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for name, definition in graph.meta_graphs[0].signature_def.items()
        if not name.startswith("__")
    }
    assert len(signatures) == 5
    assert signatures["serving_default"]["inputs"]["x"]["tensor_shape"]["dim"][0] == {"size": "-1", "name": ""}
    assert signatures["serving_default"]["method_name"] == PREDICT
    assert default.rest("/v1/models/default/metadata") == {
        "model_spec": {"name": "default", "signature_name": "", "version": "123"},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def test_metrics(default: Server) -> None:
    """testPrometheusEndpoint."""
    status, body = default.request("GET", "/monitoring/prometheus/metrics")
    assert status == 200
    assert b"# TYPE" in body


def test_a_saved_function(several: Server) -> None:
    """test_tf_saved_model_save."""
    check_predict(several.prediction, 12.0, model="tf_saved_model_save")


def test_several_signatures(several: Server) -> None:
    """test_tf_saved_model_save_multiple_signatures."""
    for signature, expected in (("custom_signature_key", 2.0), ("serving_default", 1.0)):
        check_predict(several.prediction, expected, model="two_signatures", signature=signature, filtered=True)


def test_a_keras_model(several: Server) -> None:
    """test_sequential_keras_saved_model_save. The aliases are those of Keras 3; Keras 2 saved x and y."""
    check_predict(several.prediction, 2.0, model="sequential", shape=(1, 1), aliases=("inputs", "output_0"))


def test_a_keras_model_of_a_strategy(several: Server) -> None:
    """test_distrat_sequential_keras_saved_model_save. Saved by Model.export, with Keras 3's aliases."""
    check_predict(several.prediction, 2.0, model="mirrored", shape=(1, 1), aliases=("x", "output_0"))


def test_a_folder_of_tflite_is_refused_by_name(several: Server) -> None:
    status = several.rest("/v1/models/half_plus_two_tflite")["model_version_status"]
    assert [(one["version"], one["state"]) for one in status] == [("123", "END")]
    assert "TFLite" in status[0]["status"]["error_message"]
    assert "model half_plus_two_tflite" in several.log or "half_plus_two_tflite/123" in several.log


@pytest.mark.parametrize(
    "method",
    [
        "tensorflow.ProfilerService/Profile",
        "tensorflow.ProfilerService/Monitor",
        "tensorflow.serving.SessionService/SessionRun",
        "tensorflow.serving.PredictionService/PredictStreamed",
    ],
)
def test_a_service_that_is_not_there_is_unimplemented(default: Server, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        default.channel.unary_unary(f"/{method}")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_stop(started: dict[str, Server], default: Server) -> None:
    assert default.stop() == 0
    assert "Traceback" not in "".join(server.log for server in started.values())
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        default.request("GET", "/healthz")
