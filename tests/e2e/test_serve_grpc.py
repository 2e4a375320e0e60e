"""The gRPC server around its services: deadlines that free a thread, metrics of a reload, and its port."""

import contextlib
import re
import socket
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import model_management_pb2

from tests.support.contract_serve import Server, outputs_of, predict_request
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import TABLE, save_scale, save_zoo
from tests.support.serving.process import ServerProcess


@pytest.mark.nightly
def test_a_deadline_ends_the_run_and_who_waits_is_not_run(tmp_path: Path) -> None:
    """The only thread is free again once nobody waits for what it does, long before the server's own timeout of 30 s."""
    save_zoo(tmp_path / "zoo" / "1")
    endless = predict_request("zoo", {"n": np.array([10**12])}, "slow")
    with Server(tmp_path / "zoo", tmp_path / "log", "--run-threads", "1", "--metrics") as running:
        running.wait_for(1)
        good = predict_request("zoo", {"ids": np.array([[1, 2]])})
        running.prediction.Predict(good, timeout=30)
        runs = counted_runs(running)
        asked = time.monotonic()
        calls = [running.prediction.Predict.future(endless, timeout=2)]
        calls += [running.prediction.Predict.future(endless, timeout=seconds) for seconds in (0.3, 0.5, 0.7, 1)]
        reply = running.prediction.Predict(good, timeout=30)
        assert time.monotonic() - asked < 15
        np.testing.assert_array_equal(outputs_of(reply)["embedding"], TABLE[[[1, 2]]])
        for call in calls:
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: counted_runs(running) == runs + 2)


def counted_runs(server: ServerProcess) -> int:
    page = server.request("GET", "/monitoring/prometheus/metrics")[1].decode()
    counts = re.findall(r"^:tensorflow:serving:batching_session:wrapped_run_count\S* (\d+)", page, re.MULTILINE)
    return sum(map(int, counts))


def test_a_reload_tells_how_much_metrics_have_grown(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_scale(tmp_path / name / "1", 2.0)
    with Server(tmp_path / "a", tmp_path / "log", "--metrics") as running:
        running.wait_for(1)
        metrics = ["/tensorflow/cc/saved_model/load_attempt_count", "/no/such/metric"]
        request = model_management_pb2.ReloadConfigRequest(metric_names=metrics)
        for name in ("b", "c"):
            request.config.model_config_list.config.add(
                name=name, base_path=str(tmp_path / "b"), model_platform="tensorflow"
            )
        reply = running.models.HandleReloadConfigRequest(request, timeout=60)
        assert [(one.name, one.int64_value_increase) for one in reply.metric] == list(zip(metrics, (2, 0), strict=True))


def test_a_default_port_that_is_taken_leaves_rest(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where it is taken already
            stack.enter_context(socket.create_server(("127.0.0.1", 8500)))
        running = stack.enter_context(ServerProcess(tmp_path / "m", tmp_path / "log", default_grpc=True))
        assert running.request("GET", "/healthz")[0] == 200
        assert "gRPC is off: cannot listen on 127.0.0.1 port 8500: Address already in use" in running.log


def test_without_grpc(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with ServerProcess(tmp_path / "m", tmp_path / "log", "--no-grpc") as running:
        assert running.request("GET", "/healthz")[0] == 200
        assert "gRPC" not in running.log
