"""The gRPC server around its services: health, reflection, limits, deadlines, reloads, start and end."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import TABLE, save_scale, save_zoo
from tests.support.serving.process import ServerProcess, run_command

SERVING, NOT_SERVING = 1, 2


class GrpcProcess(ServerProcess):
    """A server with gRPC on a free port, and stubs."""

    def __init__(self, model_dir: Path, log: Path, *options: str) -> None:
        super().__init__(model_dir, log, "--grpc-port", "0", *options)
        limit = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(self.grpc_address, options=limit)
        grpc.channel_ready_future(self.channel).result(60)
        self.prediction: Any = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models: Any = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=30)
        return int(reply.status)

    def __exit__(self, *error: Any) -> None:
        self.channel.close()
        super().__exit__(*error)


def predict_request(model: str, signature: str = "", **inputs: Any) -> Any:
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for alias, value in inputs.items():
        request.inputs[alias].CopyFrom(tf.make_tensor_proto(value))
    return request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcProcess]:
    path = tmp_path_factory.mktemp("grpc")
    save_zoo(path / "zoo" / "3")
    with GrpcProcess(path / "zoo", path / "log", "--run-threads", "2") as running:
        running.wait_for(3)
        yield running


@pytest.mark.parametrize(
    "service",
    [
        "",
        "ModelService",
        "PredictionService",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
        "zoo",
    ],
)
def test_health(server: GrpcProcess, service: str) -> None:
    assert server.health(service) == SERVING


def test_health_of_what_is_not_there(server: GrpcProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.health("SessionService")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection(server: GrpcProcess) -> None:
    database = ProtoReflectionDescriptorDatabase(server.channel)
    assert set(database.get_services()) >= {
        "tensorflow.serving.PredictionService",
        "tensorflow.serving.ModelService",
        "grpc.health.v1.Health",
    }
    for service, methods in (
        ("PredictionService", {"Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata"}),
        ("ModelService", {"GetModelStatus", "HandleReloadConfigRequest"}),
    ):
        file = database.FindFileContainingSymbol(f"tensorflow.serving.{service}")
        (found,) = [one for one in file.service if one.name == service]
        assert {method.name for method in found.method} == methods


def test_a_message_of_many_megabytes(server: GrpcProcess) -> None:
    ids = np.random.default_rng(0).integers(0, 5, (400_000, 2))
    reply = server.prediction.Predict(predict_request("zoo", ids=ids), timeout=60)
    np.testing.assert_array_equal(tf.make_ndarray(reply.outputs["embedding"]), TABLE[ids])


def test_a_long_text_is_cut(server: GrpcProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.prediction.Predict(predict_request("m" * 5000), timeout=30)
    start = "Servable not found for request: Latest("
    assert caught.value.details() == start + "m" * (1024 - len(start)) + "...TRUNCATED"


def test_a_deadline(server: GrpcProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.prediction.Predict(predict_request("zoo", "slow", n=np.array([10**12])), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # What was given up does not keep the others waiting: two threads, one of which may still be at it.
    reply = server.prediction.Predict(predict_request("zoo", ids=np.array([[1, 2]])), timeout=30)
    np.testing.assert_array_equal(tf.make_ndarray(reply.outputs["embedding"]), TABLE[[[1, 2]]])


@pytest.mark.nightly
def test_a_deadline_ends_the_run_and_who_waits_is_not_run(tmp_path: Path) -> None:
    """The only thread is free again once nobody waits for what it does, long before the server's own timeout of 30 s."""
    save_zoo(tmp_path / "zoo" / "1")
    endless = predict_request("zoo", "slow", n=np.array([10**12]))
    with GrpcProcess(tmp_path / "zoo", tmp_path / "log", "--run-threads", "1", "--metrics") as running:
        running.wait_for(1)
        good = predict_request("zoo", ids=np.array([[1, 2]]))
        running.prediction.Predict(good, timeout=30)
        runs = counted_runs(running)
        asked = time.monotonic()
        calls = [running.prediction.Predict.future(endless, timeout=2)]
        calls += [running.prediction.Predict.future(endless, timeout=seconds) for seconds in (0.3, 0.5, 0.7, 1)]
        reply = running.prediction.Predict(good, timeout=30)
        assert time.monotonic() - asked < 15
        np.testing.assert_array_equal(tf.make_ndarray(reply.outputs["embedding"]), TABLE[[[1, 2]]])
        for call in calls:
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: counted_runs(running) == runs + 2)


def counted_runs(server: ServerProcess) -> int:
    page = server.request("GET", "/monitoring/prometheus/metrics")[1].decode()
    counts = re.findall(r"^:tensorflow:serving:batching_session:wrapped_run_count\S* (\d+)", page, re.MULTILINE)
    return sum(map(int, counts))


def test_many_calls_at_once_each_get_their_own_answer(server: GrpcProcess) -> None:
    requests = [np.array([[n % 7, n % 3]]) for n in range(300)]
    calls = [server.prediction.Predict.future(predict_request("zoo", ids=ids), timeout=60) for ids in requests]
    for ids, call in zip(requests, calls, strict=True):
        if ids.max() < 5:
            np.testing.assert_array_equal(tf.make_ndarray(call.result().outputs["embedding"]), TABLE[ids])
        else:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert call.details().startswith(f"indices[0,0] = {ids[0, 0]} is not in [0, 5)")


def test_a_message_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with GrpcProcess(tmp_path / "m", tmp_path / "log", "--max-body-bytes", "2000") as running:
        with pytest.raises(grpc.RpcError) as caught:
            running.prediction.Predict(predict_request("m" * 3000), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.nightly
def test_it_answers_before_a_model_is_loaded_and_a_stop_finishes_the_call_in_progress(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    with GrpcProcess(tmp_path / "zoo", tmp_path / "log") as running:
        assert running.health("") != SERVING, "as /readyz"
        wait_for(lambda: running.health("PredictionService") == SERVING)  # the first look at the folder is over
        with pytest.raises(grpc.RpcError) as caught:
            running.prediction.Predict(predict_request("zoo"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "Servable not found for request: Latest(zoo)"
        save_zoo(tmp_path / "zoo" / ".staging")
        (tmp_path / "zoo" / ".staging").rename(tmp_path / "zoo" / "1")
        running.wait_for(1)
        assert running.health("zoo") == SERVING
        call = running.prediction.Predict.future(predict_request("zoo", "slow", n=np.array([200_000])), timeout=60)
        assert running.health("zoo") == SERVING  # on the same connection: the call before it has come too
        assert not call.done(), "the call is too quick to be interrupted"
        assert running.stop() == 0
        assert tf.make_ndarray(call.result().outputs["n"]).tolist() == [200_000]
        assert "Traceback" not in running.log


def test_a_reload_replaces_the_models(tmp_path: Path) -> None:
    for name, factor in (("a", 2.0), ("b", 3.0)):
        save_scale(tmp_path / name / "1", factor)
    with GrpcProcess(tmp_path / "a", tmp_path / "log", "--metrics") as running:
        running.wait_for(1)
        metrics = ["/tensorflow/cc/saved_model/load_attempt_count", "/no/such/metric"]
        request = model_management_pb2.ReloadConfigRequest(metric_names=metrics)
        for name in ("b", "c"):
            request.config.model_config_list.config.add(
                name=name, base_path=str(tmp_path / "b"), model_platform="tensorflow"
            )
        reply = running.models.HandleReloadConfigRequest(request, timeout=60)
        assert (reply.status.error_code, reply.status.error_message) == (0, "")
        assert [(one.name, one.int64_value_increase) for one in reply.metric] == list(zip(metrics, (2, 0), strict=True))
        for name in ("b", "c"):
            answer = running.prediction.Predict(predict_request(name, x=np.array([2.0], np.float32)), timeout=30)
            assert tf.make_ndarray(answer.outputs["y"]).tolist() == [6.0]
        with pytest.raises(grpc.RpcError) as caught:
            running.prediction.Predict(predict_request("a", x=np.array([2.0], np.float32)), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert running.request("POST", "/v1/models/b:predict", '{"instances": [2.0]}')[0] == 200
        request.config.model_config_list.config[0].base_path = "relative"
        with pytest.raises(grpc.RpcError) as caught:
            running.models.HandleReloadConfigRequest(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = get_model_status_pb2.GetModelStatusRequest()
        status.model_spec.name = "b"
        (one,) = running.models.GetModelStatus(status, timeout=30).model_version_status
        assert (one.version, one.state) == (1, 30)


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command("serve", tmp_path, "--rest-port", "0", "--grpc-port", str(port))
    assert result.returncode == 1
    assert f"port {port}" in result.stderr
    said(result.stderr)


def test_two_servers_do_not_share_a_port(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with GrpcProcess(tmp_path / "m", tmp_path / "log") as running:
        port = running.grpc_address.rpartition(":")[2]
        result = run_command("serve", tmp_path / "m", "--rest-port", "0", "--grpc-port", port)
    assert result.returncode == 1
    said(result.stderr)


def test_a_default_port_that_is_taken_leaves_rest(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where it is taken already
            stack.enter_context(socket.create_server(("127.0.0.1", 8500)))
        running = stack.enter_context(ServerProcess(tmp_path / "m", tmp_path / "log", default_grpc=True))
        assert running.request("GET", "/healthz")[0] == 200
        assert "gRPC is off: cannot listen on 127.0.0.1 port 8500: Address already in use" in running.log


@pytest.mark.parametrize("options", [("--grpc-port", "70000"), ("--no-grpc", "--grpc-port", "1")])
def test_bad_usage(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run_command("serve", tmp_path, *options).returncode == 2


def test_without_grpc(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with ServerProcess(tmp_path / "m", tmp_path / "log", "--no-grpc") as running:
        assert running.request("GET", "/healthz")[0] == 200
        assert "gRPC" not in running.log
