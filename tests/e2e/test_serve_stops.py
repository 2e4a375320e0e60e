"""Stops and restarts of real servers under load, of one process and of two: nothing that was accepted goes without an answer."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.contract_load import Clients
from tests.support.contract_serve import Server
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import SCRIPT, ServerProcess

CLIENTS = 16
BODY = b'{"instances": [1.0, 2.0]}'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stops") / "scale"
    save_scale(folder / "1", 1.0)
    return folder


@pytest.mark.nightly
def test_a_stop_in_the_middle_of_the_load(model_dir: Path, tmp_path: Path) -> None:
    """SIGINT: no lame duck, and the supervisor's workers hear of it from it alone."""
    options = ("--workers", "2", "--lame-duck-seconds", "50")
    with Server(model_dir, tmp_path / "log", *options) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        with Clients(server, "scale", rest=CLIENTS) as clients:
            wait_for(lambda: clients.answered > 500)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(40) == 0
            assert time.monotonic() - began < 30
            clients.join()
        assert clients.lost == {}
        assert "Traceback" not in server.log


@pytest.mark.parametrize("workers", [2])
@pytest.mark.nightly
def test_a_server_starts_again_at_once_on_the_same_ports(tmp_path: Path, workers: int) -> None:
    """Connections of the first are in TIME_WAIT."""
    (tmp_path / "empty").mkdir()
    ports: tuple[str, ...] = ("--grpc-port", "0")
    for number in range(2):
        options = ("--workers", str(workers), "--lame-duck-seconds", "0", *ports)
        with ServerProcess(tmp_path / "empty", tmp_path / f"log-{number}", *options, fresh=True) as server:
            wait_for(lambda: server.request("GET", "/healthz")[0] == 200)
            rest, grpc_port = str(server.port), server.grpc_address.rpartition(":")[2]
            ports = ("--rest-port", rest, "--grpc-port", grpc_port)
            connections = [server.connect() for _ in range(CLIENTS)]
            channels = [grpc.insecure_channel(server.grpc_address, [("grpc.channel_id", n)]) for n in range(CLIENTS)]
            for connection, channel in zip(connections, channels, strict=True):
                connection.request("GET", "/healthz")
                assert connection.getresponse().read()
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert server.stop() == 0
            for one in (*connections, *channels):
                one.close()
    assert in_time_wait(int(rest)) > 0, "the test shows nothing where no connection is left"


def in_time_wait(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "06" for line in lines)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(), ("--workers", "2"), ("--listen-when-loaded",)])
def test_one_port_for_two_servers(tmp_path: Path, options: tuple[str, ...]) -> None:
    """From the first moment, before models are loaded, whatever the two are."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "empty").mkdir()
    commands = [
        [str(SCRIPT), "serve", str(tmp_path / "empty"), "--rest-port", str(port), "--no-grpc", *more]
        for more in (options, ("--workers", "2"), ("--listen-when-loaded",), ())
    ]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        wait_for(lambda: sum(one.poll() is not None for one in running) == 3)
        for one in running:
            if one.poll() is not None:
                assert one.stderr is not None
                text = f"Error: cannot listen on 127.0.0.1 port {port}: Address already in use. Choose another port"
                assert one.stderr.read().startswith(text)
    finally:
        for one in running:
            one.send_signal(signal.SIGINT)
        for one in running:
            one.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model_dir, tmp_path_factory.mktemp("upgrades") / "log") as running:
        wait_for(lambda: running.request("GET", "/readyz")[0] == 200)
        yield running
        running.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    "options", [("--http2",), ("--http2", "--expect100-timeout", "5", "-H", "Expect: 100-continue")]
)
def test_curl_that_asks_for_http_2(server: ServerProcess, options: tuple[str, ...]) -> None:
    """Two requests over one connection."""
    url = f"{server.model_url}:predict"
    command = ["curl", "-sS", *options, "-d", BODY.decode(), url, url, "-w", "%{http_code} %{num_connects}\n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count('"predictions":[1.0,2.0]') == 2, done
    assert done.stdout.count("200 1\n") == 1
    assert done.stdout.count("200 0\n") == 1
