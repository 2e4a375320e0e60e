"""Calls around the model, with a servable that needs no SavedModel."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tensorflow_serving.apis import predict_pb2

from tests.support.messages import refused
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ServingError
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc.remote_calls import RemoteStates
from tpuembed_serving.grpc.server import GrpcServer
from tpuembed_serving.http.app import ServingApp

PREDICT = "/tensorflow.serving.PredictionService/Predict"


@contextlib.asynccontextmanager
async def running(
    base_path: Path, load: Callable[[Path], DoublingServable], **options: Any
) -> AsyncIterator[tuple[ServingApp, GrpcServer, Any]]:
    """An application, its gRPC server and a channel to it, once its model is available."""
    make_version(base_path / "m", 7)
    app = create_app(ServerSettings.for_model_dir(base_path / "m", poll_seconds=0.02, **options), load=load)
    server = GrpcServer(app.pipeline, app.repository)
    port = await server.start("127.0.0.1", 0, security=options.get("security", SecuritySettings()))
    app.repository.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async with asyncio.timeout(30):
            while not app.repository.ready:
                await asyncio.sleep(0.01)
        try:
            yield app, server, channel
        finally:
            await server.stop(5)
            app.executor.close()
            await asyncio.to_thread(app.repository.stop)


def request(*values: int, signature: str = "") -> Any:
    message = predict_pb2.PredictRequest()
    message.model_spec.name, message.model_spec.signature_name = "m", signature
    tensor = message.inputs["x"]
    tensor.dtype = 9
    tensor.tensor_shape.dim.add().size = len(values)
    tensor.int64_val.extend(values)
    return message.SerializeToString()


async def predict(channel: Any, data: bytes, timeout: float = 30) -> list[int]:
    method = channel.unary_unary(PREDICT, None, predict_pb2.PredictResponse.FromString)
    response = await method(data, timeout=timeout)
    return list(response.outputs["y"].int64_val)


async def failure(channel: Any, data: bytes, timeout: float = 30) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await predict(channel, data, timeout)
    return caught.value.code(), str(caught.value.details())


def test_a_failure_inside_shows_nothing_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError("/secret/path")

    async def check() -> None:
        async with running(tmp_path, lambda _: DoublingServable(fail)) as (_, _, channel):
            assert await failure(channel, request(1)) == (grpc.StatusCode.INTERNAL, "internal error")

    asyncio.run(check())
    assert "/secret/path" in caplog.text


def test_a_port_that_cannot_be_bound(tmp_path: Path) -> None:
    async def check() -> None:
        app = create_app(ServerSettings.for_model_dir(tmp_path), load=lambda _: DoublingServable())
        server = GrpcServer(app.pipeline, app.repository)
        with refused(ServingError, match="192"):
            await server.start("192.0.2.1", 1)
        await server.stop(1)

    asyncio.run(check())


def test_a_query_on_a_connection_that_is_closed_can_be_sent_again() -> None:
    states = RemoteStates("127.0.0.1:1", 10)
    states.close()
    with pytest.raises(StatusError) as raised:
        states.definitions("m", None, "stable")
    assert raised.value.code is Code.UNAVAILABLE
