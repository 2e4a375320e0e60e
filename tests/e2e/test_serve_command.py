"""`tpuembed serve` as a command: what it refuses, how it starts, how it ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_zoo
from tests.support.serving.process import ServerProcess, run_command


def test_a_version_for_a_model_dir(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    result = run_command("serve", tmp_path)
    assert result.returncode == 1
    said(result.stderr)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 64])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    result = run_command("serve", tmp_path, "--host", host, "--rest-port", "0")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: cannot listen on {host} port 0: ")


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
