"""Clients that ask a server all the time, one request after the other, and count what becomes of each."""

import collections
import http.client
import json
import threading
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from tensorflow_serving.apis import prediction_service_pb2_grpc

from tests.support.contract_serve import Server, outputs_of, predict_request

__all__ = ["Clients"]

BODY = b'{"instances": [1.0, 2.0]}'


class Clients:
    """Clients of a model that multiplies by its version: from `with` to its end, or until the port is closed.

    Attributes:
        lost: Counts requests that were sent and got no answer, or an error, by the API and what was met instead.
        factors: For each client, the versions that answered, one after the other.
        refused: How many clients found the port closed.
    """

    def __init__(self, server: Server, model: str, *, rest: int = 0, grpc: int = 0) -> None:
        """`rest` and `grpc` are the numbers of clients."""
        self._server, self._model = server, model
        self._stop = threading.Event()
        self.lost = collections.Counter[str]()
        self.refused = 0
        self.factors: list[list[float]] = [[] for _ in range(rest + grpc)]
        loops = [self._rest] * rest + [self._grpc] * grpc
        self._threads = [
            threading.Thread(target=loop, args=(factors,)) for loop, factors in zip(loops, self.factors, strict=True)
        ]

    @property
    def answered(self) -> int:
        """How many requests were answered well."""
        return sum(map(len, self.factors))

    def have_all(self, count: int) -> bool:
        """Whether each client got as many answers."""
        return all(len(factors) >= count for factors in self.factors)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait for the clients, which end when the port is closed."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _rest(self, factors: list[float]) -> None:
        connection = self._server.connect()
        while not self._stop.is_set():
            if connection.sock is None:
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    self.refused += 1
                    return
            try:
                connection.request("POST", f"/v1/models/{self._model}:predict", BODY)
                reply = connection.getresponse()
                text = reply.read()
            except (OSError, http.client.HTTPException) as error:
                self.lost[f"REST {error!r}"] += 1
                return
            if reply.status == 200:
                self._count(factors, json.loads(text)["predictions"])
            else:
                self.lost[f"REST {reply.status} {text.decode()}"] += 1
        connection.close()

    def _grpc(self, factors: list[float]) -> None:
        request = predict_request(self._model, {"x": np.array([1, 2], np.float32)})
        with self._server.open_channel() as channel:
            stub: Any = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            while not self._stop.is_set():
                try:
                    reply = stub.Predict(request, timeout=30)
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in error.details():
                        self.refused += 1
                        return
                    self.lost[f"gRPC {error.code()} {error.details()}"] += 1
                else:
                    self._count(factors, outputs_of(reply)["y"].tolist())

    def _count(self, factors: list[float], answer: list[float]) -> None:
        if answer[1] == 2 * answer[0]:
            factors.append(answer[0])
        else:
            self.lost[f"wrong: {answer}"] += 1
