"""Clients that take forever, that send too much, and that are too many: over real sockets, beside one that behaves."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from tests.unit.serving.doubles import wait_for
from tpuembed_serving import guarded_http
from tpuembed_serving.guarded_http import close_slow_connections, protocol_class
from tpuembed_serving.security import ConnectionLimits

LIMITS = ConnectionLimits(connections=5, header_bytes=2000, receive_seconds=0.5)
ANSWER = b"x" * 50_000_000


async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Echoes the size of the body; at /much a large answer."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
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
    monkeypatch.setattr(guarded_http, "_LOOK_SECONDS", 0.05)
    running = Server(uvicorn.Config(app, http=protocol_class(LIMITS), log_level="critical", lifespan="off"))
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
    assert b"did not come within 0.5 seconds" in answer


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
