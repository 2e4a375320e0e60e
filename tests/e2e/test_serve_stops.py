"""Stops and restarts of real servers under load, of one process and of two: nothing that was accepted goes without an answer."""

import collections
import http.client
import os
import shutil
import signal
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import predict_pb2

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


class ClosedLoop:
    """Sixteen clients, each with one request at a time, from `with` until the port is closed.

    `outcomes` counts what they were answered. What was lost is counted by its error: a request that was sent and not
    answered, or that met an error other than a closed port.
    """

    def __init__(self, server: ServerProcess, api: str) -> None:
        self._server = server
        self._outcomes = [collections.Counter[str]() for _ in range(CLIENTS)]
        client = self._rest if api == "rest" else self._grpc
        self._threads = [threading.Thread(target=client, args=(counter,)) for counter in self._outcomes]

    @property
    def outcomes(self) -> "collections.Counter[str]":
        return sum(self._outcomes, collections.Counter[str]())

    def __enter__(self) -> "ClosedLoop":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _rest(self, counter: "collections.Counter[str]") -> None:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=30)
        while True:
            if connection.sock is None:
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    counter["refused"] += 1
                    return
            try:
                connection.request("POST", f"{self._server.path}:predict", BODY)
                reply = connection.getresponse()
                counter["answered" if reply.read() and reply.status == 200 else f"lost: {reply.status}"] += 1
                counter["last of its connection"] += reply.will_close
            except (OSError, http.client.HTTPException) as error:
                counter[f"lost: {error!r}"] += 1
                return

    def _grpc(self, counter: "collections.Counter[str]") -> None:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = self._server.path.rpartition("/")[2]
        request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.0, 2.0], tf.float32))
        data = request.SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self._server.grpc_address, options=options) as channel:
            predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
            while True:
                try:
                    predict(data, timeout=30)
                except grpc.RpcError as error:
                    refused = error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in error.details()
                    counter["refused" if refused else f"lost: {error.code()} {error.details()}"] += 1
                    return
                counter["answered"] += 1


def stop_under_load(model_dir: Path, log: Path, api: str, workers: int, lame_duck_seconds: float) -> None:
    options = ["--workers", str(workers), "--lame-duck-seconds", str(lame_duck_seconds)]
    options += ["--grpc-port", "0"] if api == "grpc" else []
    with ServerProcess(model_dir, log, *options, fresh=True) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        with ClosedLoop(server, api) as load:
            wait_for(lambda: load.outcomes["answered"] > 500)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            took = time.monotonic() - began
        outcomes = load.outcomes
        print(f"{api}, {workers} workers: stopped in {took:.2f} s, {dict(outcomes)}")
        lost = {outcome: count for outcome, count in outcomes.items() if outcome.startswith("lost")}
        assert lost == {}
        assert outcomes["refused"] == CLIENTS
        assert lame_duck_seconds <= took < lame_duck_seconds + 20
        assert "Traceback" not in server.log
        assert "is killed" not in server.log
        if api == "rest":
            assert outcomes["last of its connection"] >= CLIENTS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("api", ["rest", "grpc"])
def test_a_stop_loses_no_request(model_dir: Path, tmp_path: Path, api: str, workers: int) -> None:
    stop_under_load(model_dir, tmp_path / "log", api, workers, 0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("api", ["rest", "grpc"])
def test_ten_stops_lose_no_request(model_dir: Path, tmp_path: Path, api: str, workers: int) -> None:
    for number in range(10):
        stop_under_load(model_dir, tmp_path / f"log-{number}", api, workers, 1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [2])
def test_a_stop_in_the_middle_of_the_load(model_dir: Path, tmp_path: Path, workers: int) -> None:
    """SIGINT: no lame duck, and the supervisor's workers hear of it from it alone."""
    options = ("--workers", str(workers), "--lame-duck-seconds", "50")
    with ServerProcess(model_dir, tmp_path / "log", *options, fresh=True) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        with ClosedLoop(server, "rest") as load:
            wait_for(lambda: load.outcomes["answered"] > 500)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(40) == 0
            assert time.monotonic() - began < 30
        outcomes = load.outcomes
        assert {outcome for outcome in outcomes if outcome.startswith("lost")} == set()
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


JAVA = """
    import java.net.URI;
    import java.net.http.*;
    public class Ask {
        public static void main(String[] arguments) throws Exception {
            HttpClient client = HttpClient.newHttpClient();
            for (int i = 0; i < 5; i++) {
                HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                    .POST(HttpRequest.BodyPublishers.ofString(arguments[1])).build();
                HttpResponse<String> reply = client.send(request, HttpResponse.BodyHandlers.ofString());
                System.out.println(reply.statusCode() + " " + reply.version() + reply.body().replace("\\n", ""));
            }
        }
    }
"""


@pytest.mark.skipif(shutil.which("javac") is None, reason="javac is not installed")
def test_java_http_client(server: ServerProcess, tmp_path: Path) -> None:
    """It asks for HTTP/2 by an upgrade, as it does by default."""
    (tmp_path / "Ask.java").write_text(textwrap.dedent(JAVA), encoding="utf-8")
    command = ["java", str(tmp_path / "Ask.java"), f"{server.model_url}:predict", BODY.decode()]
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": "-Xmx128m"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout.split("\n")[:-1] == ['200 HTTP_1_1{"predictions":[1.0,2.0]}'] * 5, done
