"""Calls around the model, with a servable that needs no SavedModel."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2

from tests.support.messages import refused
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ServingError
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc.remote_calls import RemoteStates
from tpuembed_serving.grpc.server import GrpcServer
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.tf_serving import shards

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


@pytest.mark.nightly
def test_an_idle_front_keeps_its_connection(tmp_path: Path) -> None:
    """The server closed connections of `serve --shards` after three pings."""

    async def check() -> None:
        async with running(tmp_path, lambda _: DoublingServable()) as (_, server, _channel):
            address = f"127.0.0.1:{server._port}"
            async with grpc.aio.insecure_channel(address, options=shards._CONNECTIONS) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="m"))
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(watch.read(), 150)

    asyncio.run(check())


def test_a_port_that_cannot_be_bound(tmp_path: Path) -> None:
    async def check() -> None:
        app = create_app(ServerSettings.for_model_dir(tmp_path), load=lambda _: DoublingServable())
        server = GrpcServer(app.pipeline, app.repository)
        with refused(ServingError, match="192"):
            await server.start("192.0.2.1", 1)
        await server.stop(1)

    asyncio.run(check())


@pytest.mark.parametrize(("shard_id", "is_known"), [("", True), ("x-1", True), ("", False)])
def test_a_server_tells_of_which_export_its_version_is(tmp_path: Path, shard_id: str, is_known: bool) -> None:
    """One that forwards to TensorFlow Serving does not know it, and says so."""
    servable = DoublingServable()
    servable.signatures = {
        name: dataclasses.replace(each, shard_id=shard_id, is_export_known=is_known)
        for name, each in servable.signatures.items()
    }

    async def check() -> None:
        async with running(tmp_path, lambda _: servable) as (_, server, _channel):
            states = RemoteStates(f"127.0.0.1:{server._port}", 10)
            _, (signatures, _) = await asyncio.to_thread(states.definitions, "m", 7)
            states.close()
        found = signatures["serving_default"]
        assert (found.shard_id, found.is_export_known) == (shard_id, is_known)

    asyncio.run(check())


def test_a_query_on_a_connection_that_was_replaced_can_be_sent_again() -> None:
    states = RemoteStates("127.0.0.1:1", 10)
    states.close()
    with pytest.raises(StatusError) as raised:
        states.definitions("m", None, "stable")
    assert raised.value.code is Code.UNAVAILABLE


def test_of_tensorflow_serving_no_export_is_known() -> None:
    """It answers without the metadata by which servers of tpuembed are told."""

    async def metadata(_: bytes, __: Any) -> bytes:
        answer = get_model_metadata_pb2.GetModelMetadataResponse()
        signatures = get_model_metadata_pb2.SignatureDefMap()
        signatures.signature_def["serving_default"].method_name = "tensorflow/serving/predict"
        answer.metadata["signature_def"].Pack(signatures)
        return bytes(answer.SerializeToString())

    async def check() -> None:
        server = grpc.aio.server()
        methods = {"GetModelMetadata": grpc.unary_unary_rpc_method_handler(metadata)}
        service = "tensorflow.serving.PredictionService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        states = RemoteStates(f"127.0.0.1:{port}", 10)
        _, (signatures, _) = await asyncio.to_thread(states.definitions, "m", 7)
        states.close()
        await server.stop(None)
        found = signatures["serving_default"]
        assert (found.shard_id, found.is_export_known, found.is_of_no_export) == ("", False, False)

    asyncio.run(check())
