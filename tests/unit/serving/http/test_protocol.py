"""Clients that take forever, that send too much, and that are too many: over real sockets, beside one that behaves."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from tests.support.serving.doubles import wait_for
from tpuembed_serving.core.security import ConnectionLimits
from tpuembed_serving.http import protocol as guarded_http
from tpuembed_serving.http.protocol import close_slow_connections, protocol_class

LIMITS = ConnectionLimits(connections=5, header_bytes=2000, receive_seconds=0.5)
ANSWER = b"x" * 50_000_000


async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Echoes the size of the body; at /much a large answer, at /late after a moment."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/late":
        await asyncio.sleep(0.1)
    body = ANSWER if scope["path"] == "/much" else str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Server(uvicorn.Server):
    url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._closing = asyncio.create_task(close_slow_connections(self.server_state.connections))

    @property
    def open(self) -> int:
        return len(self.server_state.connections)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(guarded_http, "_CHECK_SECONDS", 0.05)
    running = Server(uvicorn.Config(app, http=protocol_class(LIMITS), log_config=None, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_for(lambda: running.started)
    running.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield running
    running.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 0), 20)


def ask(server: Server, **request: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/", timeout=20, **request)


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    while piece := client.recv(1 << 16):
        found += piece
    return found


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST / HT",
        b"POST / HTTP/1.1\r\nhost: x\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n123",
    ],
)
def test_a_request_that_does_not_come_whole_is_answered_408_and_closed(server: Server, sent: bytes) -> None:
    with connect(server) as slow:
        slow.sendall(sent)
        assert ask(server, content=b"abc").text == "3"
        answer = rest_of(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.5 seconds" in answer


def test_an_idle_connection_is_closed_without_an_answer(server: Server) -> None:
    server.config.timeout_keep_alive = 1
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    with connect(server) as idle, connect(server) as busy:
        idle.sendall(request)
        assert idle.recv(1 << 16).endswith(b"3")
        for _ in range(8):
            busy.sendall(request)
            assert busy.recv(1 << 16).endswith(b"3")
            time.sleep(0.2)
        assert rest_of(idle) == b""
        assert server.open == 1
    wait_for(lambda: server.open == 0)


def test_a_client_that_drips_is_closed_too(server: Server) -> None:
    """Each byte is in time, the request is not."""
    with connect(server) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        slow.settimeout(0.05)
        answer = b""
        for _ in range(400):
            try:
                answer += slow.recv(100)
                break
            except TimeoutError:
                slow.sendall(b"1")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_is_closed(server: Server) -> None:
    with connect(server) as deaf:
        deaf.sendall(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_for(lambda: server.open == 1)
        wait_for(lambda: server.open == 0)
    assert ask(server, content=b"ab").text == "2"


@pytest.mark.parametrize("at_once", [True, False])
def test_headers_that_are_too_long_are_answered_431(server: Server, at_once: bool) -> None:
    with connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\n")
        lines = [b"a-%d: %s\r\n" % (number, b"v" * 100) for number in range(30)]
        # Of pieces the last is the one too many: what is sent after the answer would meet a closed port.
        for piece in [b"".join(lines) + b"\r\n"] if at_once else lines[: 2000 // 108 + 1]:
            client.sendall(piece)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"longer than 2000 bytes" in answer


def test_bodies_are_no_headers(server: Server) -> None:
    """In requests that share a connection too."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for size in (0, 100_000, 3, 5_000_000):
            assert client.post("/", content=b"b" * size, headers={"pad": "v" * 1500}).text == str(size)
    pipelined = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1500\r\n\r\n" + b"b" * 1500
    with connect(server) as sender:
        sender.sendall(pipelined * 3 + b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert rest_of(sender).count(b"200 OK") == 4


def test_connections_beyond_the_limit_are_answered_503(server: Server) -> None:
    clients = [connect(server) for _ in range(5)]
    wait_for(lambda: server.open == 5)
    with connect(server) as sixth:
        answer = rest_of(sixth)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in answer
    for client in clients:
        client.close()
    wait_for(lambda: server.open == 0)
    assert ask(server, content=b"a").text == "1"


def test_a_connection_that_waits_between_requests_stays(server: Server) -> None:
    """The deadline is a request's, not a connection's."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.post("/", content=b"a").text == "1"
        with connect(server) as slow:  # closed after 0.5 seconds, which by now have passed for the other one as well
            rest_of(slow)
        assert server.open == 1
        assert client.post("/", content=b"ab").text == "2"


UPGRADES = [
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n",
    b"Upgrade: TLS/1.3, h2c\r\nConnection: upgrade\r\nConnection: HTTP2-Settings\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: Upgrade\r\n",
]
BODIES = [
    b"",
    b'{"instances": [1]}',
    b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"x" * 70_000,
]


def a_request(rng: random.Random, upgrade: bytes) -> tuple[bytes, bytes]:
    """A request with and without `upgrade` in its head, and a body that looks like a request now and then."""
    body = rng.choice(BODIES)
    head = rng.choice([b"POST / HTTP/1.1\r\n", b"PUT /?a=b HTTP/1.1\r\n"]) + b"Host: x\r\n"
    framing = b"Content-Length: %d\r\n" % len(body)
    if rng.random() < 0.4:
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
        framing = b"Transfer-Encoding: chunked\r\n"
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    if rng.random() < 0.3:
        framing += b"Expect: 100-continue\r\n"
    with_header = [upgrade + framing, framing + upgrade][rng.randrange(2)]
    return head + with_header + b"\r\n" + body, head + framing + b"\r\n" + body


def exchange(server: Server, sent: bytes, rng: random.Random) -> bytes:
    """All answers to what is sent in random pieces over one connection; its last request closes it."""
    end = b"GET /end HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent += end
        while sent:
            size = rng.choice([1, 7, 60, 200, 5000, len(sent)])
            client.sendall(sent[:size])
            sent = sent[size:]
            if size < 10 and rng.random() < 0.2:
                time.sleep(0.001)
        return rest_of(client)


def final(answers: bytes) -> list[bytes]:
    """Status lines and bodies; interim answers and the time of day are left out."""
    lines = [line for line in answers.split(b"\r\n") if not line.lower().startswith(b"date:")]
    return [line for line in lines if line and b"100 Continue" not in line]


@pytest.mark.parametrize("seed", range(20))
def test_an_upgrade_header_changes_no_answer(server: Server, seed: int) -> None:
    """Pipelined requests in random pieces are answered as the same requests without the header."""
    rng = random.Random(seed)
    pairs = [a_request(rng, rng.choice(UPGRADES)) for _ in range(rng.randrange(1, 6))]
    upgraded = final(exchange(server, b"".join(pair[0] for pair in pairs), rng))
    plain = final(exchange(server, b"".join(pair[1] for pair in pairs), rng))
    assert upgraded == plain
    assert b"\n".join(upgraded).count(b"HTTP/1.1 200 OK") == len(pairs) + 1


def test_every_place_where_a_request_with_an_upgrade_is_cut(server: Server) -> None:
    body = BODIES[2]
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (len(body), UPGRADES[0], body)
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = client.makefile("rb")
        for cut in range(1, len(one)):
            client.sendall(one[:cut])
            time.sleep(0.0005)
            client.sendall(one[cut:])
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := reader.readline()) != b"\r\n":
                assert not line.lower().startswith((b"connection", b"upgrade"))
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            assert reader.read(length) == str(len(body)).encode()


@pytest.mark.parametrize("target", [b"example.com:443", b"/", b"*"])
def test_connect_is_refused_and_nothing_after_it_is_a_request(server: Server, target: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_headers_that_are_too_long_are_refused_with_an_upgrade_too(server: Server) -> None:
    with connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\n" + UPGRADES[0] + b"a: %b\r\n\r\n" % (b"v" * 2500))
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "refused",
    [
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\na: %b\r\n\r\n" % (b"v" * 2500),
        b"no request at all\r\n\r\n",
    ],
)
def test_a_refusal_does_not_take_the_place_of_the_answer_before_it(server: Server, refused: bytes) -> None:
    """The application answers after a while, when the refused request behind it has come."""
    with connect(server) as client:
        client.sendall(b"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" + refused)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n2")


def test_a_body_that_is_broken_is_answered_400(server: Server) -> None:
    with connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nno size\r\n")
        assert rest_of(client).startswith(b"HTTP/1.1 400 ")
