"""Reads the arrays of an Orbax checkpoint. Large chunks are decoded as streams, others whole, by TensorStore, a few at
a time.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from tpuembed.checkpoint.orbax.array_checks import check_form, is_complete, is_compressed, keys_beyond
from tpuembed.checkpoint.orbax.chunk_memory import ChunkedArray, ChunkMemory
from tpuembed.checkpoint.orbax.chunk_streams import ChunkRows, ChunkStreams, StreamedChunk
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.row_runs import Run, split_run
from tpuembed.checkpoint.orbax.stored_values import ChunkForm, chunk_form
from tpuembed.checkpoint.orbax.stores import ERRORS, OPEN_SECONDS, READ_SECONDS, RETRIES, array_spec, fail, wait
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, MissingExtraError

__all__ = ["ArrayStore", "StoredArray"]

_IN_FLIGHT_BYTES: Final = 8 << 20
"""Bytes of decoded chunks to read in parallel, beyond the first."""
_ALONE_FROM_BYTES: Final = 8 << 20
"""A smaller chunk is decoded whole if chunks are read one after another: it is then decoded once, not twice."""
_NODE_CACHE_BYTES: Final = 8 << 20
"""The cache for the index of an OCDBT database."""
_THREADS: Final = 4
"""Threads that read, and that decode, if memory is given for them. Each holds a chunk, and the previous one."""

_Group = dict[tuple[int, int], list[Run]]
"""Runs by their chunk: its number among the rows of chunks, and its first column."""


class ArrayStore:
    """Opens arrays; all share one bound on the memory for chunks.

    Attributes:
        tensorstore: the module, which is imported when a store is made.
        memory: the bound, and the chunks that are kept.
        streams: the chunks that are being decoded.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        """Create a store with `memory_bytes` for chunks; see ChunkMemory."""
        try:
            import tensorstore
        except ImportError:
            raise MissingExtraError("reading an Orbax checkpoint", "tensorstore", "jax") from None
        self.tensorstore: Any = tensorstore
        threads = 1 if memory_bytes is None else _THREADS
        self._context = self.tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},
                "file_io_concurrency": {"limit": threads},
                "data_copy_concurrency": {"limit": threads},
                **RETRIES,
            }
        )
        self.memory = ChunkMemory(memory_bytes, self)
        self.streams = ChunkStreams(memory_bytes)

    def open(self, leaf: Leaf) -> "StoredArray":
        """Read the metadata of `leaf`'s array, and no chunk.

        Raises:
            CheckpointCorruptError: it is missing or damaged, or has another shape than in its tree.
            CheckpointFormatError: it has a form that Orbax does not write.
            CheckpointError: the system refuses to read it, or a store does not answer.
        """
        try:
            handle = self._open(leaf, self._context, is_complete=True)
            check_form(leaf, handle)
            complete = is_complete(leaf, handle)
            if not complete:
                handle = self._open(leaf, self._context, is_complete=False)
            form = chunk_form(leaf, handle)
        except ERRORS as error:
            fail(leaf, error)
        chunk = tuple(handle.chunk_layout.read_chunk.shape or handle.shape)
        shape, dtype = tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype)
        chunks = math.prod(-(-size // of) for size, of in zip(shape, chunk, strict=True))
        size = math.prod(chunk) * dtype.itemsize
        packed = is_compressed(handle)
        return StoredArray(leaf, chunk, size, chunks * size, packed, complete, self, handle, shape, dtype, form)

    def _open(self, leaf: Leaf, context: Any, *, is_complete: bool) -> Any:
        spec = array_spec(leaf) | {"fill_missing_data_reads": not is_complete}
        return wait(leaf, self.tensorstore.open(spec, context=context, read=True, open=True), OPEN_SECONDS)

    def cache(self, size: int) -> Any:
        """Return a context with a cache for `size` bytes of chunks."""
        return self.tensorstore.Context({"cache_pool": {"total_bytes_limit": size}}, self._context)

    def open_in(self, array: ChunkedArray, context: Any) -> Any:
        """Return `array`, opened again in `context`."""
        return self._open(array.leaf, context, is_complete=array.is_complete)

    def close(self) -> None:
        """Drop the chunks that are kept."""
        self.memory.clear()
        self.streams.clear()


@dataclasses.dataclass(frozen=True)
class StoredArray(ChunkedArray):
    """An array whose metadata is checked: shape, dtype, and the form of its chunks if they can be streamed."""

    store: ArrayStore
    handle: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    form: ChunkForm | None

    def check_stored(self) -> None:
        """Raise CheckpointCorruptError unless the chunk of the last row exists, and no later one.

        Otherwise rows would be missing from the data, or data would be missing from the rows.
        """
        if not math.prod(self.shape):
            return
        try:
            last = self.handle[self.shape[0] - 1 :].storage_statistics(query_fully_stored=True)
            if self.is_complete and not wait(self.leaf, last, OPEN_SECONDS).fully_stored:
                self._fail_shape("its last chunk is missing")
            for key in keys_beyond(self.handle):
                if wait(self.leaf, self.handle.kvstore.read(key), OPEN_SECONDS).state != "missing":
                    self._fail_shape(f"there is a chunk {key!r}, beyond its end")
        except ERRORS as error:
            fail(self.leaf, error)

    def _fail_shape(self, problem: str) -> NoReturn:
        raise CheckpointCorruptError.of(
            f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown} should be {list(self.shape)}, but {problem}"
        )

    def check_chunk(self) -> None:
        """Raise CheckpointFormatError if a chunk does not fit in the memory for chunks, and cannot be streamed.

        Raises:
            MissingExtraError: it could be streamed by a package that is not installed.
        """
        if self.store.streams.can_read(self, self.form):
            return
        if self.store.streams.lacks_package(self, self.form) and not self.store.memory.fits(self):
            raise MissingExtraError(
                f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown}: reading its chunks of {self.chunk_bytes} bytes",
                "zstandard",
                "jax",
            )
        self.store.memory.check(self)

    def buffer_bytes(self) -> int:
        """Return the most bytes that reading in pieces holds beside the pieces: chunks, decoders, and metadata of
        OCDBT.
        """
        at_once = max(2 * _IN_FLIGHT_BYTES, self.decoding_bytes)
        if self.store.streams.can_read(self, self.form):
            whole = self.store.memory.limit_bytes(min(at_once, 2 * _ALONE_FROM_BYTES))
            held = max(self.store.streams.limit_bytes, whole)
        else:
            held = self.store.memory.limit_bytes(at_once)
        chunks = self.total_bytes // self.chunk_bytes if self.chunk_bytes else 0
        everything = chunks * self.kept_bytes + self.decoding_bytes if self.chunk_bytes else 0
        return min(held, everything) + _NODE_CACHE_BYTES

    def read_runs(self, runs: Iterable[Run], out: Array) -> None:
        """Fill `out` [n, dim] with the first dim columns of `runs`, which cover its rows.

        Raises:
            CheckpointFormatError: a chunk is too large.
            CheckpointCorruptError: a chunk is missing or damaged.
        """
        self.check_chunk()
        runs = list(runs)
        ends = self._ends(runs)
        kept = len(ends) * -(-out.shape[1] // self.chunk[1])
        is_spread = len(runs) > 1
        try:
            pool = self.store.memory.pool(self, kept, spread=is_spread)
            groups = self._groups(runs, ends, out.shape[1])
            if pool is not None:
                self.store.streams.clear()
                for group in groups:
                    self._read_group(pool, group, out)
                return
            if self._is_streamed(is_spread):
                self.store.memory.clear()
                apart = not self._decoders(runs, out.shape[1])
                places = (place for group in groups for place in group.items())
                wasted = sum(self._stream_chunk(*place, out, apart=apart) for place in places)
            else:
                wasted = self._read_singly(groups, out)
            if is_spread:
                self.store.memory.count(self, wasted, self.advise(runs, out.shape[1]))
        except ERRORS as error:
            fail(self.leaf, error)

    def advise(self, runs: Iterable[Run], dim: int) -> str | None:
        """Return advice for reading rows in many pieces placed as `runs`, or None if there is none."""
        runs = list(runs)
        kept = len(self._ends(runs)) * -(-dim // self.chunk[1])
        if len(runs) <= 1:
            return None
        decoders = self._decoders(runs, dim) if self._is_streamed(is_spread=True) else None
        return self.store.memory.advice(self, kept, decoders)

    def _decoders(self, runs: Sequence[Run], dim: int) -> int:
        """Return the bytes for a stream for each of `runs` if they exceed the memory; else 0."""
        assert self.form is not None
        return self.store.streams.need(self, self.form, len(runs) * -(-dim // self.chunk[1]))

    def _is_streamed(self, is_spread: bool) -> bool:
        """Returns True if chunks that are not all kept are streamed. Single chunks that fit in the given memory are
        decoded whole.
        """
        if not self.store.streams.can_read(self, self.form):
            return False
        return is_spread or not self.store.memory.takes(self, _ALONE_FROM_BYTES)

    def _stream_chunk(self, place: tuple[int, int], runs: Sequence[Run], out: Array, *, apart: bool) -> int:
        """Stream the rows of a chunk and return the number of decoded bytes that were dropped on the way."""
        assert self.form is not None
        band, first = place
        chunk = StreamedChunk(self, self.form, self.handle.kvstore, band, first // self.chunk[1])
        rows = [
            ChunkRows(run.source - band * self.chunk[0], self._target(run, first, out))
            for run in sorted(runs, key=lambda run: run.source)
        ]
        skipped = self.store.streams.read(chunk, rows, apart=apart)
        if skipped is None:
            self.store.memory.check(self)
            self._read_group(self.handle, {place: list(runs)}, out)
        return skipped or 0

    def _ends(self, runs: Iterable[Run]) -> set[int]:
        """Return the rows of chunks in which runs end, and in which the next ones begin."""
        return {(run.source + run.rows - 1) // self.chunk[0] for run in runs}

    def _read_singly(self, groups: Iterable[_Group], out: Array) -> int:
        """Read chunk by chunk and return the number of decoded bytes beyond those of `out`."""
        self.store.streams.clear()
        count = 0
        groups = list(groups)
        for group in groups:
            alone = len(group) == 1
            handle = self.store.memory.single(self, next(iter(group)), keep=group is groups[-1]) if alone else None
            self._read_group(self.handle if handle is None else handle, group, out)
            count += len(group)
        return max(0, count * self.chunk_bytes - out.nbytes)

    def _groups(self, runs: Iterable[Run], ends: Container[int], dim: int) -> Iterator[_Group]:
        """Yield groups to read together: everything in one chunk, and further chunks while they are small.

        The chunks in which the runs end come last, because the next rows follow there. They stay decoded when others
        are dropped.
        """
        bands: defaultdict[int, list[Run]] = defaultdict(list)
        for run in runs:
            for piece in split_run(run, self.chunk[0]):
                bands[piece.source // self.chunk[0]].append(piece)
        group: _Group = {}
        for band in sorted(bands, key=lambda band: (band in ends, band)):
            for first in range(0, dim, self.chunk[1]):
                if group and (len(group) + 1) * self.chunk_bytes > _IN_FLIGHT_BYTES:
                    yield group
                    group = {}
                group[band, first] = bands[band]
        if group:
            yield group

    def _target(self, run: Run, first: int, out: Array) -> Array:
        """Return the part of `out` for the columns of `run` from `first` on that one chunk has."""
        return out[run.target : run.target + run.rows * run.step : run.step, first : first + self.chunk[1]]

    def _read_group(self, handle: Any, group: _Group, out: Array) -> None:
        tensorstore = self.store.tensorstore
        copies = []
        with tensorstore.Batch() as batch:  # decodes a chunk once for all runs
            for (_, first), runs in group.items():
                for run in runs:
                    target = tensorstore.array(self._target(run, first, out), copy=False, write=True)
                    columns = slice(first, min(first + self.chunk[1], out.shape[1]))
                    copies.append(target.write(handle[run.source : run.source + run.rows, columns], batch=batch))
        for copy in copies:
            wait(self.leaf, copy, READ_SECONDS)
