"""`tpuembed serve` as a command: what it refuses, how it starts, how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_zoo
from tests.support.serving.process import ServerProcess, run_command


def test_a_missing_model_dir(tmp_path: Path) -> None:
    result = run_command("serve", tmp_path / "none")
    assert result.returncode == 1
    said(result.stderr)


def test_a_file_for_a_model_dir(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_command("serve", tmp_path / "file")
    assert result.returncode == 1
    said(result.stderr)


def test_a_version_for_a_model_dir(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    result = run_command("serve", tmp_path)
    assert result.returncode == 1
    said(result.stderr)


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command("serve", tmp_path, "--rest-port", str(port))
    assert result.returncode == 1
    assert f"port {port}" in result.stderr
    said(result.stderr)


def test_a_host_that_is_none(tmp_path: Path) -> None:
    result = run_command("serve", tmp_path, "--host", "no.such.host.invalid", "--rest-port", "0")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: cannot listen on no.such.host.invalid port 0: ")


@pytest.mark.parametrize(
    "options",
    [
        ("--rest-port", "-1"), ("--rest-port", "70000"), ("--workers", "0"), ("--poll-seconds", "0"),
        ("--rest-timeout-ms", "-5"), ("--run-threads", "0"), ("--max-body-bytes", "0"), ("--zzzz", "1"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2(tmp_path: Path, options: tuple[str, str]) -> None:
    result = run_command("serve", tmp_path, *options)
    assert result.returncode == 2
    said(result.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("DIR", "--config", "models.config"),
        ("DIR", "--config-poll-seconds", "1"),
        ("--config", "models.config", "--name", "m"),
    ],
)
def test_a_folder_and_a_config_exclude_each_other(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_command("serve", *(str(tmp_path) if one == "DIR" else one for one in arguments))
    assert result.returncode == 2
    said(result.stderr)


def test_a_config_that_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    result = run_command("serve", "--config", path)
    assert result.returncode == 1
    said(result.stderr)
    path.write_text('model_config_list {\n  config { name: "m" basepath: "/m" }\n}', encoding="utf-8")
    result = run_command("serve", "--config", path)
    assert result.returncode == 1
    said(result.stderr)
    missing = tmp_path / "missing"
    path.write_text(
        f'model_config_list {{ config {{ name: "m" base_path: "{missing}" model_platform: "tensorflow" }} }}',
        encoding="utf-8",
    )
    said(run_command("serve", "--config", path).stderr)


@pytest.mark.nightly
def test_it_starts_empty_and_a_stop_finishes_the_request_in_progress(tmp_path: Path) -> None:
    model_dir = tmp_path / "by_this_name"
    (model_dir / "ranker" / "1").mkdir(parents=True)
    (model_dir / "ranker" / "1" / "saved_model.pb").touch()
    with ServerProcess(model_dir, tmp_path / "server.log", "--name", "a model", fresh=True) as server:
        assert server.model_url.endswith("/v1/models/a%20model")
        assert server.request("GET", "/healthz")[0] == 200
        assert (
            f"model a model: {model_dir} has no version yet. Waiting for one. {model_dir}/ranker has a version"
            in server.log
        )
        assert server.request("GET", "/readyz")[0] == 503
        wait_for(lambda: server.predict({"instances": [1]})[0] == 404)  # the first look at the folder is over
        assert server.predict({"instances": [1]}) == (
            404,
            {"error": "Servable not found for request: Latest(a model)"},
        )
        save_zoo(model_dir / ".staging")
        (model_dir / ".staging").rename(model_dir / "1")
        server.wait_for(1)
        answers: list[Any] = []
        body = {"signature_name": "slow", "instances": [500_000]}
        asking = threading.Thread(target=lambda: answers.append(server.predict(body)))
        asking.start()
        asking.join(0.1)
        assert asking.is_alive(), "the request is too quick to be interrupted"
        assert server.stop() == 0
        asking.join()
        assert answers == [(200, {"predictions": [500_000]})]
        assert "Traceback" not in server.log


STOPPED_IN_A_CALLBACK = """
import signal, sys, weakref
from pathlib import Path
import tpuembed_serving.server as server
from tpuembed_serving import ServerSettings
class Thing: pass
real = server.create_app
def create_app(settings, **options):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    return real(settings, **options)
server.create_app = create_app
server.serve(ServerSettings.for_model_dir(Path(sys.argv[1]), rest_port=0))
"""


def test_a_stop_where_python_ignores_exceptions(tmp_path: Path) -> None:
    """Every import runs weak references' callbacks, and what a signal's handler raises there is lost."""
    command = [sys.executable, "-c", STOPPED_IN_A_CALLBACK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_stop_right_after_the_start(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, tmp_path.with_name(f"{tmp_path.name}.log"), fresh=True) as server:
        assert server.stop() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [None, "1"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_onednn_is_off_unless_it_is_asked_for(
    workers: str, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow says so where it is on and its log is not silenced."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if asked is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", asked)
    save_zoo(tmp_path / "zoo" / "1")
    with ServerProcess(tmp_path / "zoo", tmp_path / "log", "--workers", workers, fresh=True) as server:
        server.wait_for(1)
        assert "TensorFlow" in server.log  # its notes are there
        assert ("oneDNN custom operations are on" in server.log) == (asked is not None)


@pytest.mark.nightly
def test_a_run_that_does_not_end_does_not_keep_the_process(tmp_path: Path) -> None:
    """It has the drain and ten seconds more. The version is closed, which cancels the run; else SIGALRM ends the process."""
    save_zoo(tmp_path / "zoo" / "1")
    options = ("--drain-seconds", "1", "--rest-timeout-ms", "600000")
    with ServerProcess(tmp_path / "zoo", tmp_path / "log", *options, fresh=True) as server:
        server.wait_for(1)
        with socket.create_connection((server.host, server.port)) as connection:
            body = b'{"signature_name": "slow", "instances": [1000000000000]}'
            connection.sendall(
                b"POST %s:predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s"
                % (server.path.encode(), len(body), body)
            )
            busy = processor_seconds(server) + 1
            wait_for(lambda: processor_seconds(server) > busy)
            assert server.stop() in (0, -signal.SIGALRM)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"the server is stopping. Send this request to another server" in answer


def processor_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
