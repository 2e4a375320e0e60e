"""Loads a gRPC server with predictions, with h2load, a client in C (the Debian package nghttp2-client).

It sends the same request again and again. A client in Python would take more of the processors than the server.
"""

import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tensorflow_serving.apis import predict_pb2

from benchmarks.serve_model import NAMES, ROWS

METHOD = "/tensorflow.serving.PredictionService/Predict"
_INT64 = 9
_HEADERS = ["-H", "content-type: application/grpc", "-H", "te: trailers"]


def request(rows: int) -> bytes:
    """Return a PredictRequest of random ids."""
    ids = np.random.default_rng(rows).integers(0, ROWS, (len(NAMES), rows))
    message = predict_pb2.PredictRequest()
    message.model_spec.name = "rec"
    for name, column in zip(NAMES, ids, strict=True):
        tensor = message.inputs[name]
        tensor.dtype = _INT64
        tensor.tensor_shape.dim.add().size = len(column)
        tensor.tensor_content = column.astype("<i8").tobytes()
    return bytes(message.SerializeToString())


def ask(port: int, body: bytes) -> bytes:
    """Return one answer.

    Raises:
        OSError: there is none.
    """
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return bytes(channel.unary_unary(METHOD)(body, timeout=10))
    except grpc.RpcError as error:
        raise OSError(str(error)) from None


def load(port: int, body: bytes, answer_bytes: int, connections: int, seconds: int) -> dict[str, float]:
    """Send `body` over so many connections, one call at a time on each. An answer of another size is an error."""
    with tempfile.TemporaryDirectory() as folder:
        sent, log = Path(folder, "body"), Path(folder, "log")
        sent.write_bytes(_framed(body))
        command = ["h2load", f"-c{connections}", "-m1", "-t1", f"-D{seconds}", f"-d{sent}", f"--log-file={log}"]
        command += [*_HEADERS, f"http://127.0.0.1:{port}{METHOD}"]
        text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        times = [int(line.split("\t")[2]) / 1e3 for line in log.read_text().splitlines()]
    return {"requests_per_second": len(times) / seconds, **_percentiles(times), "errors": _errors(text, answer_bytes)}


def _framed(message: bytes) -> bytes:
    """Return a message as gRPC sends it: uncompressed, with its size."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    found = statistics.quantiles(times, n=100)
    return {"p50_ms": found[49], "p99_ms": found[98]}


def _errors(text: str, answer_bytes: int) -> int:
    """Return how many calls have failed. The status of a call is in its trailers, which h2load does not read."""

    def number(pattern: str) -> int:
        found: Any = re.search(pattern, text)
        return int(found[1])

    succeeded = number(r"(\d+) succeeded")
    answered = number(r"\((\d+)\) data") // (5 + answer_bytes)
    return number(r"(\d+) failed") + max(0, succeeded - answered)
