"""Reads the arrays of an Orbax checkpoint with TensorStore, which decodes whole chunks and caches them within a budget."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from tpuembed.checkpoint.bundle.rows import ModSharded
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.stores import ERRORS, OPEN_SECONDS, READ_SECONDS, RETRIES, array_spec, fail, wait
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, MissingExtraError

__all__ = ["ArrayStore", "Run", "StoredArray", "contiguous_run", "mod_sharded_runs"]

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
_MAX_ELEMENTS: Final = 1 << 58
"""The most elements of an array, so that byte and row numbers cannot overflow."""
_ENTRY_BYTES: Final = 1 << 10
"""TensorStore's overhead for a chunk in its cache."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A copy of `rows` stored rows from `source` on to rows `target`, `target + step`, ... of the output."""

    source: int
    rows: int
    target: int
    step: int


def contiguous_run(start: int, stop: int) -> Iterator[Run]:
    """Yield the run of the rows [start, stop) of a table that is stored row by row."""
    if start < stop:
        yield Run(start, stop - start, 0, 1)


def mod_sharded_runs(table: ModSharded, start: int, stop: int) -> Iterator[Run]:
    """Yield the runs of the rows [start, stop) of a mod-sharded table: one per part that has any of them."""
    rows = np.arange(start, min(stop, start + table.count))
    groups, parts = np.divmod(rows, table.count)
    for row, source in zip(rows.tolist(), (table.first_rows(parts) + groups).tolist(), strict=True):
        yield Run(source, (stop - 1 - row) // table.count + 1, row - start, table.count)


def _split_run(run: Run, size: int) -> Iterator[Run]:
    """Yield `run` in pieces, cut where a stored row is a multiple of `size`."""
    done = 0
    while done < run.rows:
        source = run.source + done
        rows = min(run.rows - done, size - source % size)
        yield Run(source, rows, run.target + done * run.step, run.step)
        done += rows


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
            _check_form(leaf, handle)
            complete = _stores_all_chunks(leaf, handle)
            if not complete:
                handle = self._open(leaf, self._context, is_complete=False)
        except ERRORS as error:
            fail(leaf, error)
        chunk = tuple(handle.chunk_layout.read_chunk.shape or handle.shape)
        shape, dtype = tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype)
        return StoredArray(leaf, shape, dtype, chunk, _has_codecs(handle), complete, self, handle)

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
            for key in _keys_beyond(self.shared):
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
            for piece in _split_run(run, self.chunk[0]):
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


def _check_form(leaf: Leaf, handle: Any) -> None:
    """Raise an error unless the opened array has a form that Orbax writes, and the shape in its tree.

    Raises:
        CheckpointFormatError: its elements are in another order.
        CheckpointCorruptError: its shape is far too large, or not what was saved.
    """
    shape, order = tuple(handle.shape), tuple(handle.chunk_layout.inner_order or range(handle.rank))
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if math.prod(shape) > _MAX_ELEMENTS:
        raise CheckpointCorruptError.of(f"{where}: its shape {list(shape)} is far too large")
    if order != tuple(range(len(shape))) or _is_big_endian(handle):
        raise CheckpointFormatError(
            f"{where}: its metadata has column-major (Fortran) or big-endian chunks, which Orbax never writes. "
            "Restore it from another copy, or save it with Orbax."
        )
    if leaf.write_shape is not None and not _is_made_of(shape, leaf.write_shape):
        raise CheckpointCorruptError.of(
            f"{where}: is {list(shape)}, but by its tree it was written in parts of {list(leaf.write_shape)}, which do "
            "not add up to it"
        )


def _is_big_endian(handle: Any) -> bool:
    metadata = handle.spec().to_json()["metadata"]
    return str(metadata.get("dtype")).startswith(">") or '"endian": "big"' in json.dumps(metadata.get("codecs"))


def _is_made_of(shape: Sequence[int], part: Sequence[int]) -> bool:
    """Returns True if equal parts make up the whole, as JAX shards arrays.

    Source: `write_shape` is the shape of one shard (orbax/checkpoint/_src/serialization/types.py, ParamInfo).
    """
    if len(shape) != len(part):
        return False
    return all(whole % size == 0 if size > 0 else whole == size for whole, size in zip(shape, part, strict=True))


def _stores_all_chunks(leaf: Leaf, handle: Any) -> bool:
    """Returns True if every chunk was written, so that a missing one was lost. Otherwise a missing chunk is the fill
    value.

    Versions of Orbax that do not record that they store all chunks left out zeros, but only if the array has a fill
    value:
    in zarr 2 it never had one (seen with orbax-checkpoint 0.5.23).
    """
    if leaf.item.complete:
        return True
    return not leaf.item.zarr3 and handle.spec().to_json()["metadata"].get("fill_value") is None


def _has_codecs(handle: Any) -> bool:
    """Returns True if its chunks may be stored in another form than numbers in memory."""
    metadata = handle.spec().to_json()["metadata"]
    if "codecs" in metadata:
        return any(codec["name"] != "bytes" for codec in metadata["codecs"])
    return metadata["compressor"] is not None


def _keys_beyond(handle: Any) -> Iterator[str]:
    """Yield the keys of the first chunk after the end of each dimension. If one exists, the array was larger."""
    metadata = handle.spec().to_json()["metadata"]
    if "chunk_grid" in metadata:  # zarr 3
        encoding, chunks = metadata["chunk_key_encoding"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        is_default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
        prefix = f"c{separator}" if is_default else ""
    else:
        prefix, separator, chunks = "", metadata["dimension_separator"], metadata["chunks"]
    for axis, size in enumerate(handle.shape):
        place = ["0"] * len(chunks)
        place[axis] = str(-(-size // chunks[axis]))
        yield prefix + separator.join(place)
