"""Where gRPC listens besides its port, a Unix socket, and the arguments of its connections."""

import os
import socket
import stat
import urllib.parse
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, ServingError

__all__ = ["ChannelArgument", "UnixSocket", "check_socket_path", "parse_channel_arguments"]

ChannelArgument = tuple[str, int | str]

_OPTION: Final = "--grpc-socket-path"
_LONGEST_BYTES: Final = 107 - len(".4194304-2")
"""A socket's address has room for 107 bytes, and UnixSocket adds the process ID and a number."""
_CONNECT_SECONDS: Final = 2.0


def parse_channel_arguments(text: str) -> tuple[ChannelArgument, ...]:
    """Return gRPC's channel arguments. `text` is KEY=VALUE,KEY=VALUE, as in TensorFlow Serving (server.cc).

    An integer stands for an integer, and any other value for a string.

    Raises:
        ConfigError: an argument is malformed, or the server cannot honour it.
    """
    return tuple(_parse_argument(argument) for argument in text.split(","))


def _parse_argument(argument: str) -> ChannelArgument:
    key, equals, text = (part.strip() for part in argument.partition("="))
    if not (key and equals and text):
        raise ConfigError(f"gRPC channel argument {argument!r} is not KEY=VALUE. Give KEY=VALUE,KEY=VALUE")
    if not key.startswith("grpc."):
        raise ConfigError(
            f"gRPC channel argument {key!r} does not begin with 'grpc.', as all of gRPC's do. Correct its name"
        )
    try:
        value: int | str = int(text) if text.isascii() and "_" not in text else text
    except ValueError:
        value = text
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise ConfigError(f"gRPC channel argument {key} is {value}. Give an integer from {-(2**31)} to {2**31 - 1}")
    if key == "grpc.so_reuseport" and value == 0:
        raise ConfigError(
            "gRPC channel argument grpc.so_reuseport is 0. The server shares its port with its successor while it stops. "
            "Leave the argument out"
        )
    return key, value


def check_socket_path(path: Path) -> bool:
    """Check that a server may listen at `path`. Returns True if it takes the path of another server that still runs.

    Raises:
        ServingError: the path is too long, its folder is missing or not writable, or it is something else than a socket.
    """
    size = len(os.fsencode(path))
    if size > _LONGEST_BYTES:
        raise _refused(path, f"the path has {size} bytes. The most is {_LONGEST_BYTES}")
    if not path.parent.is_dir():
        raise _refused(path, f"{path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refused(path, f"the folder {path.parent} is not writable")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise _refused(path, "it exists and is not a socket. It was not changed")
    return _is_in_use(path)


class UnixSocket:
    """The path at which one server after another of this process listens.

    gRPC removes the file of a server that stops. So each server listens at a name of its own, which is then renamed to
    the path. A client that connects reaches the newest one, and the path always exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = path
        self._count = 0
        self._inode = (0, 0)

    def next_address(self) -> str:
        """Return gRPC's address for the next server to listen at, before `publish`.

        Raises:
            ServingError: see `check_socket_path`.
        """
        if not self._is_ours():
            check_socket_path(self.path)
        self._count += 1
        self._name = self.path.with_name(f"{self.path.name}.{os.getpid()}-{self._count}")
        return f"unix:{urllib.parse.quote(os.fsencode(self._name))}"

    def publish(self) -> None:
        """Let new connections to the path reach the server of the last `next_address`."""
        found = self._name.stat()
        self._name.replace(self.path)
        self._inode = (found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove the path, unless another server has replaced it. New connections are refused from then on."""
        if self._name != self.path:
            self._name.unlink(missing_ok=True)
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._inode


def _is_in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # a server that is busy, or one of another user
    return True


def _refused(path: Path, reason: str) -> ServingError:
    return ServingError(f"cannot listen on {path} for gRPC: {reason}. Choose another path with {_OPTION}")
