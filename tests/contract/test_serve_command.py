"""`tpuembed serve` as a command: its start, its options and variables, what it refuses, and its stop."""

import concurrent.futures
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.contract_load import Clients
from tests.support.contract_serve import Server, eventually
from tests.support.serving.models import save_scale, save_zoo
from tests.support.serving.process import run_command

VARIABLES = {
    "REST_PORT": "0", "GRPC_PORT": "0", "POLL_SECONDS": "0.05", "LAME_DUCK_SECONDS": "0.5", "KEEP_VERSIONS": "7",
    "METRICS": "0",
}  # fmt: skip
"""Options of the server, and a variable over which a flag wins."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a version, and beside it the versions that tests publish."""
    folder = tmp_path_factory.mktemp("command")
    save_scale(folder / "1", 1.0)
    save_zoo(folder / "2")
    (folder / "by_this_name" / "ranker" / "1").mkdir(parents=True)
    (folder / "by_this_name" / "ranker" / "1" / "saved_model.pb").touch()
    return folder / "by_this_name"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    variables = {f"TPUEMBED_SERVE_{name}": value for name, value in VARIABLES.items()}
    options = (str(model_dir), "--keep-versions", "1")
    with Server(None, model_dir.with_name("log"), *options, variables=variables, bare=True) as running:
        yield running


def publish(model_dir: Path, version: int) -> None:
    shutil.move(model_dir.with_name(str(version)), model_dir / str(version))


def test_without_a_version_it_is_not_ready(server: Server, model_dir: Path) -> None:
    text = f"{model_dir} has no version yet. Waiting for one. {model_dir}/ranker has a version"
    assert f"model by_this_name: {text}" in server.log
    assert server.get("/readyz").status == 503
    eventually(lambda: server.post("by_this_name:predict", {"instances": [1.0]}).status == 404)
    assert server.get("/v1/models/by_this_name").status == 404


def test_it_is_ready_once_a_version_is_there(server: Server, model_dir: Path) -> None:
    """The model has the folder's name. Port 0 picks free ports, and the log has them."""
    publish(model_dir, 1)
    eventually(server.is_ready)
    (status,) = server.get("/v1/models/by_this_name").value["model_version_status"]
    assert (status["version"], status["state"]) == ("1", "AVAILABLE")
    assert server.post("by_this_name:predict", {"instances": [3.0]}).value == {"predictions": [3.0]}
    for port in (str(server.port), server.grpc_address.rpartition(":")[2]):
        assert int(port) > 0
        assert f":{port}" in server.log


def test_a_flag_wins_over_its_variable(server: Server, model_dir: Path) -> None:
    """TPUEMBED_SERVE_KEEP_VERSIONS is 7, and --keep-versions 1."""
    publish(model_dir, 2)
    server.wait_for(2)
    server.wait_for(1, "END")


def test_it_can_be_asked_on_its_own_machine_only(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 10)


def test_a_request_in_progress_is_answered_in_a_stop(server: Server, model_dir: Path) -> None:
    """SIGTERM: not ready at once, still answering in the lame duck, then the port is closed, the rest is answered, exit 0."""
    body = {"signature_name": "slow", "instances": [100_000]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "by_this_name:predict", body)
        assert server.post("by_this_name:predict", {"instances": [[1, 2]]}).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert not answer.done(), "the request is too quick to be interrupted"
        eventually(lambda: server.get("/readyz").status == 503)
        assert server.post("by_this_name:predict", {"instances": [[1, 2]]}).status == 200
        assert server.process.wait(60) == 0
        assert (answer.result().status, answer.result().value) == (200, {"predictions": [100_000]})
    with pytest.raises(ConnectionRefusedError):
        server.get("/readyz")
    assert "Traceback" not in server.log


def test_a_stop_loses_no_request(tmp_path: Path) -> None:
    """Never over REST. gRPC holds answers for a tenth of a second, so that clients hear of the stop before their next call.

    On a machine with much other work that may be too short, so the test has three tries.
    """
    save_scale(tmp_path / "scale" / "1", 1.0)
    for _ in range(3):
        with Server(tmp_path / "scale", tmp_path / "log", "--lame-duck-seconds", "0.5") as own:
            eventually(own.is_ready)
            with Clients(own, "scale", rest=8, grpc=8) as clients:
                eventually(lambda clients=clients: clients.have_all(20))  # type: ignore[misc]
                own.process.send_signal(signal.SIGTERM)
                assert own.process.wait(60) == 0
                clients.join()
        assert [what for what in clients.lost if what.startswith("REST")] == []
        assert clients.refused == 16
        if not clients.lost:
            break
    assert clients.lost == {}


# ---- options

OPTIONS = """
    name host rest-port grpc-port no-grpc config config-poll-seconds workers keep-versions poll-seconds cache-dir default-model
    lame-duck-seconds drain-seconds receive-seconds max-body-bytes max-request-memory max-queued-requests enable-batching
    disable-batching batching-parameters-file lookups run-threads metrics access-log log-format otel api-key-file tls-cert
    tls-key tls-client-ca enable-cors target verbose quiet
"""


def test_help_has_the_options() -> None:
    result = run_command("serve", "--help")
    assert result.returncode == 0
    assert [name for name in OPTIONS.split() if f"--{name}" not in result.stdout] == []


BAD_USAGE = """
DIR --rest-port -1
DIR --grpc-port 70000
DIR --no-grpc --grpc-port 1
DIR --workers 0
DIR --poll-seconds 0
DIR --keep-versions 0
DIR --max-body-bytes 0
DIR --max-request-memory much
DIR --lookups fast
DIR --tls-cert cert.pem
DIR --no-such-option
DIR OTHER
DIR --config models.config
--config models.config --name m

"""


def test_bad_usage_exits_2(tmp_path: Path) -> None:
    for line in BAD_USAGE.split("\n")[1:-1]:
        result = run_command("serve", *line.replace("DIR", str(tmp_path)).split())
        assert result.returncode == 2, (line, result.stderr)
        assert result.stdout == ""
        assert "Error: " in result.stderr
        assert "Traceback" not in result.stderr


def test_a_bad_variable_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUEMBED_SERVE_WORKERS", "0")
    result = run_command("serve", tmp_path)
    assert result.returncode == 2
    assert "--workers" in result.stderr
    assert "TPUEMBED_SERVE_WORKERS" in result.stderr


def test_what_cannot_be_served_exits_1_with_one_line(tmp_path: Path) -> None:
    """A folder that is missing, a file, a port in use, a key file that is missing, and a config with a mistake."""
    (tmp_path / "m").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "models.config").write_text('model_config_list { config { name: "m" basepath: "/m" } }')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, word in {
            "none": "none",
            "file": "file",
            f"m --rest-port {port}": port,
            f"m --rest-port 0 --grpc-port {port}": port,
            "m --rest-port 0 --api-key-file absent": "absent",
            "m --rest-port 0 --access-log absent/log": "access log absent/log: cannot be written",
            "--config absent": "absent",
            "--config models.config": "basepath",
        }.items():
            paths = [str(tmp_path / one) if "." in one or one.isalpha() else one for one in arguments.split()]
            result = run_command("serve", *paths)
            assert result.returncode == 1, (arguments, result.stderr)
            assert result.stdout == ""
            lines = result.stderr.splitlines()
            assert len(lines) <= 5
            assert lines[0].startswith("Error: ")
            assert word in result.stderr
            assert "Traceback" not in result.stderr
