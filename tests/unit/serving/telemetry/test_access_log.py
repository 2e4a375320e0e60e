"""The lines of the access log, over ASGI and gRPC's handler, and what becomes of its file."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.serving.asgi import running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, make_version, wait_for
from tpuembed.errors import ServingError
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.request_record import GRPC, RequestRecord
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.settings import TelemetrySettings
from tpuembed_serving.telemetry.access_log import AccessLog
from tpuembed_serving.telemetry.observers import check_telemetry


def logged(folder: Path, ask: Callable[[ServingApp], object]) -> list[dict[str, Any]]:
    """The lines of a server that was asked something."""
    make_version(folder / "m", 7)
    log = folder / "access.log"
    settings = ServerSettings.for_model_dir(folder / "m", telemetry=TelemetrySettings(access_log=str(log)))
    app = create_app(settings, load=lambda _: DoublingServable())
    with running(app):
        wait_until_ready(app)
        ask(app)
    app.telemetry.close()
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_request_without_a_name_gets_one(tmp_path: Path) -> None:
    shown = []

    def ask(app: ServingApp) -> None:
        for name in ("", "no spaces", "x" * 200):
            reply = send(app, "GET", "/v1/models/m", x_request_id=name)
            shown.append(reply.headers[b"x-request-id"].decode())

    lines = logged(tmp_path, ask)
    assert [line["request_id"] for line in lines] == shown
    assert len(set(shown)) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in shown)


def test_a_path_cannot_break_a_line(tmp_path: Path) -> None:
    lines = logged(tmp_path, lambda app: send(app, "GET", '/v1/models/"\n{}\x7f'))
    assert [line["path"] for line in lines] == ['/v1/models/"\n{}\x7f']


def test_a_name_cannot_break_a_line(tmp_path: Path) -> None:
    """Some readers end lines at U+0085, U+2028 and U+2029 too."""
    lines = logged(tmp_path, lambda app: send(app, "POST", "/v1/models/%C2%85%E2%80%A8%E2%80%A9%C3%A9:predict", "{}"))
    assert [line["model"] for line in lines] == ["\x85\u2028\u2029\xe9"]


def record() -> RequestRecord:
    one = RequestRecord(GRPC, "POST", b"/tensorflow.serving.PredictionService/Predict", [(b"x-request-id", b"a")])
    one.answered(Code.NOT_FOUND, int(Code.NOT_FOUND), 0)
    return one


def test_pages_and_refusals_have_lines_and_health_checks_have_none(tmp_path: Path) -> None:
    """Only the access log sees them: TensorFlow Serving's metrics count no pages."""
    guard = SecuritySettings(api_keys=ApiKeys([("", "k" * 20)]))
    telemetry = TelemetrySettings(access_log=str(tmp_path / "log"), metrics_path="/metrics")
    make_version(tmp_path / "m", 1)
    settings = ServerSettings.for_model_dir(tmp_path / "m", security=guard, telemetry=telemetry)
    app = create_app(settings, load=lambda _: DoublingServable())
    with running(app):
        wait_until_ready(app)
        key = {"x_api_key": "k" * 20}
        send(app, "POST", "/v1/models/m:predict", "{}")
        send(app, "GET", "/none", **key)
        send(app, "GET", "/healthz")
        send(app, "GET", "/readyz", **key)
        text = send(app, "GET", "/metrics", **key).body.decode()
        app.telemetry.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    found = [(line["path"], line["entrypoint"], line["status"]) for line in lines]
    assert found == [("/v1/models/m:predict", "HTTP", 401), ("/none", "HTTP", 404), ("/metrics", "HTTP", 200)]
    assert ":tensorflow:serving:request_count{" not in text


def test_a_rotated_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AccessLog(str(path))
    log.finish(record())
    while not path.read_bytes():
        time.sleep(0.001)
    path.rename(tmp_path / "log.1")
    log.finish(record())
    log.close()
    assert len(path.read_text().splitlines()) == len((tmp_path / "log.1").read_text().splitlines()) == 1


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    log = AccessLog(str(tmp_path / "log"))
    log.finish(record())
    log.close()
    assert (tmp_path / "log").read_text().startswith("before\n{")


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with refused(ServingError):
        check_telemetry(TelemetrySettings(access_log=str(tmp_path / "none" / "log")))


def test_a_disk_that_fills_up_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full")
    log.finish(record())
    log.finish(record())
    log.close()
    assert "the access log cannot be written: [Errno 28] No space left on device" in caplog.text


def test_a_folder_that_is_removed_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "log"
    log = AccessLog(str(path))
    path.unlink()
    path.parent.rmdir()
    for _ in range(2):
        log.finish(record())
    wait_for(lambda: "No such file or directory" in caplog.text)
    path.parent.mkdir()
    log.finish(record())
    log.close()
    assert caplog.text.count("the access log cannot be written") == 1
    assert path.read_text().count("\n") >= 1


def test_dropped_records_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.telemetry.access_log._MOST_WAITING", 0)
    log = AccessLog(str(tmp_path / "log"))
    for _ in range(3):
        log.finish(record())
    monkeypatch.undo()
    log.finish(record())
    log.close()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert json.loads(first)["status"] == "NOT_FOUND"
    assert json.loads(second).keys() == {"time", "dropped"}
    assert json.loads(second)["dropped"] == 3
