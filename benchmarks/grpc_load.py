"""A gRPC client that asks for predictions as fast as it gets them: `python -m benchmarks.grpc_load PORT ROWS CALLS SECONDS`.

It is written in Python, and takes as much of the processors as the server does: what it measures is at least so fast.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from tensorflow_serving.apis import predict_pb2

from benchmarks.serve_model import NAMES, ROWS

_METHOD = "/tensorflow.serving.PredictionService/Predict"
_REQUESTS = 64
_INT64 = 9


def requests(rows: int) -> list[bytes]:
    """PredictRequests of random ids."""
    rng = np.random.default_rng(rows)
    return [_request(rng.integers(0, ROWS, (len(NAMES), rows))) for _ in range(_REQUESTS)]


def _request(ids: Any) -> bytes:
    message = predict_pb2.PredictRequest()
    message.model_spec.name = "rec"
    for name, column in zip(NAMES, ids, strict=True):
        tensor = message.inputs[name]
        tensor.dtype = _INT64
        tensor.tensor_shape.dim.add().size = len(column)
        tensor.tensor_content = column.astype("<i8").tobytes()
    return bytes(message.SerializeToString())


async def load(port: int, rows: int, calls: int, seconds: float) -> dict[str, float]:
    """Ask for `rows` rows at a time; see `ask`."""
    return await ask(port, requests(rows), calls, seconds)


async def ask(port: int, given: Sequence[bytes], calls: int, seconds: float) -> dict[str, float]:
    """Send these requests in turns, `calls` at a time, each client on a channel of its own."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client(turn: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            predict = channel.unary_unary(_METHOD)  # bytes in, bytes out
            while (started := time.perf_counter()) < end:
                turn += 1
                await predict(given[turn % len(given)])
                taken.append(time.perf_counter() - started)

    await asyncio.gather(*(client(turn) for turn in range(calls)))
    ordered = statistics.quantiles(taken, n=100)
    return {
        "requests_per_second": len(taken) / seconds,
        "p50_ms": 1e3 * ordered[49],
        "p99_ms": 1e3 * ordered[98],
        "errors": 0,
    }


if __name__ == "__main__":
    port, rows, calls, seconds = map(int, sys.argv[1:])
    print(json.dumps(asyncio.run(load(port, rows, calls, seconds))))
