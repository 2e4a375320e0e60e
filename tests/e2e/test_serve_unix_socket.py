"""A real server whose gRPC also listens on a Unix socket: a stop under load, paths that are refused, keys."""

import collections
import signal
import threading
from pathlib import Path

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess, run_command

CLIENTS = 6
CLOSED = ("No such file or directory", "Connection refused", "sendmsg: Broken pipe")
"""The last one is of a call that a slow client wrote after the end: it never reached the server."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unix") / "scale"
    save_scale(folder / "1", 2.0)
    return folder


def request() -> bytes:
    message = predict_pb2.PredictRequest()
    message.model_spec.name = "scale"
    message.inputs["x"].CopyFrom(tf.make_tensor_proto([1.0, 2.0], tf.float32))
    return bytes(message.SerializeToString())


def call_until_closed(target: str, counter: "collections.Counter[str]", calls_of_a_connection: int) -> None:
    """One call after another, until the path is closed. What was lost is counted by its error."""
    data = request()
    options = [("grpc.use_local_subchannel_pool", 1)]
    while True:
        with grpc.insecure_channel(target, options=options) as channel:
            predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
            for _ in range(calls_of_a_connection):
                try:
                    predict(data, timeout=30)
                except grpc.RpcError as error:
                    closed = error.code() is grpc.StatusCode.UNAVAILABLE and any(
                        text in error.details() for text in CLOSED
                    )
                    counter["closed" if closed else f"lost: {error.code()} {error.details()}"] += 1
                    return
                counter["answered"] += 1


def test_a_stop_loses_no_call_of_the_socket(model_dir: Path, tmp_path: Path) -> None:
    """Half of the clients keep a connection, and half open a new one for every call."""
    path = tmp_path / "s"
    options = ("--grpc-port", "0", "--grpc-socket-path", str(path), "--lame-duck-seconds", "1")
    with ServerProcess(model_dir, tmp_path / "log", *options) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        assert server.announced("gRPC also at ") == f"unix:{path}"
        counters = [collections.Counter[str]() for _ in range(CLIENTS)]
        clients = [
            threading.Thread(target=call_until_closed, args=(f"unix:{path}", counter, 10**9 if number % 2 else 1))
            for number, counter in enumerate(counters)
        ]
        for client in clients:
            client.start()
        wait_for(lambda: all(counter["answered"] > 20 for counter in counters))
        before = [counter["answered"] for counter in counters]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        for client in clients:
            client.join(60)
        outcomes = sum(counters, collections.Counter[str]())
        assert {outcome: count for outcome, count in outcomes.items() if outcome.startswith("lost")} == {}
        assert outcomes["closed"] == CLIENTS
        assert all(counter["answered"] > count for counter, count in zip(counters, before, strict=True))
        assert list(tmp_path.glob("s*")) == []
        assert "Traceback" not in server.log


def test_a_path_that_cannot_be_used_ends_the_command_at_once(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    ended = run_command("serve", model_dir, "--rest-port", "0", "--grpc-port", "0", "--grpc-socket-path", path)
    assert ended.returncode == 1
    said(ended.stderr)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "options", [("--workers", "2"), ("--no-grpc",), ("--grpc-port", "0", "--grpc-channel-arguments", "age=1")]
)
def test_options_that_contradict_each_other(model_dir: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    ended = run_command("serve", model_dir, "--grpc-socket-path", tmp_path / "s", *options)
    assert ended.returncode == 2
    said(ended.stderr)


def test_keys_are_asked_for_on_the_socket_too(model_dir: Path, tmp_path: Path) -> None:
    path, key = tmp_path / "s", "k" * 32
    (tmp_path / "keys").write_text(f"{key}\n")
    options = ("--grpc-port", "0", "--grpc_socket_path", str(path), "--api-key-file", str(tmp_path / "keys"))
    with ServerProcess(model_dir, tmp_path / "log", *options, "--lame-duck-seconds", "0") as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
            with pytest.raises(grpc.RpcError) as caught:
                predict(request(), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert predict(request(), timeout=30, metadata=(("x-api-key", key),))
        assert server.stop() == 0
    assert not path.exists()
