"""A whole server, `tpuembed_serving.serve`, in a thread of this process, with a servable that needs no SavedModel."""

import contextlib
import http.client
import json
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import make_version
from tests.support.serving.process import Reply
from tpuembed_serving import ModelSettings, ServerSettings, create_app, server
from tpuembed_serving.core.servable import Servable
from tpuembed_serving.workers.stopping import Stop

PREDICT = "/tensorflow.serving.PredictionService/Predict"
BODY = b'{"instances": [1, 2]}'


def free_port() -> int:
    """Return a free port that no other process gets by asking for any free one."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def predict_request(name: str = "m") -> bytes:
    message = predict_pb2.PredictRequest()
    message.model_spec.name = name
    tensor = message.inputs["x"]
    tensor.dtype = 9
    tensor.tensor_shape.dim.add().size = 2
    tensor.int64_val.extend([1, 2])
    return bytes(message.SerializeToString())


class Served:
    """A server of `models`, whose versions `load` loads, from `with` to its end. Of a name alone there is version 1."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        load: Callable[[Path], Servable],
        *,
        models: tuple[str | ModelSettings, ...] = ("m",),
        **options: Any,
    ) -> None:
        settings = []
        for model in models:
            if isinstance(model, str):
                if not (folder / model).exists():
                    make_version(folder / model, 1)
                model = ModelSettings(name=model, base_path=folder / model)
            settings.append(model)
        self.stop = Stop()
        self.port, self.grpc_port = free_port(), free_port()
        self.settings = ServerSettings(
            models=tuple(settings),
            rest_port=self.port,
            grpc_port=self.grpc_port,
            **{"poll_seconds": 0.02, "lame_duck_seconds": 0.5, "drain_seconds": 20.0, **options},
        )
        patch.setattr(server, "create_app", lambda settings, **options: create_app(settings, load=load, **options))
        patch.setattr(server, "stop_on_signals", self._stops)
        patch.setattr(server, "log_to_stderr", lambda _: None)
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve)

    @contextlib.contextmanager
    def _stops(self) -> Iterator[Stop]:
        yield self.stop

    def _serve(self) -> None:
        try:
            server.serve(self.settings)
        except Exception as error:  # for the test
            self.failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.handle()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self.stop.handle(signal.SIGTERM)

    def wait(self, seconds: float = 60) -> None:
        """Until it has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def listens(self) -> bool:
        """Whether both ports take connections."""
        assert self.failure is None
        for port in (self.port, self.grpc_port):
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
            except OSError:
                return False
        return True

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(self, method: str, target: str, body: Any = b"", **headers: str) -> Reply:
        """Send a request over a new connection. A body that is neither bytes nor text is sent as JSON."""
        body = body if isinstance(body, bytes | str) else json.dumps(body)
        with contextlib.closing(self.connect()) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body or None, named)
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        reply = self.send(method, path, body or b"")
        return reply.status, reply.value

    @property
    def is_ready(self) -> bool:
        """Whether it listens, and each model has a version."""
        return self.listens and self.send("GET", "/readyz").status == 200

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(
            f"127.0.0.1:{self.grpc_port}",
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100)],
        )

    def call(self, name: str = "m", method: str = PREDICT, data: bytes | None = None) -> tuple[str, str]:
        """Code and text of a call."""
        with self.channel() as channel:
            try:
                channel.unary_unary(method)(
                    predict_request(name) if data is None else data, timeout=30, wait_for_ready=True
                )
            except grpc.RpcError as error:
                return error.code().name, error.details()
        return "OK", ""

    def health(self, service: str) -> str:
        with self.channel() as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
