"""Versions swap under load without a failed request; a broken one changes nothing."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import said
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve_versions") / "scale"
    publish(path, 1)
    return path


@pytest.fixture
def server(model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model_dir, model_dir.with_name("server.log")) as running:
        running.wait_for(max(int(path.name) for path in model_dir.iterdir()))
        yield running


def publish(model_dir: Path, version: int) -> None:
    """Version n multiplies by n; it appears by one rename."""
    staging = model_dir / f".staging-{version}"
    save_scale(staging, float(version))
    staging.rename(model_dir / str(version))


class Client(threading.Thread):
    """Asks over one connection until told to stop, and keeps every answer."""

    def __init__(self, server: ServerProcess, stop: threading.Event) -> None:
        super().__init__()
        self._server, self._stop_asking = server, stop
        self.answers: list[tuple[int, Any]] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        connection = self._server.connect()
        try:
            while not self._stop_asking.is_set():
                connection.request("POST", f"{self._server.path}:predict", '{"instances": [1.0, 2.0]}')
                reply = connection.getresponse()
                self.answers.append((reply.status, json.loads(reply.read())))
        except Exception as error:
            self.failure = error
        finally:
            connection.close()


def test_swaps_under_load_lose_no_request(server: ServerProcess, model_dir: Path) -> None:
    stop = threading.Event()
    clients = [Client(server, stop) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        for version in (2, 3, 4):
            publish(model_dir, version)
            server.wait_for(version)
            server.wait_for(version - 1, "END")
            time.sleep(0.1)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert [client.failure for client in clients] == [None] * 4
    for client in clients:
        assert {status for status, _ in client.answers} == {200}
        factors = [answer["predictions"][0] for _, answer in client.answers]
        assert all(
            answer["predictions"] == [factor, 2 * factor]
            for (_, answer), factor in zip(client.answers, factors, strict=True)
        )
        assert factors == sorted(factors), "no answer of a version after one of a newer version"
        assert set(factors) <= {1.0, 2.0, 3.0, 4.0}
        assert factors[0] == 1.0
        assert factors[-1] == 4.0


def test_a_broken_version_is_named_and_the_old_one_serves(server: ServerProcess, model_dir: Path) -> None:
    newest = max(int(path.name) for path in model_dir.iterdir())
    garbage = model_dir / "50"
    garbage.mkdir()
    (garbage / "saved_model.pb").write_bytes(b"no graph")
    server.wait_for(50, "END")
    status = server.statuses()[50]["status"]
    assert status["error_code"] != "OK"
    assert str(model_dir) not in status["error_message"]

    torn = model_dir / ".staging-51"
    save_scale(torn, 51.0)
    (torn / "variables" / "variables.index").unlink()
    torn.rename(model_dir / "51")
    server.wait_for(51, "END")
    status = server.statuses()[51]["status"]
    assert status["error_code"] == "NOT_FOUND"
    said(status["error_message"])

    cut = model_dir / ".staging-52"
    save_scale(cut, 52.0)
    (data,) = (cut / "variables").glob("variables.data-*")
    data.write_bytes(data.read_bytes()[:2])
    cut.rename(model_dir / "52")
    server.wait_for(52, "END")
    assert str(model_dir) not in server.statuses()[52]["status"]["error_message"]

    (model_dir / "53").mkdir()
    server.wait_for(53, "END")
    said(server.statuses()[53]["status"]["error_message"])

    assert server.predict({"instances": [1.0]}) == (200, {"predictions": [float(newest)]})
    assert server.request("GET", "/readyz")[0] == 200
    for broken in (50, 51, 52, 53):
        shutil.rmtree(model_dir / str(broken))


def test_sigterm_ends_an_idle_server_with_0(server: ServerProcess) -> None:
    assert server.stop() == 0
    assert "Traceback" not in server.log
