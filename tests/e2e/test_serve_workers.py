"""Two worker processes behind one port: they survive each other's death, and end together."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

from tests.support.serving.doubles import wait_for
from tests.support.serving.load import Load
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess, workers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version n multiplies by n."""
    folder = tmp_path_factory.mktemp("workers_saved")
    for version in (1, 2, 3):
        save_scale(folder / str(version), float(version))
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Path:
    path = tmp_path_factory.mktemp("workers") / "scale"
    publish(saved, path, 1)
    return path


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[ServerProcess]:
    options = ("--workers", "2", "--grpc-port", "0", "--drain-seconds", "5")
    with ServerProcess(model_dir, model_dir.with_name("server.log"), *options) as running:
        running.wait_for(1)
        yield running
        for worker in workers(running):
            os.kill(worker, signal.SIGKILL)


def publish(saved: Path, model_dir: Path, version: int) -> None:
    shutil.copytree(saved / str(version), model_dir / f".staging-{version}")
    (model_dir / f".staging-{version}").rename(model_dir / str(version))


def ask(server: ServerProcess, times: int, target: str = "") -> set[object]:
    """The answers over as many new connections, which the kernel shares out."""
    answers: set[object] = set()
    for _ in range(times):
        status, answer = server.predict({"instances": [1.0]}, target)
        answers.add(answer["predictions"][0] if status == 200 else (status, answer["error"]))
    return answers


def reload(server: ServerProcess, model_dir: Path, labels: str) -> None:
    text = f"""model_config_list {{ config {{ name: "scale" base_path: "{model_dir}" model_platform: "tensorflow"
        model_version_policy {{ all {{}} }} {labels} }} }}"""
    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(text, request.config)
    with grpc.insecure_channel(server.grpc_address) as channel:
        model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest(request, timeout=120)


@pytest.mark.nightly
def test_one_that_is_killed_under_load_comes_back(server: ServerProcess, saved: Path, model_dir: Path) -> None:
    publish(saved, model_dir, 2)
    server.wait_for(2)
    for label in ("", 'version_labels { key: "stable" value: 1 }'):
        reload(server, model_dir, label)
    killed, _ = workers(server)
    with Load(server, 16) as load:
        wait_for(lambda: len(load.asked) > 200)
        os.kill(killed, signal.SIGKILL)
        dead_at = time.monotonic()
        wait_for(lambda: sum(one.sent > dead_at for one in load.asked) > 200)
        wait_for(lambda: "was killed by signal 9. Restarting it in 0.1 s" in server.log)
        # New connections too are answered well: the new worker takes none before it has loaded.
        answers: set[object] = set()
        while " answers again" not in server.log:
            assert time.monotonic() < dead_at + 120
            answers |= ask(server, 5)
        assert answers | ask(server, 40) == {2.0}
        wait_for(lambda: len(workers(server)) == 2 and killed not in workers(server))
        again_at = time.monotonic()
        wait_for(lambda: sum(one.sent > again_at for one in load.asked) > 200)
    check_lost(load, dead_at)
    # What was reloaded while the dead one lived holds for the new one too.
    server.wait_for(1)
    assert ask(server, 40, "/labels/stable") == {1.0}
    publish(saved, model_dir, 3)
    server.wait_for(3)
    assert ask(server, 40) == {3.0}


def check_lost(load: Load, dead_at: float) -> None:
    """A lost connection may be opened anew before the dying one's port is closed, and be lost once more."""
    assert {one.status for one in load.failed} <= {0}, "only connections of the dead one were lost"
    assert len(load.failed) <= 2 * 16
    assert [one for one in load.failed if one.sent > dead_at + 5] == []
    print(f"{len(load.failed)} of {len(load.asked)} requests lost")


@pytest.mark.nightly
def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with ServerProcess(tmp_path / "empty", tmp_path / "server.log", "--workers", "2") as server:
        wait_for(lambda: len(workers(server)) == 2)
        pids = workers(server)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(running(pid) for pid in pids), seconds=120)


def running(pid: int) -> bool:
    """Not so for a process that has ended and that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
