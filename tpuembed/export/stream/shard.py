"""Streams shards: copies rows of a checkpoint to their place in a data file, one chunk at a time.

It runs in a process that imports no TensorFlow and holds one chunk of rows. A batch consists of shards that are
adjacent in one file. The process that assigns it makes its `Target` at that moment, in JSON values. In a folder a batch
is one shard. In a store it is one part of an upload.
"""

import dataclasses
import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig
from tpuembed.errors import CheckpointMismatchError, ExportError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.storage.error import ErrorSums, sample_step
from tpuembed.export.storage.formats import SOURCE_DTYPES, RowEncoder, first_not_finite
from tpuembed.formats.tensor_bundle import crc
from tpuembed.manifest.storages import STORAGES, UnstorableRowError

if TYPE_CHECKING:  # TYPE_CHECKING keeps the readers out: the source names its opener
    from tpuembed.checkpoint import Checkpoint
    from tpuembed.checkpoint.types import PartialChecksum

__all__ = [
    "Batch",
    "ShardResult",
    "Source",
    "Target",
    "check_unchanged",
    "flush_data",
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
        opener: `module:function` that opens a path and returns a Checkpoint, by its owner. Empty for `open_checkpoint`.
        lasts: another process can open the source later, so an interrupted export can be resumed.
    """

    path: str
    fingerprint: str
    options: str = "{}"
    opener: str = ""
    lasts: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardResult:
    """The result of a shard that was written.

    Attributes:
        index: index of its task.
        crc32c: of the bytes written, unmasked.
        source_crc32c: of the bytes they were made from, as stored in the checkpoint.
        bytes: number of bytes written.
        peak_rss_bytes: of the process since it started.
        is_reused: an earlier run had written it; then `source_crc32c` is 0 and `errors` are empty.
        errors: fields of ErrorSums: the differences of stored values from float32.
        source_sums: fields of PartialChecksum by tensor, if the checkpoint has them; see Checksums.reader.
        tag: in a store, the ETag of the part with the shard.
        is_finite: every value of the source was checked, and is finite.
    """

    index: int
    crc32c: int
    source_crc32c: int
    bytes: int
    peak_rss_bytes: int
    is_reused: bool = False
    errors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source_sums: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    tag: str = ""
    is_finite: bool = False

    def fulfils(self, task: ShardTask) -> bool:
        """Returns True if an export that has `task` may reuse the shard."""
        return self.is_finite or not task.require_finite


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shards that one worker writes in sequence."""

    shards: tuple[ShardTask, ...]

    @property
    def index(self) -> int:
        """Return the index of its first shard, which is unique among batches."""
        return self.shards[0].index

    def __str__(self) -> str:
        """Return the name of the batch in error messages."""
        if len(self.shards) == 1:
            return str(self.shards[0])
        first, last = self.shards[0], self.shards[-1]
        return f"shards {first.index} to {last.index} (tables {first.table!r} to {last.table!r})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The place where a worker writes a batch, in JSON values.

    Attributes:
        kind: "folder" of data files, or "part" of an upload to a store.
        place: the path of the folder, or the signed URL to PUT the part to.
        shown: the name of a part in messages, because its URL is a secret.
    """

    kind: Literal["folder", "part"]
    place: str
    shown: str = ""


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
    with _LocalFile(folder / task.file) as file:
        if task.written_crc32c is None or file.checksum(task, on_chunk) != task.written_crc32c:
            return write_shard(task, source, file.write, on_chunk, checkpoint)
    return ShardResult(
        index=task.index,
        crc32c=task.written_crc32c,
        source_crc32c=0,
        bytes=task.size,
        peak_rss_bytes=peak_rss_bytes(),
        is_reused=True,
        errors=dataclasses.asdict(ErrorSums()),
    )


def write_shard(
    task: ShardTask,
    source: Source,
    write: Callable[[_Bytes, int], None],
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
    numbers: npt.NDArray[np.int64] | None = None,
) -> ShardResult:
    """Call `write` with the bytes of the shard and their offset in the file, chunk by chunk. See `run_shard`.

    With `numbers`, sorted rows of the table in a checkpoint in memory, these are read alone and follow each other.
    """
    chunk = _Chunk(task, checkpoint or open_once(source))
    stored_crc = read_crc = written = 0
    rows = range(task.start, task.stop) if numbers is None else numbers
    step = chunk.rows_at_once
    for start in range(0, len(rows), step):
        read, stored = chunk.load(rows[start : start + step])
        stored_crc = crc.extend(stored_crc, stored)
        read_crc = stored_crc if read is stored else crc.extend(read_crc, read)
        write(stored, task.file_offset + written)
        written += len(stored)
        on_chunk(written)
    return ShardResult(
        index=task.index,
        crc32c=stored_crc,
        source_crc32c=read_crc,
        bytes=task.size,
        peak_rss_bytes=peak_rss_bytes(),
        errors=dataclasses.asdict(chunk.errors),
        source_sums={key: (partial.checksum, partial.bytes) for key, partial in chunk.source_sums().items()},
        is_finite=task.require_finite,
    )


def open_source(source: Source) -> "Checkpoint":
    """Open the checkpoint.

    Raises:
        CheckpointMismatchError: it has changed since the export was planned.
    """
    opener: Callable[..., Checkpoint]
    if source.opener:
        module, _, function = source.opener.partition(":")
        opener = getattr(importlib.import_module(module), function)
    else:
        from tpuembed.checkpoint import open_checkpoint as opener  # here, because writers of shards need no reader
    checkpoint = opener(source.path, **json.loads(source.options))
    try:
        check_unchanged(checkpoint, source)
    except CheckpointMismatchError:
        checkpoint.close()
        raise
    return checkpoint


def check_unchanged(checkpoint: "Checkpoint", source: Source) -> None:
    """Raise CheckpointMismatchError if the files of `checkpoint` have changed since `source` was made."""
    if checkpoint.fingerprint() != source.fingerprint:
        raise CheckpointMismatchError(
            f"source {source.path}: changed during its export. Export again when no program changes it."
        )


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


class _Chunk:
    """The one chunk of rows that a worker holds: as read, as stored, and the buffers for the conversion.

    Attributes:
        errors: errors of all rows loaded so far.
    """

    def __init__(self, task: ShardTask, checkpoint: "Checkpoint") -> None:
        quantization = None if task.quantization is None else QuantizationConfig(**task.quantization)
        self.errors = ErrorSums()
        self._task, self._codec = task, STORAGES[task.storage]
        self._checkpoint = checkpoint
        self._checksums = checkpoint.checksums
        self._reader = None if self._checksums is None else self._checksums.reader(task.table)
        self._read: _Array = np.empty((task.chunk_rows, task.dim), SOURCE_DTYPES[task.source_dtype])
        self._stored: _Array | None = None
        if not task.row_format.is_copied:
            self._stored = np.empty((task.chunk_rows, self._codec.columns(task.dim)), self._codec.dtype)
            self._encoder = RowEncoder(task.storage, task.dim, quantization)

    def load(self, numbers: range | npt.NDArray[np.int64]) -> tuple[_Bytes, _Bytes]:
        """Load the rows `numbers`. Return the bytes read and the bytes to store, perhaps the same object; valid until
        the next call.

        Raises:
            ExportError: the storage cannot hold a row, or it must be finite and is not.
        """
        rows = self._read[: len(numbers)]
        if not isinstance(numbers, range):
            gather = self._checkpoint.gather
            assert gather is not None, "only rows in memory are read one by one"
            gather(self._task.table, numbers, rows)
        elif self._reader is None:
            self._checkpoint.read_into(self._task.table, numbers.start, rows)
        else:
            self._reader.read_into(numbers.start, rows)
        if self._task.require_finite and (index := first_not_finite(rows)) is not None:
            value = next(value for value in rows[index].astype(np.float32) if not np.isfinite(value))
            raise ExportError(
                f"table {self._task.table!r}: row {numbers[index]} contains {value}. Find out why training produced this "
                "value. To export it all the same, turn require_finite off."
            )
        if self._stored is None:
            read = _bytes_of(rows)
            return read, read
        stored = self._stored[: len(numbers)]
        try:
            worst = self._encoder.encode(rows, stored)
        except UnstorableRowError as unstorable:
            raise ExportError(
                f"table {self._task.table!r}: row {numbers[unstorable.index]} contains {unstorable}. Store this "
                "table as float32, or find out why training produced this value."
            ) from None
        if not self._task.row_format.is_exact:
            picked = slice(None, None, sample_step(len(rows), self._task.dim))
            true, looked_up = self._encoder.widen(rows[picked]), self._codec.decode(stored[picked])
            self.errors += ErrorSums.of(worst, true, looked_up)
        return _bytes_of(rows), _bytes_of(stored)

    @property
    def rows_at_once(self) -> int:
        """Return the number of rows to load at a time; at most those of the chunk."""
        piece = None if self._checksums is None else self._checksums.piece_rows(self._task.table)
        return min(piece or self._task.chunk_rows, self._task.chunk_rows)

    def source_sums(self) -> "dict[str, PartialChecksum]":
        """Return the checksums of what was read of the checkpoint's tensors, if it has them; see Checksums.reader."""
        return {} if self._reader is None else dict(self._reader.sums())


def _bytes_of(rows: _Array) -> _Bytes:
    return rows.reshape(-1).view(np.uint8)


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
        """Return the CRC32C of the bytes at the place of `task`, up to the end of the file."""
        buffer, checksum, done = bytearray(min(task.chunk_rows * task.row_format.stored_bytes, _CHECK_BYTES)), 0, 0
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


def flush_data(path: Path) -> None:
    """fsync a data file and drop it from the page cache.

    The kernel then writes new rows into the pages that this frees, instead of evicting other programs' pages. On a
    virtual machine this also avoids memory that the host must first provide: a table took half the time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
