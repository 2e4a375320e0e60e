"""Requests that nobody should send, to a server that goes on answering everybody else: no crash, no leak, no server error."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tests.support.memory import GROWTH_BYTES, resident_bytes
from tests.support.serving.doubles import wait_for
from tests.support.serving.good_client import GoodClient
from tests.support.serving.vector_server import VectorServer

GOOD = b'{"instances": [1.0, 2.0, 5.0]}'
GOOD_ANSWER = {"predictions": [2.5, 3.0, 4.5]}


@pytest.fixture(scope="module")
def server(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    root = tmp_path_factory.mktemp("abuse")
    with VectorServer(vector_models, root / "server.log") as running:
        yield running


def good_client(server: VectorServer) -> GoodClient:
    return GoodClient(f"{server.url}/v1/models/half:predict", GOOD, GOOD_ANSWER)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000,
        b"[" * 5_000_000,
        b'{"instances": ' + b"[" * 100_000 + b"1" + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
        b'{"instances": [' + b"1," * 2_000_000 + b"1]}",
        b'{"instances": [' + b"9" * 3_000_000 + b"]}",
        b'{"' + b"x" * 5_000_000 + b'": 1}',
    ],
    ids=["deep", "deeper", "deep and closed", "objects", "many", "a long number", "a long name"],
)
@pytest.mark.sampled(1)
def test_bodies_that_are_large_or_deep(server: VectorServer, body: bytes) -> None:
    """10,000 levels of JSON, and more; good requests are answered meanwhile."""
    before = resident_bytes(server.process.pid)
    with good_client(server), httpx.Client(base_url=server.url, timeout=60) as client:
        reply = client.post("/v1/models/half:predict", content=body)
        assert reply.status_code in (200, 400), reply.text[:200]
        # What a thread has parsed it frees when it is through with it, which may be after the answer.
        wait_for(lambda: resident_bytes(server.process.pid) - before < GROWTH_BYTES + 60 * len(body))
    assert "Traceback" not in server.log


ESCAPES = b'\\"' * 400_000
LISTS = ",".join(f'"k{key}": [{"1, " * 20_000}1]' for key in range(16)).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"a": "' + ESCAPES + b"Inf}", 400),
        (b'{"a": "' + ESCAPES + b"Inf\\", 400),
        (b'{"a": 1 "' + ESCAPES + b"-NaN", 400),
        (b'{"a": ["' + b'", "'.join([ESCAPES] * 2) + b'" Inf', 400),
        (b'{"a": "' + ESCAPES + b'", "instances": [Inf]}', 200),
        (b'{"a": "' + b"\\ud83d\\ude00" * 60_000 + b'", "instances": [-NaN]}', 200),
        (b'{"a": "' + b"\\u0041" * 120_000 + b'\\ud800", "instances": [1]}', 400),
        (b"{" + b'"k": 1, ' * 100_000 + b'"instances": [1]}', 200),
        (b'{"instances": [' + b"Inf, " * 160_000 + b"Infi", 400),
        (b'{"inputs": {' + LISTS + b', "x": [1]}}', 200),
        (b'{"a": {' + LISTS + b', "k0": NaN}, "inputs": [1]}', 200),
    ],
    ids=[
        "an open string", "a last backslash", "a missing comma", "a closed string", "escapes", "surrogates", "half of one",
        "one key", "infinities", "columns", "columns, and a key twice",
    ],
)  # fmt: skip
def test_each_body_is_parsed_in_linear_time(server: VectorServer, body: bytes, status: int) -> None:
    """Of these 800 KB, most took minutes or hours, in which nobody was answered. They take less than a second."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for path in (
            "/v1/models/half:predict",
            "/v1/models/unknown:predict",
            "/v1/models/half:classify",
            "/v2/models/half/infer",
        ):
            reply = client.post(path, content=body)
            assert reply.status_code == (status if path == "/v1/models/half:predict" else reply.status_code)
            assert reply.status_code in (200, 400, 404)
        assert client.get("/healthz").status_code == 200
    assert "Traceback" not in server.log


def test_clients_that_leave_in_the_middle(server: VectorServer) -> None:
    url = httpx.URL(server.url)
    with good_client(server):
        for number in range(60):
            connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
            connection.putrequest("POST", "/v1/models/half:predict")
            connection.putheader("content-length", "1000")
            connection.endheaders(GOOD[: number % len(GOOD)] if number % 3 else None)
            connection.close()
    assert "Traceback" not in server.log


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NOISE = [
    b"",
    b"\x00" * 5000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x01" * 600,
    PREFACE[:-3],
    PREFACE + b"\xff" * 2000,
    PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 2000,  # SETTINGS without an end
    PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01",  # a frame of 16 MiB
]


@pytest.mark.nightly
def test_connections_that_speak_no_grpc(server: VectorServer) -> None:
    host, _, port = server.grpc_address.rpartition(":")
    before = resident_bytes(server.process.pid)
    with good_client(server), grpc.insecure_channel(server.grpc_address) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        held = []
        for number in range(160):
            connection = socket.create_connection((host, int(port)), timeout=60)
            connection.sendall(NOISE[number % len(NOISE)])
            held.append(connection) if number % 2 else connection.close()
            assert health(b"", timeout=60) == b"\x08\x01"
        for connection in held:
            connection.close()
    assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
    assert "Traceback" not in server.log
