"""A stop: the lame duck, what signals make of it, and what happens to connections and calls."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.served import BODY, PREDICT, Served, predict_request
from tpuembed_serving.core.servable import Merging, Signature

REQUEST = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
BY_ASGI = REQUEST.replace(b"host: s", b"host: s\r\nconnection: x")
GOOD = (200, {"predictions": [2, 4]})


class Client:
    """One connection, whose requests are sent and answered one by one; all are closed at the end of a test."""

    opened: ClassVar[list["Client"]] = []

    def __init__(self, served: Served) -> None:
        self.socket = socket.create_connection(("127.0.0.1", served.port), 30)
        self._reader = self.socket.makefile("rb")
        self.opened.append(self)

    def send(self, data: bytes = REQUEST) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, Any, bool]:
        """Status, body, and whether the connection is closed after it."""
        status = int(self._reader.readline().split()[1])
        headers = dict(iter(lambda: self._reader.readline().rstrip().lower().partition(b": ")[::2], (b"", b"")))
        body = self._reader.read(int(headers[b"content-length"]))
        return status, json.loads(body), headers.get(b"connection") == b"close"

    def ask(self, data: bytes = REQUEST) -> tuple[int, Any, bool]:
        self.send(data)
        return self.answer()

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed it, and sent nothing before; waits."""
        return self._reader.read(1) == b""

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


class Blocking:
    """A model whose runs wait, once `blocks` is set, until they may go on."""

    def __init__(self) -> None:
        self.blocks = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Path) -> DoublingServable:
        return DoublingServable(self._run)

    def _run(self) -> None:
        if self.blocks:
            self.entered.set()
            assert self.go_on.wait(30)


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().close()


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    @contextlib.contextmanager
    def serving(load: Any = lambda _: DoublingServable(), **options: Any) -> Any:
        with Served(tmp_path, monkeypatch, load, **options) as served:
            wait_for(lambda: served.listens)
            wait_for(lambda: served.ask("GET", "/readyz")[0] == 200)
            yield served

    return serving


def test_the_lame_duck_answers_as_before_and_says_that_it_goes(serve: Serve) -> None:
    with serve(lame_duck_seconds=60.0) as served:
        old = [Client(served) for _ in range(3)]
        assert [client.ask() for client in old[:2]] == [(*GOOD, False)] * 2
        served.terminate()
        assert served.ask("GET", "/readyz") == (503, {"status": "stopping"})
        assert served.ask("GET", "/healthz")[0] == 200
        assert served.health("") == served.health("PredictionService") == served.health("m") == "NOT_SERVING"
        time.sleep(0.5)
        # Those that had requests, the one that had none, and a new one: one more answer each, and it says so.
        for client in [*old, Client(served)]:
            assert client.ask(BY_ASGI if client is old[0] else REQUEST) == (*GOOD, True)
            assert client.is_closed
            client.close()
        assert served.call() == ("OK", "")
        assert served.is_alive


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT,)]
)
def test_a_second_signal_and_sigint_end_the_lame_duck(serve: Serve, signals: tuple[int, ...]) -> None:
    """What is in progress is finished all the same."""
    model = Blocking()
    with serve(model, lame_duck_seconds=60.0) as served:
        model.blocks = True
        client = Client(served)
        client.send()
        assert model.entered.wait(20)
        for number in signals:
            served.stop.handle(number)
            time.sleep(0.2)
        wait_for(lambda: not served.listens, 10)
        assert served.is_alive
        model.go_on.set()
        assert client.answer() == (*GOOD, True)
        served.wait(10)


def test_what_has_connected_is_answered_though_it_was_not_accepted(serve: Serve) -> None:
    """Connections wait in the listening socket's queue while something keeps the event loop busy."""
    entered = threading.Event()

    class Busy(DoublingServable):
        def merging(self, signature: Signature) -> Merging | None:
            if not entered.is_set():
                entered.set()
                time.sleep(1.0)
            return None

    with serve(lambda _: Busy(), lame_duck_seconds=0.0) as served:
        first = Client(served)
        first.send()
        assert entered.wait(20)
        clients = [Client(served) for _ in range(30)]
        served.terminate()
        time.sleep(0.1)
        for client in [*clients[:20], *(Client(served) for _ in range(5))]:
            client.send()
        assert first.answer()[:2] == GOOD
        for client in clients[20:]:
            client.send()
        assert [client.answer() for client in Client.opened[1:]] == [(*GOOD, True)] * 35
        served.wait(20)


def test_a_request_that_comes_in_pieces_is_answered(serve: Serve) -> None:
    with serve(lame_duck_seconds=0.0) as served:
        client = Client(served)
        client.send(REQUEST[:30])
        served.terminate()
        wait_for(lambda: not served.listens)
        time.sleep(1.5)  # longer than silent connections have
        client.send(REQUEST[30:-3])
        time.sleep(0.2)
        client.send(REQUEST[-3:])
        assert client.answer() == (*GOOD, True)
        served.wait(10)


def test_connections_without_a_request_end_soon(serve: Serve) -> None:
    with serve(lame_duck_seconds=0.0) as served:
        used, fresh = Client(served), Client(served)
        assert used.ask() == (*GOOD, False)
        served.terminate()
        served.wait(5)
        assert used.is_closed
        assert fresh.is_closed


@pytest.mark.parametrize("request_bytes", [REQUEST, BY_ASGI, REQUEST[:-5], REQUEST[:20]])
def test_what_cannot_be_finished_in_time_is_answered_503(serve: Serve, request_bytes: bytes) -> None:
    model = Blocking()
    with serve(model, lame_duck_seconds=0.0, drain_seconds=1.0) as served:
        model.blocks = True
        client = Client(served)
        client.send(request_bytes)
        if len(request_bytes) >= len(REQUEST):
            assert model.entered.wait(20)
        served.terminate()
        text = "the server is stopping. Send this request to another server"
        assert client.answer() == (503, {"error": text}, True)
        assert client.is_closed
        model.go_on.set()


def test_calls_that_cannot_be_finished_in_time_are_unavailable(serve: Serve) -> None:
    model = Blocking()
    with serve(model, lame_duck_seconds=0.0, drain_seconds=1.0) as served, served.channel() as channel:
        model.blocks = True
        call = channel.unary_unary(PREDICT).future(predict_request(), timeout=30)
        assert model.entered.wait(20)
        served.terminate()
        text = "the server is stopping. Send this call to another server"
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, text)
        model.go_on.set()


def test_a_second_interrupt_cuts_off(serve: Serve) -> None:
    model = Blocking()
    with serve(model, lame_duck_seconds=60.0, drain_seconds=60.0) as served, served.channel() as channel:
        model.blocks = True
        client = Client(served)
        client.send()
        call = channel.unary_unary(PREDICT).future(predict_request(), timeout=30)
        assert model.entered.wait(20)
        time.sleep(0.2)
        served.stop.handle(signal.SIGINT)
        wait_for(lambda: not served.listens)
        served.stop.handle(signal.SIGINT)
        assert client.answer()[0] == 503
        served.wait(20)
        model.go_on.set()
        assert call.code() is not grpc.StatusCode.OK


def test_calls_in_progress_are_answered_and_new_ones_go_on_in_the_lame_duck(serve: Serve) -> None:
    model = Blocking()
    with serve(model, lame_duck_seconds=2.0) as served, served.channel() as channel:
        # `channel.subscribe` has a thread that fails if the channel is closed while it polls.
        state = channel._channel.check_connectivity_state
        predict = channel.unary_unary(PREDICT)
        predict(predict_request(), timeout=30)
        model.blocks = True
        call = predict.future(predict_request(), timeout=30)
        assert model.entered.wait(20)
        served.terminate()
        wait_for(lambda: state(False) == grpc.ChannelConnectivity.IDLE.value[0])  # GOAWAY was heard
        model.blocks = False
        predict(predict_request(), timeout=30)  # over a new connection
        assert not call.done()
        model.go_on.set()
        assert call.code() is grpc.StatusCode.OK
        served.wait(20)
        with pytest.raises(grpc.RpcError) as caught:
            predict(predict_request(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "refused" in caught.value.details()


def test_who_watches_health_hears_of_it_and_does_not_keep_the_server(serve: Serve) -> None:
    with serve(lame_duck_seconds=1.0) as served, served.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        served.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        served.wait(10)
