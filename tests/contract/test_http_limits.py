"""Clients that take forever, that send too much, and that are too many: over real sockets, beside one that behaves."""

import contextlib
import functools
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.served import BODY, Served
from tpuembed_serving.core.security import ConnectionLimits, SecuritySettings

LIMITS = ConnectionLimits(connections=8, header_bytes=2000, receive_seconds=1.0)
PREDICT = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\n"
WHOLE = b"%bcontent-length: %d\r\n\r\n%b" % (PREDICT, len(BODY), BODY)
END = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ANSWER = b'{"predictions":[2,4]}'


class Large(DoublingServable):
    """For the number 7 it answers 60 MB, and for 8 only after a moment."""

    def run(self, signature: Any, inputs: Any) -> list[Any]:
        if inputs[0].tolist() == [8]:
            time.sleep(0.1)
        return [np.full((1, 3_000_000), 10**18)] if inputs[0].tolist() == [7] else super().run(signature, inputs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        Served(
            tmp_path_factory.mktemp("limits"), patch, lambda _: Large(), security=SecuritySettings(limits=LIMITS)
        ) as running,
    ):
        wait_for(lambda: running.is_ready)
        yield running


def connect(server: Served) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), 20)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(functools.partial(client.recv, 1 << 16), b""))


def assert_answers(server: Served) -> None:
    reply = server.send("POST", "/v1/models/m:predict", BODY)
    assert (reply.status, reply.body) == (200, ANSWER)


def test_a_request_that_does_not_come_whole_is_answered_408_and_closed(server: Served) -> None:
    """Also that of a client that drips: each byte is in time, the request is not."""
    with contextlib.ExitStack() as stack:
        *silent, dripping = (stack.enter_context(connect(server)) for _ in range(5))
        for client, sent in zip(silent, (b"", b"POST / HT", PREDICT, WHOLE[:-5]), strict=True):
            client.sendall(sent)
        dripping.sendall(PREDICT + b"content-length: 1000\r\n\r\n")
        dripping.settimeout(0.05)
        assert_answers(server)
        found = b""
        while not found:
            try:
                found = dripping.recv(1 << 16)
            except TimeoutError:
                dripping.sendall(b" ")
        for answer in (*map(rest_of, silent), found):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"did not arrive within 1 seconds" in answer


def test_a_client_that_does_not_read_is_closed(server: Served) -> None:
    body = BODY.replace(b"1, 2", b"7")
    with connect(server) as deaf:
        deaf.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (PREDICT, len(body), body))
        ends = f":{server.port:04X}", f":{deaf.getsockname()[1]:04X}"

        def is_open() -> bool:
            sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()]
            return any(one[-5:] == ends[0] and two[-5:] == ends[1] and state == "01" for one, two, state in sockets)

        assert is_open()
        wait_for(lambda: not is_open())
        assert len(rest_of(deaf)) < 50_000_000
    assert_answers(server)


@pytest.mark.parametrize("at_once", [True, False])
def test_headers_that_are_too_long_are_answered_431(server: Served, at_once: bool) -> None:
    with connect(server) as client:
        client.sendall(PREDICT)
        lines = [b"a-%d: %s\r\n" % (number, b"v" * 100) for number in range(30)]
        # Of pieces the last is the one too many: what is sent after the answer would meet a closed port.
        for piece in [b"".join(lines) + b"\r\n"] if at_once else lines[: 2000 // 108 + 1]:
            client.sendall(piece)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"longer than 2000 bytes" in answer


def test_bodies_are_no_headers(server: Served) -> None:
    """In requests that share a connection too. And their deadline is a request's, not a connection's."""
    with contextlib.closing(server.connect()) as client:
        for size in (0, 100_000, 3, 5_000_000):
            client.request("POST", "/v1/models/m:predict", BODY + b" " * size, {"pad": "v" * 1500})
            assert client.getresponse().read() == ANSWER
        with connect(server) as slow:  # closed after a second, which by now has passed for the other one as well
            assert rest_of(slow)
        first = client.sock
        client.request("POST", "/v1/models/m:predict", BODY)
        assert (client.getresponse().read(), client.sock) == (ANSWER, first)
    body = BODY + b" " * 1500
    with connect(server) as sender:
        sender.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (PREDICT, len(body), body) * 3 + END)
        assert rest_of(sender).count(b"200 OK") == 4


def test_connections_beyond_the_limit_are_answered_503(server: Served) -> None:
    clients = [connect(server) for _ in range(8)]
    with connect(server) as another:
        answer = rest_of(another)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in answer
    for client in clients:
        client.close()
    wait_for(lambda: server.send("GET", "/healthz").status == 200)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_an_idle_connection_is_closed_without_an_answer(server: Served) -> None:
    with connect(server) as idle:
        idle.sendall(WHOLE)
        assert idle.recv(1 << 16).endswith(ANSWER)
        idle.settimeout(150)
        assert rest_of(idle) == b""


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
    head = rng.choice([PREDICT, b"PUT /v1/models/m:predict?a=b HTTP/1.1\r\nhost: x\r\n"])
    framing = b"Content-Length: %d\r\n" % len(body)
    if rng.random() < 0.4:
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
        framing = b"Transfer-Encoding: chunked\r\n"
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    if rng.random() < 0.3:
        framing += b"Expect: 100-continue\r\n"
    with_header = [upgrade + framing, framing + upgrade][rng.randrange(2)]
    return head + with_header + b"\r\n" + body, head + framing + b"\r\n" + body


def exchange(server: Served, sent: bytes, rng: random.Random) -> bytes:
    """All answers to what is sent in random pieces over one connection; its last request closes it."""
    sent += END
    with connect(server) as client:
        while sent:
            size = rng.choice([1, 7, 60, 200, 5000, len(sent)])
            client.sendall(sent[:size])
            sent = sent[size:]
            if size < 10 and rng.random() < 0.2:
                time.sleep(0.001)
        return rest_of(client)


def final(answers: bytes) -> list[bytes]:
    """Status lines and bodies; interim answers and the time of day are left out."""
    lines = [
        line for line in answers.replace(b"}HTTP", b"}\r\nHTTP").split(b"\r\n") if not line.lower().startswith(b"date:")
    ]
    return [line for line in lines if line and b"100 Continue" not in line]


@pytest.mark.parametrize("seed", range(20))
def test_an_upgrade_header_changes_no_answer(server: Served, seed: int) -> None:
    """Pipelined requests in random pieces are answered as the same requests without the header."""
    rng = random.Random(seed)
    pairs = [a_request(rng, rng.choice(UPGRADES)) for _ in range(rng.randrange(1, 6))]
    upgraded = final(exchange(server, b"".join(pair[0] for pair in pairs), rng))
    plain = final(exchange(server, b"".join(pair[1] for pair in pairs), rng))
    assert upgraded == plain
    assert sum(line.startswith(b"HTTP/1.1 ") for line in upgraded) == len(pairs) + 1


def test_every_place_where_a_request_with_an_upgrade_is_cut(server: Served) -> None:
    body = BODIES[2]
    one = b"%bContent-Length: %d\r\n%b\r\n%b" % (PREDICT, len(body), UPGRADES[0], body)
    with connect(server) as client:
        reader = client.makefile("rb")
        for cut in range(1, len(one)):
            client.sendall(one[:cut])
            time.sleep(0.0005)
            client.sendall(one[cut:])
            assert reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
            length = 0
            while (line := reader.readline()) != b"\r\n":
                assert not line.lower().startswith((b"connection", b"upgrade"))
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            assert reader.read(length).startswith(b'{"error":"')


@pytest.mark.parametrize("target", [b"example.com:443", b"/", b"*"])
def test_connect_is_refused_and_nothing_after_it_is_a_request(server: Served, target: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_headers_that_are_too_long_are_refused_with_an_upgrade_too(server: Served) -> None:
    with connect(server) as client:
        client.sendall(PREDICT + UPGRADES[0] + b"a: %b\r\n\r\n" % (b"v" * 2500))
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "refused",
    [
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"%ba: %b\r\n\r\n" % (PREDICT, b"v" * 2500),
        b"no request at all\r\n\r\n",
    ],
)
def test_a_refusal_does_not_take_the_place_of_the_answer_before_it(server: Served, refused: bytes) -> None:
    """The model answers after a while, when the refused request behind it has come."""
    body = BODY.replace(b"1, 2", b"8")
    with connect(server) as client:
        client.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (PREDICT, len(body), body) + refused)
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b'\r\n\r\n{"predictions":[16]}')


def test_a_body_that_is_broken_is_answered_400(server: Served) -> None:
    with connect(server) as client:
        client.sendall(PREDICT + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nno size\r\n")
        assert rest_of(client).startswith(b"HTTP/1.1 400 ")
