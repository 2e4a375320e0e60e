"""Sockets to listen on: alone, or shared with other processes of the same server; and how one is closed without a loss."""

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
"""Of tcpi_unacked in struct tcp_info (linux/tcp.h), which has the length of a listening socket's accept queue."""
_DROP_SYN: Final = struct.pack("HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0xFFFFFFFF)
"""A socket filter (linux/filter.h): load byte 13 of the TCP header, its flags; return 0, drop, if SYN is set, else keep all."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """Returns a listening socket; port 0 is any free one, and `option` chooses another.

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
    """Returns a socket that shares its port with others of this kind (SO_REUSEPORT), and takes connections once it listens.

    Connections of the last server on this port may still be in TIME_WAIT: SO_REUSEADDR lets the port be bound all the same.

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
    """Holds a port for sockets of `bind_shared`, for as long as the block runs; takes no connection itself.

    Another server must not share the port. So it is first bound alone, which fails if anybody else has it, and is held before
    that socket is closed. SO_REUSEADDR is taken back once the port is held: two sockets that both have it and do not listen
    may have one port, and another server's first bind would succeed.

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
            text = f"cannot share {host} port {address[1]}: {reason}; choose another with {option}"
            raise ServingError(text) from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    with held:
        yield held


def listeners_of_port(port: int) -> list[socket.socket]:
    """Returns copies of this process's sockets that listen on a port, whoever opened them; empty where /proc is missing."""
    found: list[socket.socket] = []
    try:
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []
    for descriptor in descriptors:
        if any(descriptor == one.fileno() for one in found):  # the number of the closed /proc/self/fd, used again
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        try:
            one = socket.socket(fileno=copy)
        except OSError:  # no socket
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
    """Drop the first packet of every new connection from now on; those that have begun are completed and can be accepted.

    A listening socket that is closed resets what it has not accepted, which clients have taken for connected. Once it drops
    first packets and its queue is empty it can be closed without that. A client sends its first packet again after a second,
    and then meets a closed port or another listening socket. Elsewhere than on Linux nothing is dropped.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    count = len(_DROP_SYN) // 8
    with contextlib.suppress(OSError):  # a sandbox without socket filters
        filtered = struct.pack("HP", count, ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)


def waiting_connections(listener: socket.socket) -> int:
    """Returns how many connections of a listening socket wait to be accepted; 0 where the system does not say."""
    try:
        found = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("I", found, _UNACKED_OFFSET)[0])
    except (AttributeError, OSError, struct.error):
        return 0


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
