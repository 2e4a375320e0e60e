"""A server that forwards requests to a server of TensorFlow Serving's API behind it: the answers are that server's."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2

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
from tests.support.serving.models import save_scale
from tests.support.serving.process import run_command


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


def test_options_that_do_not_go_together() -> None:
    for more in ("", "--name m --lookups native", "--name m --config models.config"):
        result = run_command("serve", *forwarding_to("127.0.0.1:1"), *more.split())
        assert result.returncode == 2, more
        assert "Error: " in result.stderr
