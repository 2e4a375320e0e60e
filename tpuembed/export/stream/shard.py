"""Streams one shard: copies rows of a checkpoint to their place in a data file, one chunk at a time.

Every engine runs this code, in a process that imports no TensorFlow. It holds one chunk of rows.
"""

import dataclasses
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointMismatchError, ExportError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.storage.error import ErrorSums
from tpuembed.export.stream.chunk import Chunk
from tpuembed.tensor_bundle import crc

if TYPE_CHECKING:  # TYPE_CHECKING keeps the readers out: the source names its opener
    from tpuembed.checkpoint import Checkpoint

__all__ = [
    "DataFile",
    "ShardResult",
    "Source",
    "ignore",
    "open_once",
    "open_source",
    "peak_rss_bytes",
    "run_shard",
    "write_shard",
]

_Array = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]

# For a write of megabytes, the kernel looks for equally large blocks of contiguous pages. On a virtual machine these
# are untouched pages: this took four times the processor time of writes of this size.
_WRITE_BYTES = 256 << 10
_CHECK_BYTES = 1 << 20


def ignore(*_: object) -> None:
    """Do nothing: the default callback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint as every process opens it for itself.

    Attributes:
        path: argument of the opener.
        fingerprint: the checkpoint's fingerprint when the export was planned.
        options: further arguments of the opener, as JSON.
        opener: `module:function` that opens a path and returns a Checkpoint.
        lasts: another process can open the source later, so an interrupted export can be resumed.
    """

    path: str
    fingerprint: str
    options: str = "{}"
    opener: str = "tpuembed.checkpoint:open_checkpoint"
    lasts: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardResult:
    """The result of a shard that was written.

    Attributes:
        index: index of its task.
        crc32c: of the bytes written, unmasked.
        source_crc32c: of the bytes they were made from, as stored in the checkpoint.
        bytes: number of bytes written.
        seconds: from opening the file to the last write.
        peak_rss_bytes: of the process since it started.
        is_reused: an earlier run had written it; then `source_crc32c` is 0 and `errors` are empty.
        errors: fields of ErrorSums: the differences of stored values from float32.
        source_sums: fields of PartialChecksum by tensor, if the checkpoint offers SummedReads.
        tag: in a store, the ETag of the part with the shard.
    """

    index: int
    crc32c: int
    source_crc32c: int
    bytes: int
    seconds: float
    peak_rss_bytes: int
    is_reused: bool = False
    errors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source_sums: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    tag: str = ""


class DataFile(Protocol):
    """A file that shards are written to."""

    def write(self, data: _Bytes, offset: int) -> None:
        """Write all of `data` at `offset` of the file."""

    def checksum(self, task: ShardTask, on_chunk: Callable[[int], None]) -> int:
        """Return the CRC32C of the bytes at the place of `task`, up to the end of the file."""


def run_shard(
    task: ShardTask,
    source: Source,
    folder: Path,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> ShardResult:
    """Write the rows of `task` into its existing file in `folder`, unless the bytes there have `task.written_crc32c`.

    `on_chunk` is called after every chunk with the bytes written so far. If `checkpoint` is given, it is read, and
    `source` is not opened.

    Raises:
        CheckpointError: the source cannot be read, or is not what the export was planned from.
        ExportError: the file cannot be written.
    """
    with _LocalFile(folder / task.file) as data_file:
        return write_shard(task, source, data_file, on_chunk, checkpoint)


def write_shard(
    task: ShardTask,
    source: Source,
    data_file: DataFile,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> ShardResult:
    """Write the shard into any data file; see `run_shard`."""
    started = time.monotonic()
    is_reused = task.written_crc32c is not None and data_file.checksum(task, on_chunk) == task.written_crc32c
    found: dict[str, Any]
    if is_reused:
        found = {"crc32c": task.written_crc32c, "source_crc32c": 0, "errors": dataclasses.asdict(ErrorSums())}
    else:
        found = _stream(task, checkpoint or open_once(source), data_file, on_chunk)
    return ShardResult(
        index=task.index,
        bytes=task.size,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
        is_reused=is_reused,
        **found,
    )


def open_source(source: Source) -> "Checkpoint":
    """Open the checkpoint.

    Raises:
        CheckpointMismatchError: it has changed since the export was planned.
    """
    module, _, function = source.opener.partition(":")
    checkpoint: Checkpoint = getattr(importlib.import_module(module), function)(
        source.path, **json.loads(source.options)
    )
    if checkpoint.fingerprint() != source.fingerprint:
        checkpoint.close()
        raise CheckpointMismatchError(
            f"checkpoint {source.path}: its files changed while it was being exported. Export it when it is complete."
        )
    return checkpoint


@functools.lru_cache(maxsize=1)
def open_once(source: Source) -> "Checkpoint":
    """Open the checkpoint once per process. It is never closed."""
    return open_source(source)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process in bytes (VmHWM), or 0 if the system does not provide it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _stream(
    task: ShardTask, checkpoint: "Checkpoint", data_file: DataFile, on_chunk: Callable[[int], None]
) -> dict[str, Any]:
    """Write the rows of `task` and return the fields of its ShardResult."""
    chunk = Chunk(task, checkpoint)
    stored_crc = read_crc = written = 0
    step = chunk.rows_at_once
    for start in range(task.start, task.stop, step):
        read, stored = chunk.load(start, min(start + step, task.stop))
        stored_crc = crc.extend(stored_crc, stored)
        read_crc = stored_crc if read is stored else crc.extend(read_crc, read)
        data_file.write(stored, task.file_offset + written)
        written += len(stored)
        on_chunk(written)
    return {
        "crc32c": stored_crc,
        "source_crc32c": read_crc,
        "errors": dataclasses.asdict(chunk.errors),
        "source_sums": {key: (partial.checksum, partial.bytes) for key, partial in chunk.source_sums().items()},
    }


class _LocalFile:
    """An existing file, written at offsets. Errors name the file and the remedy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> "_LocalFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def write(self, data: _Bytes, offset: int) -> None:
        """Write all of `data` at `offset`."""
        rest, position = data.data, offset
        try:
            while rest:
                written = os.pwrite(self._descriptor, rest[:_WRITE_BYTES], position)
                rest, position = rest[written:], position + written
            _start_writeback(self._descriptor, offset, len(data))
        except OSError as error:
            raise self._failed(error) from None

    def checksum(self, task: ShardTask, on_chunk: Callable[[int], None]) -> int:
        """See DataFile."""
        buffer, checksum, done = bytearray(min(task.chunk_bytes, _CHECK_BYTES)), 0, 0
        try:
            while done < task.size:
                piece = memoryview(buffer)[: task.size - done]
                count = os.preadv(self._descriptor, (piece,), task.file_offset + done)
                if not count:
                    break
                checksum, done = crc.extend(checksum, piece[:count]), done + count
                on_chunk(done)
        except OSError as error:
            raise self._failed(error) from None
        return checksum

    def _failed(self, error: OSError) -> ExportError:
        return ExportError(
            f"data file {self._path}: cannot be written: {error.strerror}. Free space or repair the disk."
        )


def _start_writeback(descriptor: int, offset: int, size: int) -> None:
    """Start writing the new bytes to the disk while the next chunk is read.

    Otherwise gigabytes of dirty pages wait for the final fsync, or for the kernel to throttle the writer: this took
    twice the time.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
