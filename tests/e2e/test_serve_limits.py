"""Limits of time and memory against a whole server: large bodies, large answers, compressed bombs, odd clients, a stop."""

import gzip
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.serving.process import ServerProcess

WIDE = 64


def save(path: Path) -> None:
    """A model whose signature `wide` answers 64 numbers per number, and whose `endless` runs until it is cancelled."""
    module = tf.Module()
    numbers = tf.TensorSpec([None], tf.float32, name="x")
    double = tf.function(lambda x: {"y": x * 2}).get_concrete_function(numbers)
    ones = tf.constant([[float(column) / 7 for column in range(WIDE)]])
    wide = tf.function(lambda x: {"y": x[:, None] * ones}).get_concrete_function(numbers)

    @tf.function
    def endless(x: Any) -> Any:
        return {"y": tf.while_loop(lambda i, _: i >= 0, lambda i, y: (i, y + 1), (tf.constant(0), x))[1]}

    signatures = {"serving_default": double, "wide": wide, "endless": endless.get_concrete_function(numbers)}
    tf.saved_model.save(module, str(path), signatures=signatures)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits") / "m"
    save(folder / "1")
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, model.parent / "log", "--rest-timeout-ms", "20000") as running:
        running.wait_for(1)
        assert running.predict({"instances": [1]})[0] == 200
        yield running


class Probe:
    """Asks for one row again and again on a connection, and notes how long each answer took."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self._server, self._stop = server, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        connection = self._server.connect()
        while not self._stop.is_set():
            started = time.perf_counter()
            connection.request("POST", f"{self._server.path}:predict", b'{"instances": [1]}')
            assert connection.getresponse().read()
            self.seconds.append(time.perf_counter() - started)
        connection.close()

    def __enter__(self) -> "Probe":
        self._thread.start()
        time.sleep(0.5)
        self.before = statistics.median(self.seconds)
        self.seconds.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes(server: ServerProcess, name: str = "VmRSS") -> int:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


@pytest.mark.nightly
def test_a_large_answer_to_a_small_body_stalls_nobody(server: ServerProcess) -> None:
    """240 KiB of numbers, and 8 MiB of outputs."""
    body = json.dumps({"signature_name": "wide", "instances": [1.5] * 32_000})
    stalls = []
    for _ in range(3):  # other processes may take the processors once; the server's own stall comes each time
        with Probe(server) as probe:
            status, found = server.predict(body)
        assert status == 200
        assert len(found["predictions"]) == 32_000
        assert found["predictions"][-1][7] == pytest.approx(1.5)
        assert len(probe.seconds) > 10
        stalls.append(statistics.quantiles(probe.seconds, n=20)[-1])
        if stalls[-1] < 0.25:
            break
    # The event loop itself had to stop for 590 ms; here threads share the processor with it.
    assert min(stalls) < 0.25, stalls


@pytest.mark.nightly
def test_a_large_body_stalls_nobody(server: ServerProcess) -> None:
    """20 MiB of rows that the model refuses, so that only the parsing and decoding take long. It took 700 ms in one call."""
    body = b'{"instances": [' + b'{"x": 1.25}, ' * 1_600_000 + b'{"x": true}]}'
    longest = []
    for _ in range(3):  # other processes may take the processors once; the server's own stall comes each time
        with Probe(server) as probe:
            status, found = server.predict(body)
        assert (status, "Failed to process element: 1600000" in found["error"]) == (400, True), found
        assert len(probe.seconds) > 50
        longest.append(max(probe.seconds))
        if longest[-1] < 0.5:
            break
    assert min(longest) < 0.5, longest


@pytest.mark.parametrize("body", [b"[" * 4_000_000, b'{"instances": [' + b"NaN," * 1_000_000 + b"1"])
def test_a_body_that_parses_slowly_is_answered_within_the_timeout(model: Path, tmp_path: Path, body: bytes) -> None:
    with ServerProcess(model, tmp_path / "log", "--rest-timeout-ms", "1000") as running:
        running.wait_for(1)
        with Probe(running):
            started = time.monotonic()
            status, _ = running.predict(body)
            taken = time.monotonic() - started
    assert status in (400, 504)
    assert taken < 4


def test_rows_that_take_too_much_memory_are_refused_at_once(server: ServerProcess) -> None:
    body = b'{"instances": [' + b'{"x":1},' * 3_700_000 + b'{"x": 1}]}'
    assert 29_000_000 < len(body) < 32 << 20
    before, started = resident_bytes(server), time.monotonic()
    status, found = server.predict(body)
    assert (status, time.monotonic() - started < 20) == (413, True)
    assert " 1024.0 MiB " in found["error"]
    assert resident_bytes(server) - before < 400 << 20


def test_answers_that_take_too_much_memory_are_refused_before_the_run(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path / "log", "--max-request-memory", "8MiB") as running:
        running.wait_for(1)
        assert running.predict({"signature_name": "wide", "instances": [1] * 1000})[0] == 200
        status, found = running.predict({"signature_name": "wide", "instances": [1] * 40_000})
    assert (status, " 8.0 MiB " in found["error"]) == (413, True)


@pytest.mark.nightly
@pytest.mark.parametrize("content", [b" ", b"[", b"1,"])
def test_sixteen_bombs_are_refused_in_little_memory(model: Path, tmp_path: Path, content: bytes) -> None:
    bomb = gzip.compress(b'{"instances": [' + content * (90_000_000 // len(content)), 9)
    assert len(bomb) < 100_000
    headers = {"Content-Encoding": "gzip"}
    with ServerProcess(model, tmp_path / "log") as running:
        running.wait_for(1)
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: running.predict(bomb, headers=headers), range(16)))
        assert [status for status, _ in found] == [413] * 16, found
        assert resident_bytes(running, "VmHWM") < 1 << 30
        compressed = gzip.compress(b'{"instances": [1]}')
        assert running.predict(compressed, headers=headers)[0] == 200


def raw(server: ServerProcess, sent: bytes, *, half_close: bool = False) -> bytes:
    with socket.create_connection((server.host, server.port), 20) as client:
        client.sendall(sent)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        found = b""
        while part := client.recv(1 << 16):
            found += part
        return found


def post(server: ServerProcess, *headers: str, version: str = "1.1", body: bytes = b'{"instances": [1]}') -> bytes:
    lines = [f"POST {server.path}:predict HTTP/{version}", "host: s", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_an_old_client_keeps_its_connection(server: ServerProcess) -> None:
    kept = post(server, "connection: keep-alive", version="1.0")
    found = raw(server, kept + kept + post(server, version="1.0"))
    assert found.count(b"HTTP/1.1 200 OK") == 3
    assert found.count(b"connection: keep-alive") == 2
    assert found.count(b"connection: close") == 1


@pytest.mark.parametrize("headers", [(), ("content-encoding: identity",)], ids=["direct", "asgi"])
def test_a_client_that_has_closed_its_side_gets_its_answer(server: ServerProcess, headers: tuple[str, ...]) -> None:
    body = json.dumps({"signature_name": "wide", "instances": [1] * 2000}).encode()
    found = raw(server, post(server, *headers, body=body), half_close=True)
    assert found.startswith(b"HTTP/1.1 200 OK")
    assert found.endswith(b"]}")


def test_half_of_a_request_is_not_waited_for(server: ServerProcess) -> None:
    assert raw(server, post(server)[:-5], half_close=True) == b""


def test_other_transfer_codings_are_not_implemented(server: ServerProcess) -> None:
    chunked = gzip.compress(b'{"instances": [1]}')
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunked), chunked)
    head = f"POST {server.path}:predict HTTP/1.1\r\nhost: s\r\ntransfer-encoding: gzip, chunked\r\n\r\n".encode()
    found = raw(server, head + body)
    assert found.startswith(b"HTTP/1.1 501 Not Implemented")
    assert b"transfer coding gzip, chunked is not supported" in found


def test_bad_requests_fill_no_log(server: ServerProcess) -> None:
    before = server.log.count("\n")
    for _ in range(100):
        assert raw(server, b"\x00nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert server.log.count("\n") - before < 20


def test_work_for_a_client_that_has_left_stops(server: ServerProcess) -> None:
    """It stops within two seconds of the server's own processor time, however little of it a busy machine gives."""

    def ticks() -> int:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    body = json.dumps({"signature_name": "wide", "instances": [1.5] * 200_000}).encode()
    before = ticks()
    with socket.create_connection((server.host, server.port), 20) as client:
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # a reset: a FIN may be half a close
        client.sendall(post(server, body=body))
        time.sleep(0.3)
    spent = before - 10
    while ticks() - spent >= 10:  # until it does nothing for a second
        spent = ticks()
        assert spent - before < 230
        time.sleep(1)
    assert server.predict({"instances": [1]})[0] == 200


@pytest.mark.nightly
def test_bodies_that_arrive_slowly_are_in_the_budget(model: Path, tmp_path: Path) -> None:
    """Sixteen clients send 6 MiB of 8 MiB each. Their bodies were not counted before they were complete."""
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\ncontent-length: 8388608\r\n\r\n"
    with ServerProcess(model, tmp_path / "log", "--max-request-memory", "32MiB") as running:
        running.wait_for(1)
        head = head.replace(b"/v1/models/m", running.path.encode())
        clients = [socket.create_connection((running.host, running.port), 20) for _ in range(16)]
        refused = 0
        try:
            for client in clients:
                client.settimeout(2)
                try:
                    client.sendall(head + b" " * (6 << 20))
                    refused += client.recv(100).startswith(b"HTTP/1.1 503")
                except TimeoutError:  # no answer yet
                    pass
                except ConnectionError:
                    refused += 1
        finally:
            for client in clients:
                client.close()
        assert refused >= 10
        assert running.predict({"instances": [1]})[0] == 200
