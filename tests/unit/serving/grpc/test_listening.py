"""Where gRPC listens besides its port: a Unix socket, and the arguments of its connections."""

import asyncio
import contextlib
import dataclasses
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import predict_pb2

from tests.support.messages import refused
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ConfigError, ServingError
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.tls import TlsSettings
from tpuembed_serving.grpc.listening import check_socket_path, parse_channel_arguments
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.server import _reserve_grpc_port

PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "grpc.a=1,,grpc.b=2",
        "grpc.a",
        "grpc.a=",
        "=1",
        "max_connection_age_ms=1",
        "grpc.a=2147483648",
        "grpc.so_reuseport=0",
    ],
)
def test_channel_arguments_that_are_refused(text: str) -> None:
    with refused(ConfigError):
        parse_channel_arguments(text)


def test_settings_that_contradict_the_options(tmp_path: Path) -> None:
    with refused(ConfigError, match="grpc_port"):
        ServerSettings.for_model_dir(tmp_path, grpc_socket_path=tmp_path / "s")
    with refused(ConfigError, match="workers is 2"):
        ServerSettings.for_model_dir(tmp_path, grpc_port=0, grpc_socket_path=tmp_path / "s", workers=2)
    limit = parse_channel_arguments("grpc.max_receive_message_length=9")
    with refused(ConfigError, match="max_body_bytes"):
        ServerSettings.for_model_dir(tmp_path, grpc_port=0, grpc_channel_arguments=limit, max_body_bytes=9)


def test_a_server_with_a_socket_does_not_start_without_its_port(tmp_path: Path) -> None:
    """The default port is optional, but not if the operator asked for gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServerSettings.for_model_dir(tmp_path, grpc_port=port, grpc_optional=True)
        with _reserve_grpc_port(settings) as (found, fault):
            assert found is None
            assert "Choose another port" in fault
        settings = dataclasses.replace(settings, grpc_socket_path=tmp_path / "s")
        with refused(ServingError, match=f"port {port}"), _reserve_grpc_port(settings):
            pass


async def seen(condition: Callable[[], bool]) -> None:
    """Return once the condition holds, within 30 seconds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[ServingApp]:
    """An application whose gRPC listens."""
    make_version(folder / "m", 7)
    settings = ServerSettings.for_model_dir(folder / "m", grpc_port=0, poll_seconds=0.02, **options)
    app = create_app(settings, load=lambda _: DoublingServable())
    await app.start_grpc()
    app.repository.start()
    await seen(lambda: app.repository.ready)
    try:
        yield app
    finally:
        await app.stop_grpc()
        app.executor.close()
        await asyncio.to_thread(app.repository.stop)


def address(path: Path) -> str:
    return f"unix:{urllib.parse.quote(str(path))}"


async def predict(target: str, authority: Path | None = None) -> None:
    """A call over a connection of its own, with TLS if there is the file of an authority."""
    message = predict_pb2.PredictRequest()
    message.model_spec.name = "m"
    message.inputs["x"].CopyFrom(tensor_pb2.TensorProto(dtype=9, int64_val=[3], tensor_shape={"dim": [{"size": 1}]}))
    if authority is None:
        opened = grpc.aio.insecure_channel(target)
    else:
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        opened = grpc.aio.secure_channel(target, credentials, [("grpc.ssl_target_name_override", "localhost")])
    async with opened as channel:
        method = channel.unary_unary(PREDICT, None, predict_pb2.PredictResponse.FromString)
        response = await method(message.SerializeToString(), timeout=20)
    assert list(response.outputs["y"].int64_val) == [6]


def test_tls_covers_the_socket(tmp_path: Path) -> None:
    authority, path = trustme.CA(), tmp_path / "s"
    authority.cert_pem.write_to_path(tmp_path / "ca")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    security = SecuritySettings(tls=TlsSettings(certificate=tmp_path / "pem", key=tmp_path / "pem"))

    async def check() -> None:
        async with running(tmp_path, grpc_socket_path=path, security=security):
            await predict(address(path), tmp_path / "ca")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await predict(address(path))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(check())


def test_a_socket_that_is_there_already_is_replaced(tmp_path: Path) -> None:
    """As in TensorFlow Serving: of a server that runs, and of one that was killed."""
    path = tmp_path / "s"

    async def check() -> None:
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        assert not check_socket_path(path)
        async with running(tmp_path / "one", grpc_socket_path=path) as app:
            assert check_socket_path(path)
            async with running(tmp_path / "two", grpc_socket_path=path):
                await app.stop_grpc()
                await predict(address(path))
        assert not path.exists()

    asyncio.run(check())


def test_paths_that_are_refused(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("mine")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        with refused(ServingError):
            check_socket_path(path)
    assert file.read_text() == "mine"
    with refused(ServingError):
        check_socket_path(tmp_path / "none" / "s")
    assert not check_socket_path(tmp_path / "free")
