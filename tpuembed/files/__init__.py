"""Gives byte access to files on disks and in object stores: sizes, versions, exact ranges, listings.

Every failure raises an OSError with one line as its `strerror`, or EOFError if a file is shorter than the range.
"""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from tpuembed.files.local import FileVersion, LocalFile, finish, flush
from tpuembed.files.remote import (
    IN_FLIGHT_BYTES,
    FilePath,
    RemoteFile,
    UrlPath,
    as_path,
    in_parallel,
    listing,
    subfolders,
)
from tpuembed.files.store_errors import MissingBucketError

__all__ = [
    "IN_FLIGHT_BYTES",
    "ByteFile",
    "ByteStream",
    "FilePath",
    "FileVersion",
    "MissingBucketError",
    "UrlPath",
    "as_path",
    "flush",
    "in_parallel",
    "listing",
    "names_below",
    "open_bytes",
    "open_stream",
    "read_all",
    "subfolders",
    "versions",
]

_STREAM_BUFFER_BYTES = 1 << 20

ByteFile = LocalFile | RemoteFile
"""A file opened for reads of exact ranges. Any thread may read. A failure raises OSError, an early end EOFError."""


def open_bytes(path: FilePath) -> ByteFile:
    """Open a file for reads of exact ranges. Any thread may read."""
    return LocalFile(path) if isinstance(path, Path) else RemoteFile(path)


def versions(paths: Sequence[FilePath]) -> list[FileVersion]:
    """Return size and version of every file. A store is queried in parallel. The first missing file raises."""

    def version(path: FilePath) -> FileVersion:
        return FileVersion.of(path.stat()) if isinstance(path, Path) else path.version()

    is_store = any(isinstance(path, UrlPath) for path in paths)
    return in_parallel(version, paths) if is_store else [version(path) for path in paths]


def names_below(folder: FilePath) -> list[str]:
    """Return the paths inside `folder` of all files below it, with slashes, in order."""
    if isinstance(folder, UrlPath):
        inside = f"{folder.key}/".removeprefix("/")
        return sorted(key.removeprefix(inside) for key in listing(folder) if not key.endswith("/"))
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in files)


def read_all(requests: Iterable[tuple[ByteFile, Iterable[tuple[int, memoryview]]]]) -> None:
    """Fill every (offset, buffer) from its file: sequentially from a disk, in parallel from a store."""
    with finish() as pending:
        for file, ranges in requests:
            pending += file.begin(ranges)


def open_stream(path: FilePath) -> BinaryIO:
    """Open a file for sequential and seeking reads, as `open(path, "rb")` does."""
    if isinstance(path, Path):
        return open(path, "rb")
    file = open_bytes(path)
    return cast(
        BinaryIO, io.BufferedReader(ByteStream(file.read_into, file.version.size, file.close), _STREAM_BUFFER_BYTES)
    )


class ByteStream(io.RawIOBase):
    """Bytes that are read by range, with a position."""

    def __init__(
        self, read_into: Callable[[int, memoryview], None], size: int, close: Callable[[], None] = lambda: None
    ) -> None:
        """Read from `size` bytes with `read_into`, and end with `close`."""
        self._read_into, self._size, self._close, self._position = read_into, size, close, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, which may be behind the end, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        """Return the bytes from the position to the end."""
        out = bytearray(max(0, self._size - self._position))
        self.readinto(out)
        return bytes(out)

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        """Fill `buffer` as far as there are bytes, and return their number."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        if len(view):
            self._read_into(self._position, view)
            self._position += len(view)
        return len(view)

    def close(self) -> None:
        """Close the file."""
        self._close()
        super().close()
