"""A server that forwards requests to a server of TensorFlow Serving's API behind it: the answers are that server's."""

import concurrent.futures
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_management_pb2, predict_pb2

from tests.support.contract_open_inference import message
from tests.support.contract_serve import (
    Server,
    assert_near,
    config_of,
    draw_ids,
    eventually,
    forwarding_to,
    look_up,
    outputs_of,
    predict_request,
    refusal,
    shared_server,
)
from tests.support.messages import said
from tests.support.serving.doubles import DoublingServable
from tests.support.serving.models import save_scale
from tests.support.serving.process import run_command
from tests.support.serving.served import Served
from tpuembed_serving import ModelSettings


@pytest.fixture(scope="module")
def behind(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def server(behind: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*forwarding_to(behind.grpc_address), "--name", "mapped")
    with Server(None, tmp_path_factory.mktemp("forwarding") / "log", *options) as running:
        eventually(running.is_ready)
        yield running
        assert running.stop() == 0


def test_rest_and_grpc(server: Server) -> None:
    inputs = draw_ids(50, 6, 4)
    columns: dict[str, Any] = {name: value.tolist() for name, value in inputs.items()}
    assert_near(server.post("mapped:predict", {"inputs": columns}).value["outputs"], look_up(inputs))
    reply = server.prediction.Predict(predict_request("mapped", inputs), timeout=60)
    assert_near(outputs_of(reply), look_up(inputs))
    assert reply.model_spec.version.value == 1


def test_the_open_inference_protocol(server: Server) -> None:
    inputs = draw_ids(51, 3, 2)
    request = message("ModelInferRequest")(model_name="mapped")
    for name, array in inputs.items():
        datatype = "FP32" if array.dtype == np.float32 else "INT64"
        request.inputs.add(name=name, shape=array.shape, datatype=datatype)
        request.raw_input_contents.append(array.tobytes())
    answer = server.inference("ModelInfer", request)
    found = {
        output.name: np.frombuffer(data, np.float32).reshape(output.shape)
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    assert_near(found, look_up(inputs))


def test_status_and_metadata_are_those_behind(server: Server, behind: Server) -> None:
    for path in ("/v1/models/mapped", "/v1/models/mapped/metadata", "/v2/models/mapped"):
        assert server.get(path).value == behind.get(path).value
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "mapped"
    answers = [one.models.GetModelStatus(request, timeout=60) for one in (server, behind)]
    assert answers[0] == answers[1]


def test_errors_are_those_behind(server: Server, behind: Server) -> None:
    row = {name: value[0].tolist() for name, value in draw_ids(52, 1, 2).items()}
    for target, body in (
        ("mapped:predict", {"instances": [row | {"user": 60}]}),
        ("mapped:predict", {"instances": [row | {"user": "a"}]}),
        ("mapped:predict", {"signature_name": "S", "instances": [row]}),
        ("mapped/versions/9:predict", {"instances": [row]}),
        ("mapped/labels/beta:predict", {"instances": [row]}),
    ):
        found, wanted = server.post(target, body), behind.post(target, body)
        assert (found.status, found.error) == (wanted.status, wanted.error)
        assert found.status in (400, 404)


def test_it_cannot_be_reloaded(server: Server) -> None:
    request = model_management_pb2.ReloadConfigRequest()
    request.config.model_config_list.SetInParent()
    code, text = refusal(server.models.HandleReloadConfigRequest, request)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    said(text)


def test_versions_and_labels_behind_are_followed(tmp_path: Path) -> None:
    """And a server that is gone is UNAVAILABLE by its address."""
    folder, config = tmp_path / "models", tmp_path / "models.config"

    def write(stable: int) -> None:
        label = f'model_version_policy {{ all {{}} }} version_labels {{ key: "stable" value: {stable} }}'
        config.write_text(config_of(folder, {"scale": label}), encoding="utf-8")

    def factor(target: str) -> Any:
        reply = front.post(f"{target}:predict", {"instances": [1.0]})
        return reply.value["predictions"][0] if reply.status == 200 else reply.status

    save_scale(folder / "scale" / "1", 1.0)
    write(1)
    options: tuple[str, ...] = ("--config", str(config), "--config-poll-seconds", "0.05")
    with Server(None, tmp_path / "behind.log", *options) as behind:
        eventually(behind.is_ready)
        to = (*forwarding_to(behind.grpc_address), "--name", "scale", "--poll-seconds", "0.05")
        with Server(None, tmp_path / "log", *to) as front:
            eventually(front.is_ready)
            assert (factor("scale"), factor("scale/labels/stable"), factor("scale/versions/2")) == (1.0, 1.0, 404)
            save_scale(folder / "scale" / ".staging", 2.0)
            (folder / "scale" / ".staging").rename(folder / "scale" / "2")
            eventually(lambda: factor("scale") == 2.0)
            assert (factor("scale/versions/1"), factor("scale/labels/stable")) == (1.0, 1.0)
            write(2)
            eventually(lambda: factor("scale/labels/stable") == 2.0)
            shutil.rmtree(folder / "scale" / "1")
            eventually(lambda: factor("scale/versions/1") == 404)
            assert behind.stop() == 0
            eventually(lambda: front.get("/readyz").status == 503)
            reply = front.post("scale:predict", {"instances": [1.0]})
            assert (reply.status, behind.grpc_address in reply.error) == (503, True)


class Behind:
    """A server behind, whose model m doubles numbers. A test says which versions it has, and whether it answers for a label."""

    def __init__(self) -> None:
        self.versions, self.missing, self.input = [1], set[int](), "x"
        self.answers, self.asked = threading.Event(), list[str]()
        self.answers.set()
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        methods = {
            "PredictionService/Predict": (self.predict, predict_pb2.PredictRequest),
            "PredictionService/GetModelMetadata": (self.metadata, get_model_metadata_pb2.GetModelMetadataRequest),
            "ModelService/GetModelStatus": (self.status, get_model_status_pb2.GetModelStatusRequest),
        }
        for path, (method, request) in methods.items():
            service, _, name = path.partition("/")
            handler = grpc.unary_unary_rpc_method_handler(
                method, request.FromString, lambda answer: answer.SerializeToString()
            )
            generic = grpc.method_handlers_generic_handler(f"tensorflow.serving.{service}", {name: handler})
            self._server.add_generic_rpc_handlers((generic,))
        self._server.start()

    def status(self, _: Any, __: Any) -> Any:
        answer = get_model_status_pb2.GetModelStatusResponse()
        for version in self.versions:
            answer.model_version_status.add(version=version, state=30)
        return answer

    def metadata(self, request: Any, context: Any) -> Any:
        spec = request.model_spec
        if spec.version_label:
            self.asked.append(spec.version_label)
            self.answers.wait(60)
        if spec.version.value in self.missing or spec.version_label == "none":
            context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        answer, found = get_model_metadata_pb2.GetModelMetadataResponse(), get_model_metadata_pb2.SignatureDefMap()
        for side, name in (("inputs", self.input), ("outputs", "y")):
            getattr(found.signature_def["serving_default"], side)[name].name = f"{name}:0"
            getattr(found.signature_def["serving_default"], side)[name].dtype = 1
        answer.model_spec.name, answer.model_spec.version.value = "m", spec.version.value or max(self.versions)
        answer.metadata["signature_def"].Pack(found)
        return answer

    def predict(self, request: Any, _: Any) -> Any:
        answer = predict_pb2.PredictResponse(model_spec=request.model_spec)
        answer.outputs["y"].CopyFrom(tf.make_tensor_proto(2 * tf.make_ndarray(request.inputs[self.input])))
        return answer

    def stop(self) -> None:
        self.answers.set()
        self._server.stop(None).wait()


@pytest.fixture
def pretended() -> Iterator[Behind]:
    behind = Behind()
    yield behind
    behind.stop()


@pytest.fixture
def forwarder(pretended: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    models = (ModelSettings(name="m", base_path=Path()),)
    options: dict[str, Any] = {"target": pretended.address, "rest_timeout_ms": 4000, "max_request_memory": 68 << 20}
    with Served(tmp_path, monkeypatch, lambda _: DoublingServable(), models=models, **options) as running:
        eventually(lambda: running.is_ready)
        yield running


def test_a_version_that_one_replica_lacks_is_not_available(forwarder: Served, pretended: Behind) -> None:
    """The older one answers. If the other replica lacks that too, it is asked for all the same. Signatures are read again."""
    pretended.missing, pretended.versions = {2}, [2, 1]

    def states() -> list[Any]:
        found = forwarder.send("GET", "/v1/models/m").value["model_version_status"]
        return [(one["version"], one["state"], one["status"]["error_code"]) for one in found]

    eventually(lambda: states() == [("2", "START", "NOT_FOUND"), ("1", "AVAILABLE", "OK")])
    body = {"instances": [1.5]}
    for _ in range(2):
        reply = forwarder.send("POST", "/v1/models/m:predict", body)
        assert (reply.value, reply.headers["x-model-version"]) == ({"predictions": [3.0]}, "1")
        pretended.missing = {1, 2}
    pretended.missing, pretended.versions, pretended.input = set(), [3], "w"
    named = {"instances": [{"w": 1.5}]}
    eventually(lambda: forwarder.send("POST", "/v1/models/m:predict", named).status == 200)


def test_a_label_that_the_server_behind_does_not_answer_for_holds_nobody_up(
    forwarder: Served, pretended: Behind
) -> None:
    """Each health check waited, too. And the memory of such requests was reserved for as long as the server was silent."""
    pretended.answers.clear()
    body = json.dumps({"instances": [1.5]}).encode() + b" " * (1 << 20)

    def ask(label: str) -> int:
        return forwarder.send("POST", f"/v1/models/m/labels/{label}:predict", body).status

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = [pool.submit(ask, label) for label in ("stable", "stable", "a", "b", "c")]
        eventually(lambda: pretended.asked)
        assert forwarder.send("GET", "/healthz").status == 200
        assert forwarder.send("POST", "/v1/models/m:predict", {"instances": [1.5]}).status == 200
        assert not any(status.done() for status in statuses)
        assert [status.result() for status in statuses] == [504] * 5
        eventually(lambda: forwarder.send("POST", "/v1/models/m:predict", body).status == 200)
        pretended.answers.set()
        eventually(lambda: ask("stable") == 200)
        assert ask("none") == 404


def test_options_that_do_not_go_together() -> None:
    for more in ("", "--name m --lookups native", "--name m --config models.config"):
        result = run_command("serve", *forwarding_to("127.0.0.1:1"), *more.split())
        assert result.returncode == 2, more
        assert "Error: " in result.stderr
