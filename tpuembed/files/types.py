"""The interface of an open file, local or remote."""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

__all__ = ["ByteFile", "FileVersion", "MissingBucketError", "Pending", "finish"]

Pending = Sequence[concurrent.futures.Future[None]]
"""Reads that have been started."""


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


class MissingBucketError(FileNotFoundError):
    """The bucket of a URL does not exist."""


class ByteFile(Protocol):
    """A file opened for reads of exact ranges. Any thread may read. A failure raises OSError, an early end EOFError."""

    @property
    def version(self) -> FileVersion:
        """Return the version of the file when it was opened."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, contiguous bytes, with the bytes at `offset`."""

    def begin(self, ranges: Iterable[tuple[int, memoryview]]) -> Pending:
        """Fill every buffer with the bytes at its offset: on a disk at once, in a store in parallel.

        The buffers are full when all returned futures are done.
        """

    def close(self) -> None:
        """Close the file."""


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
