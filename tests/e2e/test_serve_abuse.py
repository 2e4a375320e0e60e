"""Requests that nobody should send, to a server that goes on answering everybody else: no crash, no leak, no server error."""

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.memory import GROWTH_BYTES, resident_bytes
from tests.support.serving.doubles import wait_for
from tests.support.serving.good_client import GoodClient
from tests.support.serving.vector_server import VectorServer, read_vectors

POSTS = [one for one in read_vectors("rest_*.yaml") if one["send"] and one.get("method", "POST") == "POST"]
VALID = sorted({(one["path"], one["send"].encode()) for one in POSTS if one["status"] == 200})
BODIES = sorted({one["send"].encode() for one in POSTS})
TARGETS = ["zoo:predict", "half:predict", "ours:predict", "examples:classify", "examples:regress", "more:predict"]
GOOD = b'{"instances": [1.0, 2.0, 5.0]}'
GOOD_ANSWER = {"predictions": [2.5, 3.0, 4.5]}
ALLOWED = {200, 400, 404, 413, 501, 503, 504}


@pytest.fixture(scope="module")
def server(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    root = tmp_path_factory.mktemp("abuse")
    with VectorServer(vector_models, root / "server.log") as running:
        yield running


def good_client(server: VectorServer) -> GoodClient:
    return GoodClient(f"{server.url}/v1/models/half:predict", GOOD, GOOD_ANSWER)


def mutated(moments: random.Random) -> tuple[str, bytes]:
    """A target, and a body after a few accidents; mostly one that was valid there."""
    target, valid = moments.choice(VALID)
    if moments.random() < 0.25:
        target, valid = f"/v1/models/{moments.choice(TARGETS)}", moments.choice(BODIES)
    body = bytearray(valid)
    for _ in range(moments.choice([1, 1, 2, 4])):
        place = moments.randrange(len(body) + 1)
        match moments.randrange(8):
            case 0:
                del body[place:]
            case 1 if body:
                body[place % len(body)] ^= 1 << moments.randrange(8)
            case 2:
                body[place:place] = moments.choice(
                    [b"[", b"{", b"]", b"}", b'"', b",", b":", b"null", b"-", b"1e999", b"NaN"]
                )
            case 3:
                other = moments.choice(BODIES)
                body[place:place] = other[moments.randrange(len(other)) :]
            case 4:
                body[place:place] = moments.choice([b"[", b'{"a":']) * moments.choice([10, 1000, 20_000])
            case 5:
                body[place:place] = b"9" * moments.choice([5, 20, 400, 5000])
            case 6:
                body[place : place + moments.randrange(20)] = b""
            case 7:
                body[place:place] = moments.choice(
                    [b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b'\\u0000"', "ü".encode()]
                )
    return target, bytes(body)


def send_mutated(server: VectorServer, count: int, seed: int) -> Counter[int]:
    """The statuses of `count` requests over one connection, which no answer may break."""
    moments, statuses = random.Random(seed), Counter[int]()
    url = httpx.URL(server.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=300)
    for _ in range(count):
        headers = moments.choice([{}] * 8 + [{"content-encoding": "gzip"}, {"content-type": "text/plain"}])
        target, body = mutated(moments)
        connection.request("POST", target, body, headers)
        reply = connection.getresponse()
        answer = reply.read()
        statuses[reply.status] += 1
        assert reply.status in ALLOWED, answer
        if reply.status != 200:
            check_error(answer)
    connection.close()
    return statuses


def check_error(body: bytes) -> None:
    """One sentence, and nothing of the machine."""
    (error,) = json.loads(body.decode("utf-8", "replace")).values()
    assert error
    for word in ("Traceback", "site-packages", "/tmp/", "0x7f", 'File "'):
        assert word not in error, error


@pytest.mark.nightly
def test_bodies_after_accidents_are_answered_and_leave_nothing(server: VectorServer) -> None:
    send_mutated(server, 200, seed=0)
    before = resident_bytes(server.process.pid)
    with good_client(server) as good:
        statuses = send_mutated(server, 500, seed=500)
    after = resident_bytes(server.process.pid)
    print(f"{dict(statuses)}; {good.answers} good requests; {before >> 20} to {after >> 20} MiB")
    assert statuses[400] > 250
    assert statuses[200], "some accidents do no harm"
    assert after - before < GROWTH_BYTES
    assert "Traceback" not in server.log


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
