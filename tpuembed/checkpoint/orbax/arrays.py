"""Reads the arrays of an Orbax checkpoint with TensorStore, which decodes whole chunks and caches them within a budget."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn

import numpy as np

from tpuembed.checkpoint.orbax.array_checks import check_form, is_complete, is_compressed, keys_beyond
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.row_runs import Run, split_run
from tpuembed.checkpoint.orbax.stores import ERRORS, OPEN_SECONDS, READ_SECONDS, RETRIES, array_spec, fail, wait
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, MissingExtraError

__all__ = ["ArrayStore", "StoredArray"]

_LIMIT_BYTES: Final = 2 << 30
"""The default limit for one chunk, decoded and as stored. TensorStore ends the process if the memory for a chunk is missing,
so that damaged metadata must not make it try.
"""
_CACHE_BYTES: Final = 32 << 20
"""The default cache for decoded chunks. Python, TensorStore, a few small chunks and this fit into 128 MiB."""
_IN_FLIGHT_BYTES: Final = 8 << 20
"""Bytes of decoded chunks to read in parallel, beyond the first."""
_NODE_CACHE_BYTES: Final = 8 << 20
"""The cache for the index of an OCDBT database."""
_ENTRY_BYTES: Final = 1 << 10
"""TensorStore's overhead for a chunk in its cache."""

_Group = dict[tuple[int, int], list[Run]]
"""Runs by their chunk: its number among the rows of chunks, and its first column."""


class ArrayStore:
    """Opens arrays, which share one cache of decoded chunks.

    Attributes:
        limit_bytes: the most memory for one chunk.
        cache_bytes: the size of the cache.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        """Set limit and cache to `memory_bytes`, or to their defaults."""
        try:
            import tensorstore
        except ImportError:
            raise MissingExtraError("reading an Orbax checkpoint", "tensorstore", "jax") from None
        self.tensorstore: Any = tensorstore
        self.limit_bytes = _LIMIT_BYTES if memory_bytes is None else memory_bytes
        self.cache_bytes = _CACHE_BYTES if memory_bytes is None else memory_bytes
        self._context = self._cache(self.cache_bytes)
        self._large: tuple[Any, Any] | None = None

    def _cache(self, size: int) -> Any:
        """Returns a context with its own cache of `size` bytes. TensorStore drops the chunks with the context."""
        return self.tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": size},
                "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},
                # Each thread holds a chunk, as stored and decoded. Exports are parallel by processes.
                "file_io_concurrency": {"limit": 1},
                "data_copy_concurrency": {"limit": 1},
                **RETRIES,
            }
        )

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
        except ERRORS as error:
            fail(leaf, error)
        chunk = tuple(handle.chunk_layout.read_chunk.shape or handle.shape)
        shape, dtype = tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype)
        return StoredArray(leaf, shape, dtype, chunk, is_compressed(handle), complete, self, handle)

    def _open(self, leaf: Leaf, context: Any, *, is_complete: bool) -> Any:
        spec = array_spec(leaf) | {"fill_missing_data_reads": not is_complete}
        return wait(leaf, self.tensorstore.open(spec, context=context, read=True, open=True), OPEN_SECONDS)

    def handle(self, array: "StoredArray", chunk: tuple[int, int]) -> Any:
        """Returns the handle to read `chunk` through.

        A large chunk stays decoded until the next one is read, because consecutive reads need it again. It has a cache of its
        own: TensorStore drops a chunk only after the next one has arrived, and so would hold two.
        """
        if not array.is_large:
            return array.shared
        name = array.leaf, chunk
        large = self._large  # other threads may replace it
        if large is None or large[0] != name:
            self._large = large = None
            context = self._cache(array.cached_bytes)
            self._large = large = (name, self._open(array.leaf, context, is_complete=array.is_complete))
        return large[1]

    def close(self) -> None:
        """Drop the large chunk that is kept."""
        self._large = None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array whose metadata is checked.

    Attributes:
        chunk: the shape of the unit of decoding.
        is_compressed: whether TensorStore holds the stored bytes beside the decoded ones.
        is_complete: whether a missing chunk was lost; if not, it is the fill value.
        shared: TensorStore's handle, which uses the cache of the store.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    is_compressed: bool
    is_complete: bool
    store: ArrayStore
    shared: Any

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes of a decoded chunk, which is stored in full even if it extends beyond the array's end."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def cached_bytes(self) -> int:
        """Returns the bytes of a chunk in TensorStore's cache."""
        return self.chunk_bytes + self.chunk_bytes // 64 + _ENTRY_BYTES

    @property
    def decoding_bytes(self) -> int:
        """Returns the bytes of a chunk, decoded and as stored. No compressor makes it much larger."""
        return self.cached_bytes * (2 if self.is_compressed else 1)

    @property
    def is_large(self) -> bool:
        """Returns True if a chunk does not go into the shared cache."""
        return self.decoding_bytes >= self.store.cache_bytes

    def check_stored(self) -> None:
        """Raise CheckpointCorruptError unless the chunk of the last row exists, and no later one.

        Otherwise rows would be missing from the data, or data would be missing from the rows.
        """
        if not math.prod(self.shape):
            return
        try:
            last = self.shared[self.shape[0] - 1 :].storage_statistics(query_fully_stored=True)
            if self.is_complete and not wait(self.leaf, last, OPEN_SECONDS).fully_stored:
                self._fail_shape("its last chunk is missing")
            for key in keys_beyond(self.shared):
                if wait(self.leaf, self.shared.kvstore.read(key), OPEN_SECONDS).state != "missing":
                    self._fail_shape(f"there is a chunk {key!r}, beyond its end")
        except ERRORS as error:
            fail(self.leaf, error)

    def _fail_shape(self, problem: str) -> NoReturn:
        raise CheckpointCorruptError.of(
            f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown} should be {list(self.shape)}, but {problem}"
        )

    def buffer_bytes(self) -> int:
        """Returns the most bytes that reading in pieces holds beside the pieces: cached chunks, the chunks that are being
        decoded, and metadata of OCDBT.
        """
        if self.is_large:
            return self.decoding_bytes + _NODE_CACHE_BYTES
        chunks = math.prod(-(-size // of) for size, of in zip(self.shape, self.chunk, strict=True) if of)
        cached = min(self.store.cache_bytes, chunks * self.cached_bytes)
        return cached + max(self.decoding_bytes, 2 * _IN_FLIGHT_BYTES) + _NODE_CACHE_BYTES

    def check_chunk(self) -> None:
        """Raise CheckpointFormatError if decoding a chunk needs too much memory."""
        need, limit = self.decoding_bytes, self.store.limit_bytes
        if need > limit:
            stored = f" ({self.cached_bytes} decoded, {self.cached_bytes} stored)" if self.is_compressed else ""
            raise CheckpointFormatError(
                f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown}: a chunk of {list(self.chunk)} takes {need} "
                f"bytes of memory{stored}, but the limit is {limit}. Give the option chunk_memory_bytes={need}, or save "
                "smaller chunks with orbax.checkpoint.SaveArgs(chunk_byte_size=...)."
            )

    def read_runs(self, runs: Iterable[Run], out: Array) -> None:
        """Fill `out` [n, dim] with the first dim columns of `runs`, which cover its rows.

        Raises:
            CheckpointCorruptError: a chunk is missing or damaged.
        """
        try:
            for group in self._groups(runs, out.shape[1]):
                self._read_group(group, out)
        except ERRORS as error:
            fail(self.leaf, error)

    def _groups(self, runs: Iterable[Run], dim: int) -> Iterator[_Group]:
        """Yields groups to read together: everything in one chunk, and further chunks while they are small."""
        bands: defaultdict[int, list[Run]] = defaultdict(list)
        for run in runs:
            for piece in split_run(run, self.chunk[0]):
                bands[piece.source // self.chunk[0]].append(piece)
        group: _Group = {}
        for band in sorted(bands):
            for first in range(0, dim, self.chunk[1]):
                if group and (len(group) + 1) * self.chunk_bytes > _IN_FLIGHT_BYTES:
                    yield group
                    group = {}
                group[band, first] = bands[band]
        if group:
            yield group

    def _read_group(self, group: _Group, out: Array) -> None:
        tensorstore = self.store.tensorstore
        handle = self.store.handle(self, next(iter(group)))
        copies = []
        with tensorstore.Batch() as batch:  # decodes a chunk once for all runs
            for (_, first), runs in group.items():
                columns = slice(first, min(first + self.chunk[1], out.shape[1]))
                for run in runs:
                    part = out[run.target : run.target + run.rows * run.step : run.step, columns]
                    target = tensorstore.array(part, copy=False, write=True)
                    copies.append(target.write(handle[run.source : run.source + run.rows, columns], batch=batch))
        for copy in copies:
            wait(self.leaf, copy, READ_SECONDS)
