"""Requests over real sockets against the answers that TensorFlow Serving's API page states; see vector_server for the form."""

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.vector_models import save_models
from tests.e2e.vector_server import VectorServer, read_vectors

REST = list(read_vectors("rest_*.yaml"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    root = tmp_path_factory.mktemp("vectors")
    with VectorServer(save_models(root), root / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VectorServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def ask(client: httpx.Client, vector: dict[str, Any]) -> httpx.Response:
    body = vector["send"].encode()
    if vector.get("gzip"):
        body = gzip.compress(body)
    url = client.base_url.copy_with(raw_path=vector["path"].encode())
    return client.request(vector.get("method", "POST"), url, content=body, headers=vector.get("headers"))


def typed(value: Any) -> Any:
    """1 and 1.0 and true are not the same answer."""
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
        assert reply.text == vector["body"]
    elif "json" in vector:
        assert typed(reply.json()) == typed(vector["json"])
    elif "has" in vector:
        assert vector["has"].items() <= reply.json().items()
    else:
        check_error(reply.text, vector)


@pytest.mark.parametrize("vector", REST, ids=lambda vector: vector["name"])
def test_rest(client: httpx.Client, vector: dict[str, Any]) -> None:
    check(ask(client, vector), vector)


def test_there_are_enough_vectors() -> None:
    assert len(REST) >= 250
    assert len({(one.get("method"), one["path"], one["send"], str(one.get("headers"))) for one in REST}) == len(REST)
