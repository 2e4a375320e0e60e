"""`tpuembed bench` against whole servers: its counts are the server's, its clients agree, and it leaves nothing running."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import SCRIPT, ServerProcess, run_command

pytestmark = pytest.mark.nightly

KEY = "the-key-of-this-test-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and recorded requests to it of 1, 2 and 3 rows."""
    place = tmp_path_factory.mktemp("bench")
    save_scale(place / "scale" / "1", 3.0)
    with tf.io.TFRecordWriter(str(place / "requests")) as writer:
        for rows in (1, 2, 3):
            request = predict_pb2.PredictRequest()
            request.model_spec.name, request.model_spec.signature_name = "other", "serving_default"
            request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.arange(rows, dtype=np.float32)))
            log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
            writer.write(log.SerializeToString())
    return place


def measured(*arguments: str) -> Any:
    found = run_command("bench", *arguments, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def answers(server: ServerProcess) -> int:
    state = json.loads(server.request("GET", "/console/state")[1])
    return sum(model["traffic"]["answers"] for model in state["models"] if model["traffic"])


@pytest.mark.parametrize("client", ["own", "wrk", "h2load"])
def test_its_count_is_the_servers(folder: Path, tmp_path: Path, client: str) -> None:
    """A rate of R in one second is R answers there, and some of the warm-up."""
    if client != "own" and shutil.which(client) is None:
        pytest.skip(f"{client} is not installed")
    with ServerProcess(folder / "scale", tmp_path / "log", "--grpc-port", "0") as server:
        server.wait_for(1)
        over_grpc = ("--model", "scale", "--requests", str(folder / "requests"), "--client", client)
        if client == "h2load":
            target: tuple[str, ...] = (f"grpc://{server.grpc_address}", *over_grpc)
        else:
            target = (server.model_url, "--requests", str(folder / "requests"), "--client", client)
        found = measured(*target, "--concurrency", "3", "--duration", "1", "--rounds", "1")
        total = answers(server)
        if client == "own":
            before = total
            again = measured(f"grpc://{server.grpc_address}", *over_grpc, "--duration", "1", "--rounds", "1")
            assert again["rows_per_request"] == 2
            assert answers(server) - before > again["measurements"][0]["requests_per_second"]
    (one,) = found["measurements"]
    assert found["client"] == client
    assert found["rows_per_request"] == (1 if client == "h2load" else 2)
    assert one["rows_per_second"] == pytest.approx(one["requests_per_second"] * found["rows_per_request"])
    assert one["requests_per_second"] < total < 40 * one["requests_per_second"] + 1000
    assert 0 < one["p50_ms"] <= one["p99_ms"]
    assert found["best"] is None


@pytest.mark.parametrize("client", ["own", "wrk"])
def test_bodies_are_sent_as_they_are(tmp_path: Path, client: str) -> None:
    if client != "own" and shutil.which(client) is None:
        pytest.skip(f"{client} is not installed")
    body = '{"instances": ["日本\\n \\u0000 \\"é\\" ]] 1\x7f"]}'.encode()
    (tmp_path / "body").write_bytes(body)
    taken: set[tuple[str, str, bytes]] = set()

    class Taker(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client ends in the middle of a request
                super().handle()

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            taken.add((self.path, self.headers["Host"], content))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6
        daemon_threads = True

    with Server(("::1", 0), Taker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"[::1]:{server.server_port}"
        url = f"http://{address}/v1/models/m"
        load = ("--concurrency", "2", "--duration", "1", "--rounds", "1", "--client", client)
        measured(url, "--requests", str(tmp_path / "body"), *load)
        server.shutdown()
    assert taken == {("/v1/models/m:predict", address, body)}


def test_the_example_of_a_server_with_a_key(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with ServerProcess(folder / "scale", tmp_path / "log", "--api-key-file", str(tmp_path / "keys")) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        url = f"http://{server.host}:{server.port}"
        load = ("--concurrency", "2", "--duration", "1", "--rounds", "1", "--client", "own")
        found = measured(url, "--api-key-file", str(tmp_path / "keys"), *load)
        assert found["requests"] == "the server's example request"
        refused = run_command("bench", url, *load)
        (tmp_path / "body").write_text('{"instances": ["no number"]}')
        wrong = run_command(
            "bench", server.model_url, "--requests", str(tmp_path / "body"), "--api-key-file", str(tmp_path / "keys")
        )
    assert refused.returncode == wrong.returncode == 1
    for command in (refused, wrong):
        said(command.stderr.replace(str(server.port), "PORT"))


def test_settings_of_a_folder_are_tried(folder: Path) -> None:
    load = ("--concurrency", "1,4", "--duration", "1", "--rounds", "1", "--workers", "1", "--max-batch-rows", "512,64")
    found = measured(str(folder / "scale"), *load)
    tried = [(one["workers"], one["max_batch_rows"], one["concurrency"]) for one in found["measurements"]]
    assert tried[:2] == [(1, 512, 1), (1, 512, 4)]
    assert [one[:2] for one in tried[2:]] == [(1, 64)]
    assert found["best"]["workers"] == 1
    assert all(one["server_processors"] > 0 for one in found["measurements"])


def test_a_folder_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "saved_model.pb").write_bytes(b"no model")
    found = run_command("bench", tmp_path / "m")
    assert found.returncode == 1
    assert "did not become ready" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_no_process(folder: Path, number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "bench", str(folder / "scale"), "--duration", "60", "--workers", "1"]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, start_new_session=True)
    try:
        wait_for(lambda: "client:" in (tmp_path / "log").read_text())
        children = descendants(process.pid)
        assert children
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(60) != 0
        wait_for(lambda: not any(map(is_alive, children)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:  # grows
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, thread.read_text().split())
    return found[1:]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
