"""Requests that their connection answers without ASGI: over real sockets, beside the same requests by way of ASGI."""

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import DoublingServable, EchoServable, make_version, wait_for
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.servable import LoadedVersion
from tpuembed_serving.http import server as http_server
from tpuembed_serving.http.direct import DirectCycle, DirectPredict
from tpuembed_serving.http.endpoint import Reply
from tpuembed_serving.http.platforms import PlatformApi
from tpuembed_serving.settings import TelemetrySettings
from tpuembed_serving.workers.stopping import Stop

TARGET = "/v1/models/m:predict"
ROUTE = "/v1/endpoints/7:predict"
ANSWER = b'{"predictions":[2,4]}'
BODY = b'{"instances": [1, 2]}'


class Running:
    """A server of the double in a thread of its own, and how many requests went by ASGI."""

    def __init__(self, folder: Path, servable: DoublingServable, **options: Any) -> None:
        make_version(folder / "m", 1)
        options = {"max_body_bytes": 1_000_000, "drain_seconds": 10, "predict_route": ROUTE, **options}
        settings = ServerSettings.for_model_dir(folder / "m", **options)
        self.app = create_app(settings, load=lambda _: servable, load_first=True)
        self.by_asgi = 0
        counted: Any = self._count(self.app._http)
        self.app._http = counted
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.stop, listening = Stop(), threading.Event()
        arguments = (self.app, listener, self.stop, listening.set)
        self.thread = threading.Thread(target=http_server.run_app, args=arguments)
        self.thread.start()
        assert listening.wait(30)

    def _count(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*request: Any) -> Any:
            self.by_asgi += 1
            return answer(*request)

        return counted

    def close(self) -> None:
        self.stop.handle()
        self.thread.join(30)
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            yield connection

    @property
    def users(self) -> int:
        """Of the model's versions, now."""
        repository: Any = self.app.repository
        model: Any = repository._models["m"]
        return sum(version.users for version in model._versions.values())

    def raw(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """What a connection brings until the server closes it, once these were sent."""
        with socket.create_connection(("127.0.0.1", self.port), 20) as client:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause)
            found = b""
            while part := client.recv(1 << 16):
                found += part
        return found


class Gate:
    """What a run waits for."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.entered.release()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def servable(gate: Gate) -> DoublingServable:
    return DoublingServable(gate)


@pytest.fixture
def server(tmp_path: Path, servable: DoublingServable) -> Iterator[Running]:
    running = Running(tmp_path, servable)
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("direct"), DoublingServable())
    yield running
    running.close()


@pytest.fixture
def steady(shared_server: Running) -> Running:
    """One server for all tests that leave it as it was."""
    shared_server.by_asgi = 0
    return shared_server


def request(body: bytes = BODY, *headers: bytes, target: str = TARGET, version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (target.encode(), version), b"host: s", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answers(found: bytes) -> list[tuple[bytes, dict[bytes, bytes], bytes]]:
    """Status line, headers and body of each."""
    parts = []
    while found:
        head, _, found = found.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        size = int(headers[b"content-length"])
        parts.append((status, headers, found[:size]))
        found = found[size:]
    return parts


CLOSE = b"connection: close"
_OWN = ("time", "request_id", "stages_ms")


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        b'{"inputs": [3]}',
        b'{"instances": [1], "instances": [5]}',
        b'{"instances": ["x"]}',
        b"{",
        b"",
        b'{"signature_name": "none", "instances": [1]}',
        b'{"instances": [1], "parameters": {"top_k": 1}}',
    ],
)
@pytest.mark.parametrize(
    "target", [TARGET, "/v1/models/m/versions/1:predict", "/v1/models/other:predict", "/invocations", ROUTE]
)
@pytest.mark.parametrize("headers", [(), (b"x-request-id: abc",), (b"x-request-id: a b", b"x-request-id: c")])
def test_is_what_asgi_answers(steady: Running, body: bytes, target: str, headers: tuple[bytes, ...]) -> None:
    # The last request of a connection says so, and goes by ASGI.
    both = steady.raw(request(body, *headers, target=target), request(body, CLOSE, *headers, target=target))
    direct, by_asgi = answers(both)
    assert steady.by_asgi == 1
    assert (direct[0], direct[2]) == (by_asgi[0], by_asgi[2])
    assert by_asgi[1].pop(b"connection") == b"close"
    assert direct[1].keys() == by_asgi[1].keys()
    assert {**direct[1], b"date": b""} == {**by_asgi[1], b"date": b""}
    assert steady.users == 0


@pytest.mark.parametrize(
    ("sent", "by_asgi"),
    [
        (request(), 0),
        (request(BODY, b"Connection: Keep-Alive", b"accept: */*"), 0),
        (request(target="/invocations"), 0),
        (request(target=ROUTE), 0),
        (request(target="/invocations?x=1"), 1),
        (request(target="/invocations/"), 1),
        (request(target="/v1/models/m:PREDICT"), 1),
        (request(target="/v1/models/m:predict?x=1"), 1),
        (request(target="/v1/models/m/versions/99999999999999999999:predict"), 1),
        (request(target="/v1/models/m:classify"), 1),
        (request(b" " * 300_000 + BODY), 1),
        (request(BODY, b"content-encoding: identity"), 1),
        (b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\n\r\n", 1),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: s\r\n\r\n", 1),
        (
            b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n"
            b"15\r\n" + BODY + b"\r\n0\r\n\r\n",
            1,
        ),
    ],
)
def test_what_goes_by_asgi(steady: Running, sent: bytes, by_asgi: int) -> None:
    found = answers(steady.raw(sent, b"GET /healthz HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n"))
    assert len(found) == 2
    assert steady.by_asgi == by_asgi + 1


def test_an_old_client_s_connection_is_closed(steady: Running) -> None:
    ((status, headers, body),) = answers(steady.raw(request(version=b"1.0")))
    assert (status, headers[b"connection"], body) == (b"HTTP/1.1 200 OK", b"close", ANSWER)


def test_who_expects_100_is_told_to_go_on(steady: Running) -> None:
    found = steady.raw(request(BODY, b"expect: 100-continue", CLOSE))
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_one_connection_asks_again_and_again(steady: Running) -> None:
    with steady.connection() as connection:
        for _ in range(50):
            connection.request("POST", TARGET, BODY)
            reply = connection.getresponse()
            assert (reply.status, reply.read()) == (200, ANSWER)
    assert steady.by_asgi == 0


def test_requests_in_one_packet_are_answered_in_their_order(steady: Running) -> None:
    bodies = [b'{"instances": [%d]}' % number for number in range(20)]
    sent = b"".join(map(request, bodies)) + request(BODY, CLOSE)
    found = answers(steady.raw(sent))
    wanted = [b'{"predictions":[%d]}' % (2 * number) for number in range(20)]
    assert [body for _, _, body in found] == [*wanted, ANSWER]


def test_what_is_answered_at_once_does_not_overtake_what_asgi_answers(steady: Running) -> None:
    sent = [request(BODY, b"content-encoding: identity"), request(b"{"), request(), request(b"{"), request(BODY, CLOSE)]
    found = answers(steady.raw(b"".join(sent)))
    assert [int(status.split()[1]) for status, _, _ in found] == [200, 400, 200, 400, 200]


def test_a_body_in_pieces_is_put_together(steady: Running) -> None:
    whole = request()
    cuts = [0, 10, len(whole) - 12, len(whole) - 5, len(whole)]
    pieces = [whole[start:stop] for start, stop in itertools.pairwise(cuts)]
    found = answers(steady.raw(*pieces, request(BODY, CLOSE), pause=0.02))
    assert [body for _, _, body in found] == [ANSWER, ANSWER]
    assert steady.by_asgi == 1


@contextlib.contextmanager
def held(server: Running, gate: Gate) -> Iterator[socket.socket]:
    """A connection whose request runs until the gate is opened."""
    gate.open.clear()
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(request())
        assert gate.entered.acquire(timeout=20)
        yield client


def test_who_goes_away_holds_no_version(server: Running, gate: Gate) -> None:
    with held(server, gate):
        pass
    gate.open.set()
    wait_for(lambda: server.users == 0)
    assert answers(server.raw(request(BODY, CLOSE)))[0][2] == ANSWER
    assert isinstance(server.app.executor, ModelExecutor)
    assert server.app.executor.waiting == 0


def test_what_nobody_expects_is_an_internal_error_and_is_logged(
    steady: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    for name in ("decode_inputs", "encode_outputs"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tpuembed_serving.http.rest.{name}", broken)
            with steady.connection() as connection:
                connection.request("POST", TARGET, BODY)
                reply = connection.getresponse()
                assert reply.status == 500
                assert b"secret" not in reply.read()
        assert "secret" in caplog.text
        caplog.clear()
    assert answers(steady.raw(request(BODY, CLOSE)))[0][2] == ANSWER


def test_an_error_of_the_model_is_this_request_s(server: Running, gate: Gate) -> None:
    gate.error = ValueError("no such row")
    (failed, _) = answers(server.raw(request(), request(BODY, CLOSE)))
    assert failed[0] == b"HTTP/1.1 500 Internal Server Error"


def test_a_stop_waits_for_the_answer_and_says_that_it_closes(server: Running, gate: Gate) -> None:
    with held(server, gate) as client:
        client.settimeout(5)
        server.stop.handle()
        wait_for(lambda: refuses(server.port))
        gate.open.set()
        ((status, headers, body),) = answers(b"".join(iter(lambda: client.recv(1 << 16), b"")))
        assert (status, headers[b"connection"], body) == (b"HTTP/1.1 200 OK", b"close", ANSWER)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 20).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("settings", [{"security": SecuritySettings(cors=True)}, {}])
def test_answers_with_cors_headers_are_sent_by_asgi(tmp_path: Path, settings: dict[str, Any]) -> None:
    app = create_app(ServerSettings.for_model_dir(tmp_path / "m", **settings), load=lambda _: DoublingServable())
    assert isinstance(app.direct, DirectPredict) is not bool(settings)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Running]:
    """A server with keys and limits, that everybody observes who can."""
    (tmp_path / "keys").write_text("k" * 20 + "\n")
    guard = SecuritySettings(max_rows=2, api_keys=ApiKeys.read(tmp_path / "keys"))
    telemetry = TelemetrySettings(metrics_path="/metrics", access_log=str(tmp_path / "log"))
    running = Running(tmp_path, DoublingServable(), security=guard, telemetry=telemetry)
    yield running
    running.close()


def test_limits_and_keys_hold(guarded: Running) -> None:
    key = b"x-api-key: " + b"k" * 20
    bodies = [BODY, b'{"instances": [1, 2, 3]}', b'{"instances": "x"}']
    sent = [request(body, *headers) for body in bodies for headers in [(key,), (b"x-api-key: no",)]]
    found = answers(guarded.raw(*sent, request(BODY, CLOSE, key), pause=0.05))
    assert [int(status.split()[1]) for status, _, _ in found] == [200, 401, 400, 401, 400, 401, 200]
    assert guarded.by_asgi == 4, "the last, and three without a key"
    assert b"The limit is 2" in found[2][2]


def test_observers_see_the_same_of_both(guarded: Running, tmp_path: Path) -> None:
    key = b"x-api-key: " + b"k" * 20
    bodies = [BODY, b"{", b'{"instances": [7]}']
    for body in bodies:
        sent = [request(body, key), request(body, key, b"x-request-id: abc"), request(body, key, CLOSE)]
        ids = [headers[b"x-request-id"] for _, headers, _ in answers(guarded.raw(*sent, pause=0.05))]
        assert (len(ids[0]), ids[1], len(ids[2])) == (16, b"abc", 16)
    assert guarded.by_asgi == len(bodies)
    wait_for(lambda: (tmp_path / "log").read_text().count("\n") == 9)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    for direct, by_asgi in zip(lines[1::3], lines[2::3], strict=True):
        assert direct.keys() == by_asgi.keys()
        assert direct["stages_ms"].keys() == by_asgi["stages_ms"].keys()
        same = [name for name in direct if not isinstance(direct[name], float) and name not in _OWN]
        assert {name: direct[name] for name in same} == {name: by_asgi[name] for name in same}
    text = answers(guarded.raw(b"GET /metrics HTTP/1.1\r\nhost: s\r\n%b\r\nconnection: close\r\n\r\n" % key))[0][2]
    assert b'request_count{model_name="m",status="OK"} 6' in text, text.decode()


@pytest.mark.parametrize("size", [40, len(BODY)])
@pytest.mark.parametrize("close", [False, True], ids=["direct", "asgi"])
def test_observers_see_who_goes_away(tmp_path: Path, gate: Gate, close: bool, size: int) -> None:
    """A request without an answer has one line, whether it was complete or not."""
    telemetry = TelemetrySettings(access_log=str(tmp_path / "log"))
    running = Running(tmp_path, DoublingServable(gate), telemetry=telemetry)
    gate.open.clear()
    try:
        head = b"POST %b HTTP/1.1\r\nhost: s\r\nx-request-id: gone\r\n" % TARGET.encode()
        with socket.create_connection(("127.0.0.1", running.port), 20) as client:
            client.sendall(head + CLOSE * close + b"\r\n" * close + b"content-length: %d\r\n\r\n" % size + BODY)
            if size == len(BODY):
                assert gate.entered.acquire(timeout=20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset the connection
        wait_for(lambda: '"gone"' in (tmp_path / "log").read_text(), 10)
    finally:
        gate.open.set()
        running.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["request_id"], line["status"]) for line in lines] == [("gone", 499)]


def test_who_goes_away_with_several_requests_stops_all(
    server: Running, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest request of a connection is not the one that runs."""
    gate.open.clear()
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        chunked = b"POST %b HTTP/1.1\r\nhost: s\r\ntransfer-encoding: chunked\r\n\r\n" % TARGET.encode()
        client.sendall(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + request() + request())
        assert gate.entered.acquire(timeout=20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset the connection
    try:
        wait_for(lambda: server.users == 0, 10)
    finally:
        gate.open.set()
    assert answers(server.raw(request(BODY, CLOSE)))[0][2] == ANSWER
    assert "Exception" not in caplog.text


class Answers:
    """A pipeline whose answers the test gives."""

    def __init__(self) -> None:
        self.responds: list[Callable[[bytes | Exception], None]] = []
        self.given_up = 0

    def start(self, prediction: Any, _: bytes, respond: Callable[[bytes | Exception], None], record: Any) -> Any:
        prediction._loaded = LoadedVersion(1, DoublingServable())  # as its `encode` would
        self.responds.append(respond)
        return types.SimpleNamespace(is_over=False, record=record)

    def give_up(self, _: Any) -> None:
        self.given_up += 1


class Connection:
    """uvicorn's connection, as far as a cycle uses it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False
        self.transport = types.SimpleNamespace(write=self.written.append, is_closing=lambda: self.is_closed)
        self.server_state = types.SimpleNamespace(default_headers=[])

    def on_response_complete(self) -> None:
        """Nothing follows."""


SILENT: Any = types.SimpleNamespace(observes=False)
UNREAD: Any = None


def begun(direct: DirectPredict, count: int) -> tuple[list[Connection], list[DirectCycle]]:
    connections = [Connection() for _ in range(count)]
    cycles = [direct.begin(one, TARGET.encode(), [(b"content-length", b"0")]) for one in connections]  # type: ignore[arg-type]
    for cycle in cycles:
        assert cycle is not None
        cycle.answer()
    return connections, cycles  # type: ignore[return-value]


def test_answers_of_one_turn_leave_together() -> None:
    """Each answer that leaves alone wakes a client that sleeps."""

    async def scenario() -> None:
        pipeline: Any = Answers()
        connections, _ = begun(DirectPredict(pipeline, SILENT, PlatformApi(pipeline, UNREAD, None, None)), 3)
        for respond in pipeline.responds[:2]:
            respond(b"{}")
        assert [len(one.written) for one in connections] == [0, 0, 0]
        await asyncio.sleep(0)
        assert [len(one.written) for one in connections] == [1, 1, 0]
        pipeline.responds[2](b"{}")  # nothing else is in progress
        assert [len(one.written) for one in connections] == [1, 1, 1]

    asyncio.run(scenario())


def test_an_answer_that_cannot_be_sent_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        pipeline: Any = Answers()
        connections, _ = begun(DirectPredict(pipeline, SILENT, PlatformApi(pipeline, UNREAD, None, None)), 2)
        connections[0].transport.write = None
        for respond in pipeline.responds:
            respond(b"{}")
        assert len(connections[1].written) == 1

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == ["the answer to a request was lost"]


def test_a_client_that_leaves_just_before_its_answer_gets_none() -> None:
    async def scenario() -> None:
        pipeline: Any = Answers()
        direct = DirectPredict(pipeline, SILENT, PlatformApi(pipeline, UNREAD, None, None))
        connections, cycles = begun(direct, 3)
        pipeline.responds[0](b"{}")
        cycles[0]._call.is_over = True  # type: ignore[union-attr]
        connections[0].is_closed = True
        cycles[0].give_up()
        cycles[1].give_up()
        pipeline.responds[2](b"{}")  # the last one in progress
        assert pipeline.given_up == 1
        assert [len(one.written) for one in connections] == [0, 0, 1]

    asyncio.run(scenario())


def test_answers_that_nobody_reads_do_not_pile_up(steady: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """At some point no more requests are taken."""
    unread: list[int] = []
    send = DirectCycle.send

    def measured(cycle: DirectCycle, reply: Reply) -> None:
        send(cycle, reply)
        unread.append(cycle._protocol.transport.get_write_buffer_size())

    monkeypatch.setattr(DirectCycle, "send", measured)
    rows = b'{"instances": [%b]}' % b", ".join([b"123456789"] * 20_000)
    with socket.create_connection(("127.0.0.1", steady.port), 20) as client:
        for asked in range(1, 200):
            client.sendall(request(rows))
            with contextlib.suppress(AssertionError):
                wait_for(lambda asked=asked: len(unread) == asked, seconds=2)  # type: ignore[misc]
            if len(unread) < asked:
                break
    assert 0 < max(unread) < 1_000_000


INFER = "/v2/models/m/infer"
IDS: dict[str, Any] = {"name": "ids", "shape": [2], "datatype": "INT64"}
WORDS = {"name": "words", "shape": [1], "datatype": "BYTES", "data": ["a"]}
BINARY = json.dumps({"inputs": [{**IDS, "parameters": {"binary_data_size": 16}}, WORDS]}).encode()
AS_JSON = json.dumps({"inputs": [{**IDS, "data": [1, 2]}, WORDS], "id": "1"}).encode()
BOTH_BINARY = AS_JSON.replace(b'"id"', b'"parameters": {"binary_data_output": true}, "id"')
LENGTH = "Inference-Header-Content-Length"


def test_inference_has_the_answers_that_it_has_by_asgi(tmp_path: Path) -> None:
    server = Running(tmp_path, EchoServable())
    size = {LENGTH: str(len(BINARY))}
    cases: list[tuple[str, bytes, dict[str, str], int]] = [
        (INFER, AS_JSON, {}, 200),
        (INFER, BOTH_BINARY, {}, 200),
        (f"{INFER}?x=1", BINARY + struct.pack("<2q", 1, 2), size, 200),
        ("/v2/models/m/versions/1/infer", AS_JSON, {"x-request-id": "7"}, 200),
        (INFER, BINARY + bytes(15), size, 400),
        (INFER, BINARY, {}, 400),
        (INFER, b"{", {}, 400),
        (INFER, b"", {}, 400),
        ("/v2/models/m/versions/2/infer", AS_JSON, {}, 404),
        ("/v2/models/m/versions/none/infer", AS_JSON, {}, 400),
    ]
    try:
        for target, body, headers, status in cases:
            found = []
            for more in ({}, {"Connection": "close"}):  # the second one goes by ASGI
                with server.connection() as connection:
                    connection.request("POST", target, body, {**headers, **more})
                    reply = connection.getresponse()
                    shown = {name.lower(): value for name, value in reply.headers.items()}
                    found.append((reply.status, reply.read(), shown))
            assert [one.pop("connection", None) for _, _, one in found] == [None, "close"]
            assert [bool(one.pop("date")) for _, _, one in found] == [True, True]
            assert found[0] == found[1]
            assert found[0][0] == status
        assert server.by_asgi == len(cases)
        with server.connection() as connection:
            connection.request("POST", INFER, AS_JSON, {LENGTH: "x"})
            assert connection.getresponse().status == 400
        assert server.by_asgi == len(cases) + 1
    finally:
        server.close()
