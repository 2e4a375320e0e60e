"""Requests over real sockets against the answers that TensorFlow Serving's API page states; see vector_server for the form."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format, message_factory  # type: ignore[import-untyped]
from tensorflow_serving.apis import (
    model_service_pb2,
    prediction_service_pb2,
)

from tests.support.memory import GROWTH_BYTES, resident_bytes
from tests.support.serving.vector_server import VectorServer, ask, read_vectors, with_shapes

REST = list(read_vectors("rest_*.yaml"))
GRPC = list(read_vectors("grpc_*.yaml"))


@pytest.fixture(scope="module")
def server(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    root = tmp_path_factory.mktemp("vectors")
    with VectorServer(vector_models, root / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VectorServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def typed(value: Any) -> Any:
    """1 and 1.0 and true are not the same answer. Two texts of one float32 are, such as 0.142857149 and 0.14285715."""
    if isinstance(value, float):
        return ("float", repr(value if abs(value) > 3e38 else float(np.float32(value))))
    if isinstance(value, dict):
        return {key: typed(member) for key, member in value.items()}
    if isinstance(value, list):
        return [typed(element) for element in value]
    return (type(value).__name__, value)


def check_error(body: str, vector: dict[str, Any]) -> None:
    error = json.loads(body)
    assert list(error) == ["error"]
    if "error" in vector:
        assert error["error"] == vector["error"]
    else:
        assert re.fullmatch(vector["error_like"], error["error"], re.DOTALL), error


def check(reply: httpx.Response, vector: dict[str, Any]) -> None:
    assert reply.status_code == vector["status"], reply.text
    assert reply.headers["content-type"] == "application/json"
    if "body" in vector:
        found = reply.content.decode("utf-8", "surrogateescape")
        is_json = vector["body"][:1] in ("{", "[")
        assert (typed(json.loads(found)) == typed(json.loads(vector["body"]))) if is_json else found == vector["body"]
    elif "json" in vector:
        assert typed(reply.json()) == typed(vector["json"])
    elif "has" in vector:
        assert vector["has"].items() <= reply.json().items()
    else:
        check_error(reply.text, vector)


@pytest.mark.parametrize("vector", REST, ids=lambda vector: vector["name"])
def test_rest(client: httpx.Client, vector: dict[str, Any]) -> None:
    check(ask(client, vector), vector)


class Caller:
    """Calls methods by their names."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        files = (prediction_service_pb2, model_service_pb2)
        self._services = {name: one for file in files for name, one in file.DESCRIPTOR.services_by_name.items()}

    def messages(self, rpc: str) -> tuple[Any, Any]:
        """The classes of a method's request and response."""
        service, _, name = rpc.partition("/")
        method = self._services[service].methods_by_name[name]
        return message_factory.GetMessageClass(method.input_type), message_factory.GetMessageClass(method.output_type)

    def call(self, rpc: str, request: bytes, timeout: float = 60) -> tuple[str, str, Any]:
        """Code, text and response."""
        method = self._channel.unary_unary(f"/tensorflow.serving.{rpc}", None, self.messages(rpc)[1].FromString)
        try:
            return "OK", "", method(request, timeout=timeout)
        except grpc.RpcError as error:
            return error.code().name, error.details(), None

    def ask(self, rpc: str, request: dict[str, Any]) -> tuple[str, str, Any]:
        """The same for a request in JSON form."""
        message = json_format.ParseDict(with_shapes(request), self.messages(rpc)[0]())
        return self.call(rpc, message.SerializeToString())


@pytest.fixture(scope="module")
def caller(server: VectorServer) -> Iterator[Caller]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield Caller(channel)


@pytest.mark.parametrize("vector", GRPC, ids=lambda vector: vector["name"])
def test_grpc(caller: Caller, vector: dict[str, Any]) -> None:
    rpc = vector["rpc"]
    if "raw" in vector:
        code, text, response = caller.call(rpc, bytes.fromhex(vector["raw"]))
    else:
        code, text, response = caller.ask(rpc, vector["send"])
    assert (code, "" if code == "OK" else text) == (vector["code"], vector.get("text", text))
    if "text_like" in vector:
        assert re.fullmatch(vector["text_like"], text, re.DOTALL), text
    if "answer" in vector:
        wanted = json_format.ParseDict(with_shapes(vector["answer"]), caller.messages(rpc)[1]())
        assert str(response) == str(wanted)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with some of its bytes changed, lost, added or cut off."""
    found = bytearray(data or b"{")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        change = rng.choice(
            [bytes([rng.randrange(256)]), b"", found[at : at + 1] * 2, b'[]{},:"0e\\-'[at % 11 : at % 11 + 1]]
        )
        found[at : at + rng.randrange(2)] = change
        if rng.random() < 0.1:
            del found[at:]
    return bytes(found)


def check_text(text: str) -> None:
    """A sentence, and nothing of the machine."""
    assert text
    for word in ("Traceback", "site-packages", "/tmp/", "0x7f", 'File "', "Exception"):
        assert word not in text, text


def test_no_damaged_request_is_a_fault_of_the_server(
    server: VectorServer, client: httpx.Client, caller: Caller
) -> None:
    """Or leaves anything behind."""
    rng, before = random.Random(1), resident_bytes(server.process.pid)
    calls = [one for one in GRPC if "raw" not in one and "Reload" not in one["rpc"]]
    for vector in rng.choices(calls, k=500):
        rpc = vector["rpc"]
        request = json_format.ParseDict(with_shapes(vector["send"]), caller.messages(rpc)[0]())
        code, text, _ = caller.call(rpc, damaged(request.SerializeToString(), rng))
        assert code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"), text
        if code != "OK":
            check_text(text)
    bodies = [one for one in REST if one.get("method", "POST") == "POST" and one["send"] and "headers" not in one]
    for vector in rng.choices(bodies, k=500):
        reply = client.post(vector["path"], content=damaged(vector["send"].encode(), rng))
        assert reply.status_code in (200, 400, 404, 501), reply.text
        if reply.status_code != 200:
            check_text(json.loads(reply.content.decode("utf-8", "replace"))["error"])
    assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
    assert "Traceback" not in server.log
