"""gRPC calls that nobody should make, to a server that goes on answering everybody else: no crash, no leak, no server error."""

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    predict_pb2,
    regression_pb2,
)

from tests.support.memory import GROWTH_BYTES, resident_bytes
from tests.support.serving.doubles import wait_for
from tests.support.serving.vector_server import VectorServer, read_vectors, with_shapes

REQUESTS = {
    "PredictionService/Predict": predict_pb2.PredictRequest,
    "PredictionService/Classify": classification_pb2.ClassificationRequest,
    "PredictionService/Regress": regression_pb2.RegressionRequest,
    "PredictionService/MultiInference": inference_pb2.MultiInferenceRequest,
    "PredictionService/GetModelMetadata": get_model_metadata_pb2.GetModelMetadataRequest,
    "ModelService/GetModelStatus": get_model_status_pb2.GetModelStatusRequest,
}
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED", "OUT_OF_RANGE"}

INTEGERS = [0, 1, 2, 7, 9, 23, 65, 2**31 - 1]
ODD: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: [*INTEGERS, -1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [*INTEGERS, -1, 1000, 2**20, 2**28, 2**60, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: INTEGERS,
    FieldDescriptor.CPPTYPE_UINT64: [*INTEGERS, 2**64 - 1],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -1.5, 1e300, float("nan")],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, -1.5, 1e38, float("inf")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [*range(1, 28), 101, 1000, -1],
    FieldDescriptor.CPPTYPE_STRING: ["", "x", "serving_default", "\u00fc" * 300, "a\x00b"],
}
ODD_BYTES = [b"", b"\x00\xff", b"\x80" * 300]
"""By the type of a field, what is put into it."""


def messages() -> dict[str, list[bytes]]:
    """Method -> valid requests."""
    found: dict[str, list[bytes]] = {method: [] for method in REQUESTS}
    metadata = {"model_spec": {"name": "half"}, "metadata_field": ["signature_def"]}
    request = json_format.ParseDict(metadata, get_model_metadata_pb2.GetModelMetadataRequest())
    found["PredictionService/GetModelMetadata"].append(request.SerializeToString())
    for vector in read_vectors("grpc_*.yaml"):
        method = vector["rpc"]
        if method in REQUESTS and vector["code"] == "OK" and "raw" not in vector:
            request = json_format.ParseDict(with_shapes(vector["send"]), REQUESTS[method]())
            found[method].append(request.SerializeToString(deterministic=True))
    return found


MESSAGES = messages()


@pytest.fixture(scope="module")
def server(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    root = tmp_path_factory.mktemp("abuse_grpc")
    with VectorServer(vector_models, root / "server.log") as running:
        yield running


class GoodCaller(threading.Thread):
    """Calls what is right, again and again; at the end of `with`, all was answered right."""

    def __init__(self, server: VectorServer) -> None:
        super().__init__()
        self._address, self._stop_asking = server.grpc_address, threading.Event()
        self.answers = 0
        self.failure: Any = None

    def run(self) -> None:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "half"
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.array([1.0, 2.0, 5.0], np.float32)))
        with grpc.insecure_channel(self._address) as channel:
            predict = channel.unary_unary(
                "/tensorflow.serving.PredictionService/Predict", None, predict_pb2.PredictResponse.FromString
            )
            while not self._stop_asking.wait(0.002) and self.failure is None:
                try:
                    reply = predict(request.SerializeToString(), timeout=60)
                    if (found := list(reply.outputs["y"].float_val)) != [2.5, 3.0, 4.5]:
                        self.failure = found
                except grpc.RpcError as error:
                    self.failure = error
                self.answers += 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_asking.set()
        self.join(120)
        assert self.failure is None, self.failure
        assert self.answers


def varint(value: int) -> bytes:
    parts = []
    while value >= 128:
        parts.append(value % 128 + 128)
        value //= 128
    return bytes([*parts, value])


def field(moments: random.Random) -> bytes:
    """A field of any number, mostly of one that exists, and any type."""
    number = moments.choice([*range(1, 18), moments.randrange(1, 2**29)])
    match moments.randrange(5):
        case 0:
            return varint(number << 3) + varint(moments.choice([0, 1, 2, 3, 9, 23, 2**31, 2**63, 2**64 - 1]))
        case 1:
            return varint(number << 3 | 1) + moments.randbytes(8)
        case 2:
            data = moments.choice([b"", moments.randbytes(9), moments.choice(MESSAGES["PredictionService/Predict"])])
            return varint(number << 3 | 2) + varint(moments.choice([len(data), len(data) + 1, 2**31 - 1])) + data
        case 3:
            return varint(number << 3 | 5) + moments.randbytes(4)
        case _:
            return varint(number << 3 | 3) * moments.choice([1, 50, 5000])


def mutated(moments: random.Random, data: bytes) -> bytes:
    """A well-formed message after a few accidents."""
    body = bytearray(data)
    for _ in range(moments.randint(1, 4)):
        place = moments.randrange(len(body) + 1)
        match moments.randrange(8):
            case 0:
                del body[place:]
            case 1 if body:
                body[place % len(body)] ^= 1 << moments.randrange(8)
            case 2:
                body[place:place] = field(moments)
            case 3:
                body += field(moments)
            case 4:
                body[place : place + moments.randrange(20)] = b""
            case 5:
                body[place : place + 1] = bytes([moments.choice([0, 1, 127, 128, 255])])
            case 6:
                body[place : place + 1] = varint(moments.choice([2**21, 2**31 - 1, 2**40, 2**63, 2**64 - 1]))
            case 7:
                body += moments.choice(MESSAGES[moments.choice(sorted(MESSAGES))])
    return bytes(body)


def tweak(moments: random.Random, message: Any) -> None:
    """Put another value into one of the fields of a message, or of one inside it."""
    chosen, value = moments.choice(message.ListFields())
    if chosen.message_type is not None:
        inside = (
            moments.choice(list(value.values() if hasattr(value, "values") else value)) if is_many(value) else value
        )
        if inside.ListFields():
            tweak(moments, inside)
        return
    odd = ODD[chosen.cpp_type] if chosen.type != FieldDescriptor.TYPE_BYTES else ODD_BYTES
    if is_many(value):
        value.extend([moments.choice(odd)] * moments.choice([1, 3]))
    else:
        setattr(message, chosen.name, moments.choice(odd))


def is_many(value: Any) -> bool:
    """Whether a field's value is a list or a map."""
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def damaged(moments: random.Random, method: str) -> bytes:
    """A valid request that is one no more, or another one."""
    data = moments.choice(MESSAGES[method])
    if moments.random() < 0.5 and data:
        message = REQUESTS[method].FromString(data)
        tweak(moments, message)
        return bytes(message.SerializeToString())
    return mutated(moments, data)


def call_mutated(server: VectorServer, count: int, seed: int) -> Counter[str]:
    """The codes of `count` calls."""
    moments, codes = random.Random(seed), Counter[str]()
    limit = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_address, options=limit) as channel:
        calls = {method: channel.unary_unary(f"/tensorflow.serving.{method}", None, None) for method in REQUESTS}
        for _ in range(count):
            method = moments.choice(["PredictionService/Predict", *REQUESTS])
            try:
                calls[method](damaged(moments, method), timeout=60)
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
                check_text(error.code().name, error.details())
    return codes


def check_text(code: str, text: str) -> None:
    """A sentence, and nothing of the machine."""
    assert code in ALLOWED, (code, text)
    assert text
    for word in ("Traceback", "site-packages", "/tmp/", "0x7f", 'File "', "Exception"):
        assert word not in text, text


@pytest.mark.nightly
def test_messages_after_accidents_are_answered_and_leave_nothing(server: VectorServer) -> None:
    call_mutated(server, 200, seed=0)
    before = resident_bytes(server.process.pid)
    with GoodCaller(server) as good:
        codes = call_mutated(server, 300, seed=300)
    after = resident_bytes(server.process.pid)
    print(f"{dict(codes)}; {good.answers} good calls; {before >> 20} to {after >> 20} MiB")
    assert codes["INVALID_ARGUMENT"] > 75
    assert codes["OK"], "some accidents do no harm"
    assert after - before < GROWTH_BYTES
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
    with GoodCaller(server) as good:
        held = []
        for number in range(160):
            connection = socket.create_connection((host, int(port)), timeout=60)
            connection.sendall(NOISE[number % len(NOISE)])
            held.append(connection) if number % 2 else connection.close()
        answered = good.answers
        wait_for(lambda: good.answers > answered + 20 or good.failure is not None)
        for connection in held:
            connection.close()
    assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
    assert "Traceback" not in server.log
