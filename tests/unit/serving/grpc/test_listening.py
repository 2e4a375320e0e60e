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
from click.testing import CliRunner
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import predict_pb2

from tests.support.messages import refused
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ConfigError, ServingError
from tpuembed_cli.serve import serve
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.tls import TlsSettings
from tpuembed_serving.grpc.listening import UnixSocket, check_socket_path, parse_channel_arguments
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.server import _reserve_grpc_port

HEALTH = "/grpc.health.v1.Health/Check"
PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "grpc.max_connection_age_ms=2000,grpc.lb_policy_name=grpclb",
            (("grpc.max_connection_age_ms", 2000), ("grpc.lb_policy_name", "grpclb")),
        ),
        ("grpc.so_reuseport=1", (("grpc.so_reuseport", 1),)),
        (" grpc.a = -7 , grpc.b=+8", (("grpc.a", -7), ("grpc.b", 8))),
        ("grpc.a=x=y", (("grpc.a", "x=y"),)),
        ("grpc.a=1_0,grpc.b=٣,grpc.c=1.5", (("grpc.a", "1_0"), ("grpc.b", "٣"), ("grpc.c", "1.5"))),
        ("grpc.a=2147483647,grpc.b=-2147483648", (("grpc.a", 2**31 - 1), ("grpc.b", -(2**31)))),
    ],
)
def test_channel_arguments(text: str, arguments: tuple[Any, ...]) -> None:
    assert parse_channel_arguments(text) == arguments


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


def test_the_options_reach_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    monkeypatch.chdir(tmp_path)
    arguments = ("grpc.max_connection_age_ms=5", ("grpc.max_connection_age_ms", 5))
    for dash in ("-", "_"):
        options = [f"--grpc{dash}socket{dash}path", "s", f"--grpc{dash}channel{dash}arguments", arguments[0]]
        result = CliRunner().invoke(serve, [str(tmp_path), *options])
        assert result.exception is None, result.output
    for settings in served:
        assert (settings.grpc_socket_path, settings.grpc_optional) == (tmp_path / "s", False)
        assert settings.grpc_channel_arguments == (arguments[1],)
    assert len(served) == 2


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


def tcp(app: ServingApp) -> str:
    assert app._grpc is not None
    return f"127.0.0.1:{app._grpc._port}"


async def leaves_ready(app: ServingApp, seconds: float) -> bool:
    """True if the server ends the connection of an idle client within `seconds`."""
    async with grpc.aio.insecure_channel(tcp(app)) as channel:
        await channel.unary_unary(HEALTH)(b"", timeout=10)
        changed = channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        try:
            await asyncio.wait_for(changed, seconds)
        except TimeoutError:
            return False
        return True


def test_a_channel_argument_reaches_grpc(tmp_path: Path) -> None:
    async def check() -> None:
        arguments = parse_channel_arguments("grpc.max_connection_age_ms=300")
        async with running(tmp_path, grpc_channel_arguments=arguments) as app:
            assert await leaves_ready(app, 10)
        async with running(tmp_path / "plain") as app:
            assert not await leaves_ready(app, 1)

    asyncio.run(check())


def test_a_limit_of_messages_among_the_arguments_is_the_one_that_counts(tmp_path: Path) -> None:
    async def code(app: ServingApp) -> Any:
        async with grpc.aio.insecure_channel(tcp(app)) as channel:
            try:
                await channel.unary_unary(PREDICT)(b"\x0a\x00" * 100, timeout=20)
            except grpc.aio.AioRpcError as error:
                return error.code()

    async def check() -> None:
        arguments = parse_channel_arguments("grpc.max_receive_message_length=100")
        async with running(tmp_path, grpc_channel_arguments=arguments) as app:
            assert await code(app) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with running(tmp_path / "plain") as app:
            assert await code(app) is not grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(check())


def test_a_socket_answers_through_a_hand_over_and_is_gone_after_the_stop(tmp_path: Path) -> None:
    """Every call opens a connection of its own, from the start to the end of the lame duck."""
    folder = tmp_path / "a b%#?"
    folder.mkdir()
    path = folder / "s"

    async def check() -> None:
        async with running(tmp_path, grpc_socket_path=path) as app:
            assert list(folder.iterdir()) == [path]
            calls = 0

            async def call_until(done: asyncio.Event) -> None:
                nonlocal calls
                while not done.is_set():
                    await predict(address(path))
                    calls += 1

            done = asyncio.Event()
            clients = [asyncio.create_task(call_until(done)) for _ in range(4)]
            await seen(lambda: calls >= 20)
            app.leave(hands_over=True)
            assert app._grpc_leave is not None
            await app._grpc_leave
            before = calls
            await seen(lambda: calls >= before + 20)
            done.set()
            await asyncio.gather(*clients)
            await predict(tcp(app))
            assert list(folder.iterdir()) == [path]
        assert list(folder.iterdir()) == []

    asyncio.run(check())


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


def test_the_socket_of_another_server_stays(tmp_path: Path) -> None:
    """A server that has taken the path meanwhile keeps it."""
    path = tmp_path / "s"

    async def check() -> None:
        async with running(tmp_path, grpc_socket_path=path):
            path.unlink()
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
        assert path.is_socket()

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


def test_the_longest_path_works_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    def path_of(size: int) -> Path:
        return tmp_path / ("s" * (size - len(str(tmp_path)) - 1))

    with pytest.raises(
        ServingError, match=r"the path has 98 bytes. The most is 97\. Choose another path with --grpc-s"
    ):
        check_socket_path(path_of(98))
    path = path_of(97)
    check_socket_path(path)
    unix = UnixSocket(path)
    name = urllib.parse.unquote(unix.next_address().removeprefix("unix:"))
    assert len(name) <= 107
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(name)
        unix.publish()
        assert path.is_socket()
    unix.remove()
    assert list(tmp_path.iterdir()) == []
