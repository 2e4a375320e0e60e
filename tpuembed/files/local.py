"""Files of the operating system, read with `preadv` straight into their buffers; and what they share with objects in stores."""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["FileVersion", "LocalFile", "Pending", "finish", "flush"]

Pending = Sequence[concurrent.futures.Future[None]]
"""Reads that have been started."""
_MAX_READ_BYTES: Final = 1 << 30
"""Linux reads at most 2 GiB - 4 KiB at a time."""


@dataclasses.dataclass(frozen=True)
class FileVersion:
    """The size of a file, and a tag that changes with its content.

    Attributes:
        size: in bytes.
        tag: the modification time in nanoseconds on a disk, the ETag in a store.
    """

    size: int
    tag: str

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """Return the version of a file on a disk."""
        return cls(status.st_size, str(status.st_mtime_ns))


@contextlib.contextmanager
def finish() -> Iterator[list[concurrent.futures.Future[None]]]:
    """Return a context with a list for pending reads. It waits for them at its end and raises the first failure.

    Either way, no thread writes into a buffer afterwards.
    """
    pending: list[concurrent.futures.Future[None]] = []
    try:
        yield pending
        for future in pending:
            future.result()
    finally:
        for future in pending:
            future.cancel()
        concurrent.futures.wait(pending)


class LocalFile:
    """A file on a disk.

    Attributes:
        version: its size and modification time when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.version = FileVersion.of(os.fstat(self._descriptor))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, contiguous bytes, with the bytes at `offset`."""
        while len(out):
            try:
                count = os.preadv(self._descriptor, (out[:_MAX_READ_BYTES],), offset)
            except OSError as error:  # this error names no file
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if not count:
                raise EOFError(f"{self._path}: ends at byte {offset}, {len(out)} bytes early")
            out, offset = out[count:], offset + count

    def begin(self, ranges: Iterable[tuple[int, memoryview]]) -> Pending:
        """Fill every buffer with the bytes at its offset now, one after another. Nothing is pending afterwards."""
        # Many ranges are short. The usual case makes one call each; `read_into` handles all other cases.
        preadv, descriptor = os.preadv, self._descriptor
        for offset, out in ranges:
            try:
                done = len(out) <= _MAX_READ_BYTES and preadv(descriptor, (out,), offset) == len(out)
            except OSError:
                done = False
            if not done:
                self.read_into(offset, out)
        return ()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def flush(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
