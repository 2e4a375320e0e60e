"""Clients that ask a server all the time, and what they were answered when."""

import asyncio
import dataclasses
import json
import threading
import time
from types import TracebackType
from typing import Any, Self

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.process import ServerProcess

BODY = b'{"instances": [1.0, 2.0]}'


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: when it was sent and answered, on the clock of `time.monotonic`, and with what.

    Attributes:
        status: of the answer, 200 for gRPC's OK; 0 where the connection was lost, or gRPC's UNAVAILABLE.
        version: the factor that both predictions have, which is the number of a version of `save_scale`.
    """

    sent: float
    received: float
    status: int
    version: float


class Load:
    """Asks over `connections` connections from `with` to its end; one that is lost is opened anew."""

    def __init__(self, server: ServerProcess, connections: int, target: str = "") -> None:
        self._server, self._connections = server, connections
        self._target = target or f"{server.path}:predict"
        self.asked: list[Asked] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def failed(self) -> list[Asked]:
        return [one for one in self.asked if one.status != 200]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._connections)))

    async def _client(self) -> None:
        while not self._stop.is_set():
            sent = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
            except OSError:
                self.asked.append(Asked(sent, time.monotonic(), 0, 0.0))
                await asyncio.sleep(0.01)
                continue
            try:
                while not self._stop.is_set():
                    sent = time.monotonic()
                    status, version = await self._ask(reader, writer)
                    self.asked.append(Asked(sent, time.monotonic(), status, version))
            except (OSError, asyncio.IncompleteReadError):
                self.asked.append(Asked(sent, time.monotonic(), 0, 0.0))
            finally:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
        head = f"POST {self._target} HTTP/1.1\r\nHost: s\r\nContent-Length: {len(BODY)}\r\n\r\n"
        writer.write(head.encode() + BODY)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(headers.split(b"content-length:")[1].split()[0])
        answer = json.loads(await reader.readexactly(size))
        if status != 200:
            return status, 0.0
        one, two = answer["predictions"]
        assert two == 2 * one, answer
        return status, float(one)


class GrpcLoad(Load):
    """The same over gRPC, each client on a connection of its own; deadlines of calls are long."""

    async def _client(self) -> None:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = self._server.path.rpartition("/")[2]
        request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.0, 2.0], tf.float32))
        data = request.SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(self._server.grpc_address, options=options) as channel:
            predict = channel.unary_unary(
                "/tensorflow.serving.PredictionService/Predict", None, predict_pb2.PredictResponse.FromString
            )
            while not self._stop.is_set():
                sent = time.monotonic()
                status, version = await self._call(predict, data)
                self.asked.append(Asked(sent, time.monotonic(), status, version))

    async def _call(self, predict: Any, data: bytes) -> tuple[int, float]:
        try:
            reply = await predict(data, timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(0.01)
                return 0, 0.0
            return error.code().value[0], 0.0
        one, two = reply.outputs["y"].float_val
        assert two == 2 * one, reply
        assert reply.model_spec.version.value == one, reply
        return 200, float(one)
