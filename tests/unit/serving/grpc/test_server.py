"""Calls around the model: deadlines, cancelled calls, failures, a stop; with a servable that needs no SavedModel."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
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
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.servable import Merging
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc import arrivals
from tpuembed_serving.grpc.remote_calls import RemoteStates
from tpuembed_serving.grpc.server import GrpcServer, truncated
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.tf_serving import shards

KEY = "k" * 32
PREDICT = "/tensorflow.serving.PredictionService/Predict"


class Blocking:
    """A servable whose runs wait until they may go on, counted."""

    def __init__(self) -> None:
        self.runs = 0
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.servable = DoublingServable(self._run)

    def _run(self) -> None:
        self.runs += 1
        self.entered.set()
        assert self.go_on.wait(30)


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


class Watched:
    """Counts the runs that an executor has queued, and has an event for the first that failed or was given up."""

    def __init__(self, app: ServingApp, patch: pytest.MonkeyPatch) -> None:
        self.came = asyncio.Semaphore(0)
        self.given_up = asyncio.Event()
        submit, give_up = app.executor.submit, app.executor.give_up

        def submitted(servable: Any, signature: Any, inputs: Any, on_outcome: Any, **options: Any) -> Any:
            self.came.release()

            def noted(outcome: Any) -> None:
                if isinstance(outcome, StatusError):
                    self.given_up.set()
                on_outcome(outcome)

            return submit(servable, signature, inputs, noted, **options)

        def dropped(run: Any) -> None:
            self.given_up.set()
            give_up(run)

        patch.setattr(app.executor, "submit", submitted)
        patch.setattr(app.executor, "give_up", dropped)


def test_a_call_whose_deadline_passed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        model = Blocking()
        async with running(tmp_path, lambda _: model.servable, run_threads=1) as (app, _, channel):
            watched = Watched(app, monkeypatch)
            first = asyncio.create_task(predict(channel, request(1)))
            await asyncio.to_thread(model.entered.wait)
            await watched.came.acquire()
            code, _ = await failure(channel, request(2), timeout=0.5)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            if not watched.came.locked():  # it came in time, and waits
                await watched.given_up.wait()
            model.go_on.set()
            assert await first == [2]
            assert await predict(channel, request(3)) == [6]
            assert model.runs == 2

    asyncio.run(check())


def test_a_call_that_its_client_gave_up_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        model = Blocking()
        async with running(tmp_path, lambda _: model.servable, run_threads=1) as (app, _, channel):
            watched = Watched(app, monkeypatch)
            first = asyncio.create_task(predict(channel, request(1)))
            await asyncio.to_thread(model.entered.wait)
            second = asyncio.create_task(predict(channel, request(2)))
            third = asyncio.create_task(predict(channel, request(3)))
            for _ in range(3):
                await watched.came.acquire()
            second.cancel()
            await watched.given_up.wait()
            model.go_on.set()
            assert (await first, await third) == ([2], [6])
            assert model.runs == 2

    asyncio.run(check())


def test_a_failure_inside_shows_nothing_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError("/secret/path")

    async def check() -> None:
        async with running(tmp_path, lambda _: DoublingServable(fail)) as (_, _, channel):
            assert await failure(channel, request(1)) == (grpc.StatusCode.INTERNAL, "internal error")

    asyncio.run(check())
    assert "/secret/path" in caplog.text


def test_a_method_that_is_not_there(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path, lambda _: DoublingServable()) as (_, _, channel):
            method = channel.unary_unary("/tensorflow.serving.PredictionService/PredictStreamed")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"", timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(check())


def test_a_stop_lets_calls_finish_and_is_seen_by_health_checks(tmp_path: Path) -> None:
    async def check() -> None:
        model = Blocking()
        async with running(tmp_path, lambda _: model.servable) as (_, server, channel):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            of_model = health.Watch(health_pb2.HealthCheckRequest(service="m"))
            assert (await of_model.read()).status == health_pb2.HealthCheckResponse.SERVING
            of_none = health.Watch(health_pb2.HealthCheckRequest(service="none"))
            assert (await of_none.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            call = asyncio.create_task(predict(channel, request(4)))
            await asyncio.to_thread(model.entered.wait)
            stop = asyncio.create_task(server.stop(30))
            for one in (watch, of_model):
                assert (await one.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                one.cancel()
            of_none.cancel()
            await asyncio.sleep(0.1)  # far less than what calls are given to finish
            assert not stop.done()
            model.go_on.set()
            assert await call == [8]
            await stop

    asyncio.run(check())


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


def test_health_of_a_model_that_is_not_available(tmp_path: Path) -> None:
    def load(_: Path) -> DoublingServable:
        raise OSError("no such model")

    async def check() -> None:
        make_version(tmp_path / "m", 1)
        app = create_app(ServerSettings.for_model_dir(tmp_path / "m", poll_seconds=0.02), load=load)
        server = GrpcServer(app.pipeline, app.repository)
        port = await server.start("127.0.0.1", 0)
        app.repository.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(30):
                while not app.repository.statuses("m"):
                    await asyncio.sleep(0.01)
            reply = await health.Check(health_pb2.HealthCheckRequest(service="m"), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.stop(1)
        await asyncio.to_thread(app.repository.stop)

    asyncio.run(check())


def test_a_port_that_cannot_be_bound(tmp_path: Path) -> None:
    async def check() -> None:
        app = create_app(ServerSettings.for_model_dir(tmp_path), load=lambda _: DoublingServable())
        server = GrpcServer(app.pipeline, app.repository)
        with refused(ServingError, match="192"):
            await server.start("192.0.2.1", 1)
        await server.stop(1)

    asyncio.run(check())


def test_a_text_is_cut_by_bytes() -> None:
    assert truncated("x" * 1024) == "x" * 1024
    assert truncated("x" * 1025) == "x" * 1024 + "...TRUNCATED"
    assert truncated("\u00e9" * 600) == "\u00e9" * 512 + "...TRUNCATED"
    assert truncated("\udcff") == "\ufffd"


def test_the_service_knows_no_transport() -> None:
    """A model's status is what both ask for."""
    app = create_app(ServerSettings(models=()), load=lambda _: DoublingServable())
    with pytest.raises(ServingError, match="Could not find any versions of model "):
        app.pipeline.service.status(ModelSpec("none"))


def test_calls_of_several_clients_share_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC delivers them one by one. As many were in progress before."""

    async def check() -> None:
        model, sizes = Blocking(), list[int]()
        model.servable.merging = lambda signature: Merging(is_proven=True)  # type: ignore[method-assign]  # noqa: ARG005
        async with running(tmp_path, lambda _: model.servable) as (app, _, channel):
            watched = Watched(app, monkeypatch)
            calls = [asyncio.create_task(predict(channel, request(number))) for number in range(8)]
            for _ in calls:
                await watched.came.acquire()
            model.go_on.set()
            await asyncio.gather(*calls)
            assert isinstance(app.executor, ModelExecutor)
            app.executor.watch = lambda requests, *_: sizes.append(len(requests))
            monkeypatch.setattr(arrivals, "_LONGEST_SECONDS", 20.0)
            monkeypatch.setattr(arrivals, "_BUSY_SHARE", -1.0)
            found = await asyncio.gather(*(predict(channel, request(number)) for number in range(8)))
            assert found == [[2 * number] for number in range(8)]
            assert sizes[0] == 8  # a request whose value is new may run again

    asyncio.run(check())


def test_calls_that_have_ended_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered, failed and cancelled ones, and one without a key."""
    (tmp_path / "keys").write_text(KEY)
    keyed = functools.partial(running, security=SecuritySettings(api_keys=ApiKeys.read(tmp_path / "keys")))

    async def check() -> None:
        model = Blocking()
        async with keyed(tmp_path, lambda _: model.servable) as (app, server, channel):
            watched, key = Watched(app, monkeypatch), (("x-api-key", KEY),)
            ask = channel.unary_unary(PREDICT)
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(request(1))
            assert server._arrivals._announced == 0
            calls = [ask(request(number), metadata=key) for number in range(3)]
            for _ in calls:
                await watched.came.acquire()
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(request(1, signature="none"), metadata=key)
            calls[0].cancel()
            await watched.given_up.wait()
            model.go_on.set()
            await asyncio.gather(*calls[1:])
            assert (server._arrivals._in_progress, server._arrivals._announced) == (0, 0)

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
