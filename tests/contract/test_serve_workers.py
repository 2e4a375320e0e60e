"""`tpuembed serve --workers 2`: two processes that answer as one, of a model that Vertex AI's variable names."""

import collections
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import model_management_pb2

from tests.support.contract_load import Clients
from tests.support.contract_serve import Server, eventually, outputs_of, predict_request, refusal
from tests.support.serving.models import save_scale
from tests.support.serving.process import workers

ASKED = 40
"""Enough connections that each of two processes gets one: the kernel distributes them by chance."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    for version in (1, 2):
        save_scale(folder / str(version), float(version))
    (folder / "scale").mkdir()
    shutil.move(folder / "1", folder / "scale" / "1")
    return folder / "scale"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    variables = {
        "AIP_STORAGE_URI": str(model_dir),
        "TPUEMBED_SERVE_WORKERS": "2",
        "TPUEMBED_SERVE_POLL_SECONDS": "0.05",
        "TPUEMBED_SERVE_METRICS": "1",
    }
    options = ("--rest-port", "0", "--grpc-port", "0", "--lame-duck-seconds", "0.5")
    with Server(None, model_dir.with_name("log"), *options, variables=variables, bare=True) as running:
        eventually(running.is_ready)
        yield running


def factors(server: Server, target: str) -> dict[Any, int]:
    """What the model multiplies by, or the status of an error, over new connections."""
    found = collections.Counter[Any]()
    for _ in range(ASKED):
        reply = server.post(f"{target}:predict", {"instances": [1.0]})
        found[reply.value["predictions"][0] if reply.status == 200 else reply.status] += 1
    return found


def test_two_processes_answer_and_are_counted_as_one(server: Server) -> None:
    assert len(workers(server)) == 2
    assert factors(server, "scale") == {1.0: ASKED}
    reply = server.prediction.Predict(predict_request("scale", {"x": np.array([3], np.float32)}), timeout=60)
    assert outputs_of(reply)["y"].tolist() == [3.0]
    text = server.get("/monitoring/prometheus/metrics").body.decode()
    assert f':tensorflow:serving:request_count{{model_name="scale",status="OK"}} {ASKED + 1}' in text


def test_a_version_is_available_once_both_have_it(server: Server, model_dir: Path) -> None:
    shutil.move(model_dir.with_name("2"), model_dir / "2")
    server.wait_for(2)
    assert factors(server, "scale/versions/2") == {2.0: ASKED}
    server.wait_for(1, "END")
    assert factors(server, "scale/versions/1") == {404: ASKED}


def test_a_reload_holds_for_both(server: Server, model_dir: Path) -> None:
    request = model_management_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(
        name="scale", base_path=str(model_dir), model_platform="tensorflow"
    )
    config.model_version_policy.all.SetInParent()
    server.models.HandleReloadConfigRequest(request, timeout=120)
    assert factors(server, "scale/versions/1") == {1.0: ASKED}
    config.version_labels["stable"] = 1
    server.models.HandleReloadConfigRequest(request, timeout=120)
    assert factors(server, "scale/labels/stable") == {1.0: ASKED}
    config.version_labels["stable"] = 9  # which is refused before any of them does it
    code, _ = refusal(server.models.HandleReloadConfigRequest, request)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert factors(server, "scale/labels/stable") == {1.0: ASKED}


def test_a_stop_loses_no_request_and_leaves_no_process(server: Server) -> None:
    """A terminal's SIGINT reaches the workers too. gRPC's part is tested with one process, where a second try is quick."""
    pids = workers(server)
    with Clients(server, "scale", rest=8) as clients:
        eventually(lambda: clients.have_all(20))
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        clients.join()
    assert clients.lost == {}
    assert clients.refused == 8
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in server.log
