"""Listening sockets: exclusive, or shared by the processes of one server. Closes them without losing a connection."""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tpuembed.errors import ServingError

__all__ = ["bind", "bind_shared", "listeners_of_port", "refuse_new_connections", "reserve", "waiting_connections"]

_BACKLOG = 2048
_SO_ATTACH_FILTER: Final = 26
_TCP_INFO_BYTES: Final = 104
_UNACKED_OFFSET: Final = 24
"""Offset of tcpi_unacked in struct tcp_info (linux/tcp.h): a listening socket's number of connections to accept."""
_DROP_SYN: Final = struct.pack("HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0xFFFFFFFF)
"""A socket filter (linux/filter.h): load byte 13 of the TCP header, the flags; drop the packet if SYN is set."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket. Port 0 is any free port. `option` is the command line option that chooses another.

    Raises:
        ServingError: the port cannot be bound.
    """
    try:
        return socket.create_server((host, port), family=_family(host, port), backlog=_BACKLOG)
    except OSError as error:
        # create_server puts the address into strerror. A resolver's error number is not an errno.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ServingError(
            f"cannot listen on {host} port {port}: {reason}. Choose another port with {option}"
        ) from None


def bind_shared(host: str, port: int) -> socket.socket:
    """Return a bound socket that shares its port with others of this kind (SO_REUSEPORT). It does not listen yet.

    SO_REUSEADDR allows to bind the port while connections of the last server are still in TIME_WAIT.

    Raises:
        OSError: the port cannot be bound.
    """
    shared = socket.socket(_family(host, port), socket.SOCK_STREAM)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """Reserve a port for sockets of `bind_shared` inside the block. The reserving socket accepts no connection.

    Another server must not share the port. So an exclusive bind comes first, which fails if the port is in use. The shared
    socket is bound before the exclusive one is closed. SO_REUSEADDR is then unset: two sockets that have it and do not
    listen may bind one port, so another server's bind would succeed.

    Raises:
        ServingError: see `bind`.
    """
    with bind(host, port, option) as alone:
        address = alone.getsockname()[:2]
        try:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held = bind_shared(*address)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            text = f"cannot share {host} port {address[1]}: {reason}. Choose another port with {option}"
            raise ServingError(text) from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    with held:
        yield held


def listeners_of_port(port: int) -> list[socket.socket]:
    """Return copies of this process's sockets that listen on a port. Empty if /proc is missing."""
    found: list[socket.socket] = []
    try:
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []
    for descriptor in descriptors:
        if any(descriptor == one.fileno() for one in found):  # reuses the number of the closed /proc/self/fd
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed in the meantime
            continue
        try:
            one = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        if _is_listener(one, port):
            found.append(one)
        else:
            one.close()
    return found


def _is_listener(one: socket.socket, port: int) -> bool:
    try:
        return (
            one.family in (socket.AF_INET, socket.AF_INET6)
            and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and one.getsockname()[1] == port
        )
    except OSError:
        return False


def refuse_new_connections(listener: socket.socket) -> None:
    """Drop the first packet of every new connection from now on. Connections that have begun can still be accepted.

    Closing a listening socket resets its connections that are not accepted yet, though clients believe them connected.
    With this filter and an empty queue, it can be closed without a reset. A client repeats its first packet after a second,
    and then reaches a closed port or another listening socket. On other systems than Linux nothing is dropped.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    count = len(_DROP_SYN) // 8
    with contextlib.suppress(OSError):  # a sandbox without socket filters
        filtered = struct.pack("HP", count, ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)


def waiting_connections(listener: socket.socket) -> int:
    """Return how many connections of a listening socket wait to be accepted, or 0 if the system does not report it."""
    try:
        found = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("I", found, _UNACKED_OFFSET)[0])
    except (AttributeError, OSError, struct.error):
        return 0


def _family(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except UnicodeError:  # no host is called so, and Python cannot encode it
        raise socket.gaierror(socket.EAI_NONAME, "a part of this name is empty, or longer than 63 characters") from None
