"""Sockets to listen on: alone, or shared with other processes of the same server."""

import contextlib
import os
import socket
from collections.abc import Iterator

from tpuembed.errors import ServingError

__all__ = ["bind", "bind_shared", "reserve"]

_BACKLOG = 2048


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket; port 0 is any free one, and `option` chooses another.

    Raises:
        ServingError: the port cannot be bound.
    """
    try:
        return socket.create_server((host, port), family=_family(host, port), backlog=_BACKLOG)
    except OSError as error:
        # create_server puts the address into strerror; a resolver's error number is none of the system's.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ServingError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None


def bind_shared(host: str, port: int) -> socket.socket:
    """A socket that shares its port with others of this kind (SO_REUSEPORT), and takes connections once it listens.

    Raises:
        OSError: the port cannot be bound.
    """
    shared = socket.socket(_family(host, port), socket.SOCK_STREAM)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if shared.family == socket.AF_INET6:
            shared.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as create_server does
        shared.bind((host, port))
    except OSError:
        shared.close()
        raise
    return shared


@contextlib.contextmanager
def reserve(host: str, port: int, option: str) -> Iterator[socket.socket]:
    """Holds a port for processes that share it, for as long as the block runs; takes no connection itself.

    Whoever shares a port finds it taken by nobody who shares it too, another server for one. So it is first bound alone.

    Raises:
        ServingError: see `bind`.
    """
    with bind(host, port, option) as alone:
        address = alone.getsockname()[:2]
    try:
        held = bind_shared(*address)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ServingError(f"cannot share {host} port {address[1]}: {reason}; choose another with {option}") from None
    with held:
        yield held


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
