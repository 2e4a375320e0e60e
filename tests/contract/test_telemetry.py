"""The access log and the metrics of a server, against what was asked of it; and what becomes of the log's file."""

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.served import BODY, Served
from tpuembed_serving import TelemetrySettings
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings

KEY = "the-key-of-this-test-0123456789"
PREDICT = "/v1/models/m:predict"
COUNT = ":tensorflow:serving:request_count"
FULL = "the access log cannot be written: "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@contextlib.contextmanager
def serving(folder: Path, patch: pytest.MonkeyPatch, log: Path | str = "", **options: Any) -> Iterator[Served]:
    telemetry = TelemetrySettings(metrics_path="/metrics", access_log=str(log or folder / "logs" / "log"))
    with Served(folder, patch, lambda _: DoublingServable(), telemetry=telemetry, **options) as running:
        wait_for(lambda: running.is_ready)
        yield running


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(folder, monkeypatch) as running:
        yield running


def entries(folder: Path, count: int) -> list[dict[str, Any]]:
    """The entries of the log, once there are so many."""
    file = folder / "logs" / "log"
    wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") >= count)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_request_without_a_name_gets_one(server: Served, folder: Path) -> None:
    shown = [
        server.send("GET", "/v1/models/m", x_request_id=name).headers["x-request-id"] for name in ("", "a b", "x" * 200)
    ]
    assert [line["request_id"] for line in entries(folder, 3)] == shown
    assert len(set(shown)) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in shown)


def test_a_name_cannot_break_a_line(server: Served, folder: Path) -> None:
    """Some readers end lines at U+0085, U+2028 and U+2029 too."""
    name = 'a"\\\n{}\x7f\x85\u2028\u2029\xe9'
    assert server.send("POST", f"/v1/models/{urllib.parse.quote(name)}:predict", BODY).status == 404
    (line,) = entries(folder, 1)
    assert line["model"] == name
    assert (folder / "logs" / "log").read_text().isascii()


def test_pages_and_refusals_have_lines_and_health_checks_have_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the access log sees them: TensorFlow Serving's metrics count no pages. Keys are counted by their names."""
    (folder / "keys").write_text(f"team: {KEY}\n{KEY}-2\n")
    security = SecuritySettings(api_keys=ApiKeys.read(folder / "keys"))
    with serving(folder, monkeypatch, security=security) as server:
        key = {"x_api_key": KEY}
        assert server.send("POST", PREDICT, BODY).status == 401
        assert server.send("GET", "/none", **key).status == 404
        assert server.send("GET", "/healthz").status == 200
        text = server.send("GET", "/metrics", **key).body.decode()
        assert f"{COUNT}{{" not in text
        for name in (KEY, f"{KEY}-2", f"{KEY}-2"):
            assert server.send("POST", PREDICT, BODY, x_api_key=name).status == 200
        text = server.send("GET", "/metrics", **key).body.decode()
        found = re.findall(r'^:tpuembed:serving:api_key_request_count\{key="(\w*)"\} (\d+)', text, re.MULTILINE)
        assert dict(found).keys() == {"", "team", "unnamed"}
        assert dict(found)["unnamed"] == "2"
    lines = [(line["path"], line["entrypoint"], line["status"]) for line in entries(folder, 3)]
    assert lines[:3] == [(PREDICT, "HTTP", 401), ("/none", "HTTP", 404), ("/metrics", "HTTP", 200)]


def test_the_file_is_appended_to_and_made_again_after_a_rotation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "logs" / "log"
    file.write_text('{"before": 1}\n')
    with serving(folder, monkeypatch) as server:
        server.send("POST", PREDICT, BODY)
        assert entries(folder, 2)[0] == {"before": 1}
        file.rename(folder / "logs" / "log.1")
        server.send("POST", PREDICT, BODY)
        assert len(entries(folder, 1)) == 1
        assert len((folder / "logs" / "log.1").read_text().splitlines()) == 2


def test_a_folder_that_is_removed_stops_nobody(server: Served, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "logs" / "log").unlink()
    (folder / "logs").rmdir()
    for _ in range(2):
        assert server.send("POST", PREDICT, BODY).status == 200
    wait_for(lambda: "No such file or directory" in caplog.text)
    (folder / "logs").mkdir()
    assert server.send("POST", PREDICT, BODY).status == 200
    assert entries(folder, 1)
    assert caplog.text.count(FULL) == 1


def test_a_disk_that_is_full_stops_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(folder, monkeypatch, "/dev/full") as server:
        for _ in range(2):
            assert server.send("POST", PREDICT, BODY).status == 200
        wait_for(lambda: f"{FULL}[Errno 28] No space left on device" in caplog.messages)
    assert caplog.text.count(FULL) == 1


def test_dropped_records_are_counted(server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tpuembed_serving.telemetry.access_log._MOST_WAITING", 0)
        for _ in range(3):
            server.send("POST", PREDICT, BODY)
    server.send("POST", PREDICT, BODY)
    first, second = entries(folder, 2)
    assert first["status"] == 200
    assert (sorted(second), second["dropped"]) == (["dropped", "time"], 3)


# ---- metrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(server: Served) -> Samples:
    """(name, labels) -> value, by the parser of Prometheus' own client, which calls each counter `_total`."""
    page = server.send("GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    text, found = page.body.decode(), Samples()
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert [family.name for family in families if len(family.documentation) < 3] == []
    for sample in (sample for family in families for sample in family.samples):
        bare = sample.name.removesuffix("_total")
        name = bare if f"# TYPE {bare} counter\n" in text else sample.name
        found[name, frozenset(sample.labels.items())] = sample.value
    return found


def test_what_clients_did_is_on_the_page(server: Served, folder: Path) -> None:
    odd = ('a"b', "a\\b", "a\nb", "\u00e9{}")
    for body in ({"instances": [1, 2, 3]}, {"instances": [1]}, "{"):
        server.send("POST", PREDICT, body)
    for name in odd:
        server.send("POST", f"/v1/models/{urllib.parse.quote(name)}:predict", BODY)
    server.send("GET", "/v1/models/m")
    found = samples(server)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value(COUNT, model_name="m", status="OK") == 3
    assert value(COUNT, model_name="m", status="INVALID_ARGUMENT") == 1
    assert [value(COUNT, model_name=name, status="NOT_FOUND") for name in odd] == [1] * 4
    latency, batching = ":tensorflow:serving:request_latency_count", ":tensorflow:serving:batching_session"
    assert value(latency, model_name="m", API="predict", entrypoint="REST") == 2
    assert value(latency, model_name="m", API="", entrypoint="REST") == 1
    assert value(f"{batching}:wrapped_run_count") == 2
    assert value(f"{batching}:queuing_latency_count", thread_pool_name="model-run") == 2
    assert value(":tpuembed:serving:run_rows_sum") == 4
    assert value(":tpuembed:serving:run_requests_count") == 2
    assert value(":tpuembed:serving:queue_depth") == 0
    assert value(":tpuembed:serving:stage_latency_count", model_name="m", version="1", stage="run") == 2
    loads = ":tensorflow:cc:saved_model:load_attempt_count"
    assert value(loads, model_path=str(folder / "m" / "1"), status="success") == 1
    assert value(":tensorflow:cc:saved_model:load_latency", model_path=str(folder / "m" / "1")) > 0


def test_names_that_clients_make_up_do_not_fill_the_memory(server: Served) -> None:
    with contextlib.closing(server.connect()) as connection:
        for index in range(1500):
            connection.request("POST", f"/v1/models/m{index}:predict", BODY)
            assert connection.getresponse().read()
    counts = {dict(labels)["model_name"]: count for (name, labels), count in samples(server).items() if name == COUNT}
    assert (len(counts), counts["(others)"]) == (1001, 500)
