"""The chunks that are being decoded in order. Each decoder keeps its position for the next rows.

The need is that of `chunk_stream`: tables whose chunks are larger than memory, which TensorStore would decode whole.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.orbax.chunk_memory import ChunkedArray
from tpuembed.checkpoint.orbax.chunk_stream import ChunkStream, is_available, open_stream, stream_bytes
from tpuembed.checkpoint.orbax.stored_values import ChunkForm, StoredValue
from tpuembed.checkpoint.types import Array

__all__ = ["ChunkRows", "ChunkStreams", "StreamedChunk"]

_STREAMED_FROM_BYTES: Final = 1 << 20
"""A smaller chunk is decoded whole."""
_DEFAULT_BYTES: Final = 48 << 20
"""Memory for waiting decoders: 128 MiB in all with Python and TensorStore. Enough for 34 of Orbax's level 1."""
_SCRATCH_BYTES: Final = 1 << 20
"""Bytes of decoded rows to hold for targets that are not contiguous."""

_Name = tuple[Hashable, int, int]


@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """Rows of a chunk from `first` on, and their target: `out` [n, columns], of any strides."""

    first: int
    out: Array


@dataclasses.dataclass(frozen=True)
class StreamedChunk:
    """One chunk of an array: its numbers down and across, and its store."""

    array: ChunkedArray
    form: ChunkForm
    kvstore: Any
    row: int
    column: int

    @property
    def name(self) -> _Name:
        """Return a name that is unique among the chunks of a checkpoint."""
        return self.array.name, self.row, self.column

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row of the chunk."""
        return self.array.chunk_bytes // self.array.chunk[0]

    def open(self, value: StoredValue) -> ChunkStream | None:
        """Open the chunk at its beginning. Returns None if it needs another decoder."""
        return open_stream(value, self.array.chunk_bytes, self.form.level)

    def find(self) -> StoredValue | None:
        """Return its stored bytes, or None if it is not stored."""
        return self.form.find(self.array.leaf, self.kvstore, self.row, self.column, self.array.chunk_bytes)


class ChunkStreams:
    """Decodes chunks as streams; may be used by several threads.

    Frames end with proof that they are whole: their size, and perhaps a checksum. So the first rows of a chunk are
    returned after it
    was decoded to its end, once. Later reads start again and then continue forward. Rows far apart that are read in
    step, such as those of several SparseCores in one chunk, have a stream each.
    """

    def __init__(self, given: int | None) -> None:
        """Set the memory for waiting decoders to `given` bytes, if that is more than the default."""
        self._bytes = max(_DEFAULT_BYTES, given or 0)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[tuple[_Name, int], ChunkStream] = OrderedDict()
        self._proven: dict[_Name, StoredValue] = {}
        self._ends: dict[_Name, frozenset[int]] = {}  # where the last read of a chunk stopped

    @property
    def limit_bytes(self) -> int:
        """Return the most bytes of waiting decoders and of rows in transfer."""
        return self._bytes + _SCRATCH_BYTES

    @staticmethod
    def can_read(array: ChunkedArray, form: ChunkForm | None) -> bool:
        """Returns True if chunks of this form are streamed."""
        return form is not None and array.chunk_bytes >= _STREAMED_FROM_BYTES and is_available(form.level)

    @staticmethod
    def lacks_package(array: ChunkedArray, form: ChunkForm | None) -> bool:
        """Returns True if chunks of this form would be streamed if zstandard was installed."""
        return form is not None and array.chunk_bytes >= _STREAMED_FROM_BYTES and not is_available(form.level)

    def need(self, array: ChunkedArray, form: ChunkForm, streams: int) -> int:
        """Return the bytes for that many waiting `streams` if they exceed the memory; else 0."""
        need = streams * stream_bytes(form.level, array.chunk_bytes)
        return need if need > self._bytes else 0

    def read(self, chunk: StreamedChunk, rows: Sequence[ChunkRows], *, apart: bool) -> int | None:
        """Fill `rows`, which are sorted, and return the number of decoded bytes that were dropped on the way.

        Returns None, and fills nothing, if the chunk is not stored or needs another decoder. If memory allows it,
        `apart`, all of them that continue the last read have separate streams.

        Raises:
            CheckpointCorruptError: the chunk is damaged.
            CheckpointError: it was rewritten after it was first read.
        """
        value = self._proven.get(chunk.name)
        before, after = self._ends.get(chunk.name, frozenset()), frozenset(part.first + len(part.out) for part in rows)
        if value is None:
            found = self._prove(chunk, rows)
            skipped = None if found is None else 0
        else:
            skipped = self._go_on(chunk, value, rows, before if apart else frozenset())
        self._ends[chunk.name] = after
        return skipped

    def _prove(self, chunk: StreamedChunk, rows: Sequence[ChunkRows]) -> StoredValue | None:
        """Decode a chunk for the first time, to its end, and fill `rows`. Returns None, and fills nothing, if that is
        impossible.
        """
        value = chunk.find()
        stream = None if value is None else chunk.open(value)
        if stream is None:
            return None
        for part in rows:
            _read(stream, part, chunk.row_bytes)
        stream.finish()
        self._proven[chunk.name] = stream.value
        return value

    def _go_on(
        self, chunk: StreamedChunk, value: StoredValue, rows: Sequence[ChunkRows], before: Container[int]
    ) -> int:
        """Fill `rows`. Those that begin where rows ended `before` have separate streams."""
        skipped, stream = 0, None
        for part in rows:
            position = part.first * chunk.row_bytes
            goes_on = part.first in before
            if goes_on and stream is not None:
                self._keep(chunk, stream)
                stream = None
            stream = stream or self._take(chunk, position if goes_on else 0, position) or chunk.open(value)
            assert stream is not None, "as it was before"
            skipped += _read(stream, part, chunk.row_bytes)
        if stream is not None:
            self._keep(chunk, stream)
        return skipped

    def clear(self) -> None:
        """Drop all decoders."""
        with self._lock:
            self._waiting.clear()

    def _take(self, chunk: StreamedChunk, first: int, last: int) -> ChunkStream | None:
        """Remove and return the furthest waiting stream within [first, last]."""
        with self._lock:
            places = [place for name, place in self._waiting if name == chunk.name and first <= place <= last]
            return self._waiting.pop((chunk.name, max(places))) if places else None

    def _keep(self, chunk: StreamedChunk, stream: ChunkStream) -> None:
        """Keep `stream` for later, and drop those that have waited longest."""
        if not stream.cost or stream.position == chunk.array.chunk_bytes:
            return
        with self._lock:
            self._waiting[chunk.name, stream.position] = stream
            while sum(other.cost for other in self._waiting.values()) > self._bytes:
                self._waiting.popitem(last=False)


def _read(stream: ChunkStream, rows: ChunkRows, row_bytes: int) -> int:
    """Fill `rows` and return the number of bytes that were dropped on the way."""
    ahead = rows.first * row_bytes - stream.position
    assert ahead >= 0, "sorted rows"
    stream.skip(ahead)
    _fill(stream, rows.out, row_bytes)
    return ahead


def _fill(stream: ChunkStream, out: Array, row_bytes: int) -> None:
    """Fill `out` [n, columns] with the first columns of the next rows, of `row_bytes` each."""
    if out.flags.c_contiguous and out.shape[1] * out.itemsize == row_bytes:
        stream.fill(out.reshape(-1).view(np.uint8).data)
        return
    step = max(1, _SCRATCH_BYTES // row_bytes)
    scratch = np.empty((min(step, len(out)), row_bytes // out.itemsize), out.dtype)
    for first in range(0, len(out), step):
        part = out[first : first + step]
        rows = scratch[: len(part)]
        stream.fill(rows.reshape(-1).view(np.uint8).data)
        part[...] = rows[:, : out.shape[1]]
