"""Limits of a server: sizes of bodies and of memory, times of requests, and lengths of queues."""

import concurrent.futures
import gzip
import json
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.contract_serve import predict_request
from tests.support.contract_strict import KEY, MAX_BODY_BYTES, StrictServer, strict_server

HEADERS = {"X-API-Key": KEY}
METADATA = (("x-api-key", KEY),)
CODES = grpc.StatusCode
ENDLESS = {"signature_name": "slow", "instances": [10**12]}


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> StrictServer:
    return strict_server(pytestconfig, tmp_path_factory)


def request_of(signature: str, name: str, array: Any) -> Any:
    return predict_request("zoo", {name: array}, signature)


def code_of(server: StrictServer, request: Any) -> Any:
    try:
        server.prediction.Predict(request, timeout=60, metadata=METADATA)
    except grpc.RpcError as error:
        return error.code()
    return CODES.OK


def still_answers(server: StrictServer) -> bool:
    reply = server.post("zoo:predict", {"signature_name": "double", "instances": [3.0]}, **HEADERS)
    return (reply.status, reply.value) == (200, {"predictions": [1.0]})


@pytest.mark.parametrize("path", ["/v1/models/zoo:predict", "/v2/models/zoo/infer", "/invocations"])
def test_a_body_above_the_limit_is_413(server: StrictServer, path: str) -> None:
    """One byte more. A body of the limit is read."""
    good = b'{"signature_name": "double", "instances": [3.0]}'
    large = good + b" " * (MAX_BODY_BYTES + 1 - len(good))
    reply = server.ask("POST", path, large, HEADERS)
    assert reply.status == 413
    assert str(MAX_BODY_BYTES) in reply.error
    wanted = 400 if "infer" in path else 200
    assert server.ask("POST", path, large[:-1], HEADERS).status == wanted
    assert still_answers(server)


def test_a_body_that_is_inflated_above_the_limit_is_413(server: StrictServer) -> None:
    headers = HEADERS | {"Content-Encoding": "gzip"}
    good = gzip.compress(json.dumps({"signature_name": "double", "instances": [3.0]}).encode())
    assert server.post("zoo:predict", good, **headers).value == {"predictions": [1.0]}
    bomb = gzip.compress(b" " * 50 * MAX_BODY_BYTES)
    assert len(bomb) < MAX_BODY_BYTES / 10
    assert server.post("zoo:predict", bomb, **headers).status == 413
    assert still_answers(server)


def test_a_message_above_the_limit_is_refused(server: StrictServer) -> None:
    request = request_of("double", "x", np.zeros(MAX_BODY_BYTES // 8))
    assert request.ByteSize() > MAX_BODY_BYTES
    assert code_of(server, request) is CODES.RESOURCE_EXHAUSTED
    assert code_of(server, request_of("double", "x", np.zeros(8))) is CODES.OK


def test_a_small_message_that_would_need_too_much_memory_is_refused(server: StrictServer) -> None:
    """One number stands for six million of them, which need more than --max-request-memory."""
    request = request_of("double", "x", np.zeros(1))
    request.inputs["x"].tensor_shape.dim[0].size = 6_000_000
    assert code_of(server, request) is CODES.RESOURCE_EXHAUSTED
    request.inputs["x"].tensor_shape.dim[0].size = 6
    assert code_of(server, request) is CODES.OK


def test_a_request_that_takes_too_long_is_504(server: StrictServer) -> None:
    """Over gRPC it is DEADLINE_EXCEEDED, without a deadline of the call. Its thread is free again."""
    reply = server.post("zoo:predict", ENDLESS, **HEADERS)
    assert (reply.status, reply.error) == (504, "Timed out waiting for notification")
    assert code_of(server, request_of("slow", "n", np.array([10**12]))) is CODES.DEADLINE_EXCEEDED
    assert still_answers(server)


def test_a_full_queue_is_503(server: StrictServer) -> None:
    """The one thread is busy, two requests wait, and the others are told to come again."""
    good = {"signature_name": "double", "instances": [3.0]}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        bodies = [ENDLESS] * 2 + [good] * 10
        replies = list(pool.map(lambda body: server.post("zoo:predict", body, **HEADERS), bodies))
    statuses = {reply.status for reply in replies}
    assert 503 in statuses
    assert statuses <= {200, 503, 504}
    for reply in replies:
        assert reply.status != 503 or (reply.headers["retry-after"] == "1" and reply.error)
    assert still_answers(server)
