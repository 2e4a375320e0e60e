"""What every open file offers, wherever it lies."""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

__all__ = ["ByteFile", "FileVersion", "MissingBucketError", "Pending", "finish"]

Pending = Sequence[concurrent.futures.Future[None]]
"""Reads under way."""


@dataclasses.dataclass(frozen=True)
class FileVersion:
    """How many bytes a file has, and what changes when they do.

    Attributes:
        size: in bytes.
        tag: the time of change in nanoseconds on a disk, the ETag in a store.
    """

    size: int
    tag: str

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """That of a file on a disk."""
        return cls(status.st_size, str(status.st_mtime_ns))


class MissingBucketError(FileNotFoundError):
    """A URL names a bucket that the store does not have."""


class ByteFile(Protocol):
    """A file opened for reads of exact ranges; any thread may read. A failure raises OSError, an early end EOFError."""

    @property
    def version(self) -> FileVersion:
        """As it was when the file was opened."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, contiguous bytes, with those at `offset`."""

    def read_ranges(self, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fill every buffer with the bytes at its offset: on a disk in turn, in a store in parallel."""

    def begin(self, ranges: Iterable[tuple[int, memoryview]]) -> Pending:
        """Start `read_ranges`; the buffers are full when all that is returned is done. On a disk that is at once."""

    def close(self) -> None:
        """Close it; reading is over."""


@contextlib.contextmanager
def finish() -> Iterator[list[concurrent.futures.Future[None]]]:
    """A list for what is begun inside. On leaving all of it is done, or the first failure is raised.

    Either way nobody writes into a buffer any more.
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
