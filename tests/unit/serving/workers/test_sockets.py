"""Ports: who may share one, and what is left of the last server."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import wait_for
from tpuembed.errors import ServingError
from tpuembed_serving.workers.sockets import (
    bind,
    bind_shared,
    reserve,
)

HOSTS = ["127.0.0.1", "::1", "localhost"]


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    with bind_shared(host, port) as one:
        one.listen(64)
        yield one


def leave_a_connection_behind(host: str, port: int) -> None:
    """The listening side closes first and keeps the connection in TIME_WAIT."""
    with listening(host, port) as listener, socket.create_connection(listener.getsockname()[:2]) as client:
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""


@pytest.mark.parametrize("host", HOSTS)
def test_a_port_can_be_shared_right_after_the_last_server(host: str) -> None:
    with bind(host, 0, "--port") as free:
        port = free.getsockname()[1]
    leave_a_connection_behind(host, port)
    with reserve(host, port, "--port"), listening(host, port), listening(host, port) as one:
        socket.create_connection(one.getsockname()[:2]).close()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("with_listeners", [True, False])
def test_a_port_that_another_server_shares_is_in_use(host: str, with_listeners: bool) -> None:
    """Also while its processes are being started, and nobody listens yet."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(reserve(host, 0, "--port"))
        port = held.getsockname()[1]
        if with_listeners:
            stack.enter_context(listening(host, port))
        with refused(ServingError, match=f"port {port}"):
            bind(host, port, "--port")
        with refused(ServingError), reserve(host, port, "--port"):
            pass


@pytest.mark.parametrize("_", range(20))
def test_of_many_that_reserve_a_port_at_once_one_gets_it(_: int) -> None:
    with bind("127.0.0.1", 0, "--port") as free:
        port = free.getsockname()[1]
    begin, done = threading.Barrier(8), threading.Event()
    got: list[int] = []
    failed: list[str] = []

    def one() -> None:
        begin.wait()
        try:
            with reserve("127.0.0.1", port, "--port"):
                got.append(port)
                done.wait(30)
        except ServingError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(got) + len(failed) == 8)
    done.set()
    for thread in threads:
        thread.join()
    assert len(got) <= 1, "two servers share a port"
    assert all("Address already in use" in text for text in failed)
