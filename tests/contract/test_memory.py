"""--max-request-memory: what requests in flight take together, and what is given back."""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.served import BODY, Served
from tpuembed_serving.core.servable import Array, Signature

MIB = 1 << 20
HEAD = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\ncontent-length: 4000000\r\n\r\n"


class Model(DoublingServable):
    """Signature `wide` says that a row has 3 MiB of outputs. `large` does not say so, and has 4 MiB. Runs wait for `gate`."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.gate, self.started = threading.Event(), threading.Event()
        default = self.signatures["serving_default"]
        self.signatures = {
            "serving_default": dataclasses.replace(default, shapes=((-1,),)),
            "wide": dataclasses.replace(default, name="wide", row_bytes=3 * MIB),
            "large": dataclasses.replace(default, name="large"),
        }

    def _wait(self) -> None:
        self.started.set()
        assert self.gate.wait(60)

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        outputs = super().run(signature, inputs)
        return [np.zeros(MIB // 2)] if signature.name == "large" else outputs


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("memory")
    with (
        pytest.MonkeyPatch.context() as patch,
        Served(folder, patch, lambda _: model, max_request_memory=4 * MIB) as running,
    ):
        wait_for(lambda: running.is_ready)
        yield running


@pytest.fixture(autouse=True)
def _open(model: Model) -> Iterator[None]:
    model.gate.set()
    yield
    model.gate.set()


def status(server: Served, signature: str = "wide", values: Any = (1,), **headers: str) -> tuple[int, str]:
    body = json.dumps({"signature_name": signature, "inputs": values}).encode()
    reply = server.send("POST", "/v1/models/m:predict", gzip.compress(body) if headers else body, **headers)
    return reply.status, "" if reply.status == 200 else reply.error


def test_outputs_are_refused_before_the_run_or_before_they_are_encoded(server: Served) -> None:
    assert status(server) == (200, "")
    for signature, values, size in (("wide", [1, 2], "6.0 MiB"), ("large", [1], " MiB")):
        code, text = status(server, signature, values)
        assert (code, size in text) == (413, True), text
    assert status(server) == (200, "")


def test_requests_in_flight_share_the_memory_and_give_it_back(server: Served, model: Model) -> None:
    model.gate.clear()
    model.started.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(status, server)
        assert model.started.wait(60)
        assert status(server)[0] == 503
        model.gate.set()
        assert first.result() == (200, "")
    assert status(server) == (200, "")


@pytest.mark.parametrize("end", ["leaves", "is too large"])
def test_a_body_counts_while_it_arrives_and_is_given_back(server: Served, end: str) -> None:
    def is_counted() -> bool:
        """Whether two bodies of 1.5 MiB leave no room for 3 MiB. Such a question may take the room of the bodies."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(2)]
            for client in clients:
                client.sendall(HEAD + b" " * (MIB * 3 // 2))
            if not any("in flight use about 3.0 MiB" in status(server)[1] for _ in range(50)):
                return False
            assert server.send("POST", "/v1/models/m:predict", BODY).status == 200, "a small body needs no room"
            for client in clients if end == "is too large" else ():
                client.sendall(b" " * (4_000_000 - MIB * 3 // 2))
                assert client.recv(100).split()[1] in (b"413", b"503")
            return True

    wait_for(is_counted)
    wait_for(lambda: status(server) == (200, ""))


def test_an_inflated_body_counts(server: Served) -> None:
    assert status(server, "serving_default", [1], content_encoding="gzip") == (200, "")
    code, text = status(server, "serving_default", [1] * 500_000, content_encoding="gzip")
    assert code == 413, text
    assert status(server) == (200, "")


def test_another_rank_than_the_signature_needs_is_refused(server: Served) -> None:
    for values, shape in (([[1]], "[1, 1]"), (1, "[]")):
        text = f"input x has shape {shape}. The signature takes [-1], where -1 is any size"
        assert status(server, "serving_default", values) == (400, text)
