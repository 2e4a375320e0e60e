"""Reads the arrays of an Orbax checkpoint with TensorStore, which decodes whole chunks and caches them within a budget."""

import dataclasses
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from tpuembed.checkpoint.bundle.rows import ModSharded
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, MissingExtraError
from tpuembed.files import FilePath

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
_MAX_ELEMENTS: Final = 1 << 58
"""The most elements of an array, so that byte and row numbers cannot overflow."""
_ENTRY_BYTES: Final = 1 << 10
"""TensorStore's overhead for a chunk in its cache."""
OPEN_SECONDS: Final = 120
"""How long to wait for a few kilobytes from a store."""
READ_SECONDS: Final = 900
"""How long to wait for a chunk, or for a few small ones."""
RETRIES: Final = {
    name: {"max_retries": 6, "initial_delay": "500ms", "max_delay": "16s"}
    for name in ("gcs_request_retries", "s3_request_retries")
}
"""Retries of a request that a store refuses: for about half a minute. TensorStore's default of 32 takes a quarter of an
hour.
"""
_ERRORS: Final = (ValueError, OSError, NotImplementedError)
"""The exceptions that TensorStore raises; TimeoutError is an OSError."""
_STORES: Final = {"s3": "s3", "gs": "gcs"}
"""Schemes of URLs -> TensorStore's drivers."""
_TRUE: Final = frozenset({"1", "on", "true", "y", "yes"})
_SYSTEM: Final = (
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
    "UNAVAILABLE", "UNKNOWN"
)  # fmt: skip
"""TensorStore's status codes for errors of the system. Other codes mean that the files are damaged."""


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
            metadata = handle.spec().to_json()["metadata"]
            _check_form(leaf, handle, metadata)
            # Versions of Orbax that do not record that they store all chunks left out zeros, but only if the array has a
            # fill value: in zarr 2 it never had one (seen with orbax-checkpoint 0.5.23).
            complete = leaf.item.complete or (not leaf.item.zarr3 and metadata.get("fill_value") is None)
            if not complete:
                handle = self._open(leaf, self._context, is_complete=False)
        except _ERRORS as error:
            _fail(leaf, error)
        chunk = tuple(handle.chunk_layout.read_chunk.shape or handle.shape)
        shape, dtype = tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype)
        if "codecs" in metadata:
            is_compressed = any(codec["name"] != "bytes" for codec in metadata["codecs"])
        else:
            is_compressed = metadata["compressor"] is not None
        return StoredArray(leaf, shape, dtype, chunk, is_compressed, complete, self, handle)

    def _open(self, leaf: Leaf, context: Any, *, is_complete: bool) -> Any:
        # The files of one array are in a folder, or they are keys with a common prefix in the item's database.
        item, path = leaf.item, f"{leaf.key}/"
        database = {"driver": "ocdbt", "base": _folder(item.folder), "path": path, "cache_pool": "cache_pool#nodes"}
        spec = {
            "driver": "zarr3" if item.zarr3 else "zarr",
            "kvstore": database if item.ocdbt else _folder(item.folder, path),
            "recheck_cached_data": "open",
            "fill_missing_data_reads": not is_complete,
        }
        return _wait(leaf, self.tensorstore.open(spec, context=context, read=True, open=True), OPEN_SECONDS)

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
        is_compressed: whether chunks may be stored in another form than numbers in memory. TensorStore then holds both.
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
        problem = None
        try:
            last = self.shared[self.shape[0] - 1 :].storage_statistics(query_fully_stored=True)
            if self.is_complete and not _wait(self.leaf, last, OPEN_SECONDS).fully_stored:
                problem = "its last chunk is missing"
            for key in _keys_beyond(self.shared):
                if _wait(self.leaf, self.shared.kvstore.read(key), OPEN_SECONDS).state != "missing":
                    problem = problem or f"there is a chunk {key!r}, beyond its end"
        except _ERRORS as error:
            _fail(self.leaf, error)
        if problem:
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

    def read_into(self, place: ModSharded, start: int, out: Array) -> None:
        """Fill `out` [n, dim] with the first dim columns of the rows from `start` on, which are at `place`.

        Raises:
            CheckpointCorruptError: a chunk is missing or damaged.
        """
        size = self.chunk[0]
        # Band of chunks -> (stored rows, rows of `out`). Each part of the table that has any of the rows has one run of them.
        bands: defaultdict[int, list[tuple[slice, slice]]] = defaultdict(list)
        groups, parts = np.divmod(np.arange(start, start + min(len(out), place.count)), place.count)
        for target, source in enumerate((place.first_rows(parts) + groups).tolist()):
            end = source + (len(out) - 1 - target) // place.count + 1
            while source < end:
                stop = min(end, source - source % size + size)
                rows = slice(target, target + (stop - source) * place.count, place.count)
                bands[source // size].append((slice(source, stop), rows))
                source, target = stop, rows.stop
        # Everything in one chunk is read together, and further chunks while they are small.
        together: list[tuple[int, int]] = []
        try:
            for band in sorted(bands):
                for column in range(0, out.shape[1], self.chunk[1]):
                    if together and (len(together) + 1) * self.chunk_bytes > _IN_FLIGHT_BYTES:
                        self._read(together, bands, out)
                        together = []
                    together.append((band, column))
            if together:
                self._read(together, bands, out)
        except _ERRORS as error:
            _fail(self.leaf, error)

    def _read(
        self, chunks: Sequence[tuple[int, int]], bands: Mapping[int, Sequence[tuple[slice, slice]]], out: Array
    ) -> None:
        tensorstore = self.store.tensorstore
        handle = self.store.handle(self, chunks[0])
        copies = []
        with tensorstore.Batch() as batch:  # decodes a chunk once for all runs
            for band, first in chunks:
                columns = slice(first, min(first + self.chunk[1], out.shape[1]))
                for stored, rows in bands[band]:
                    target = tensorstore.array(out[rows, columns], copy=False, write=True)
                    copies.append(target.write(handle[stored, columns], batch=batch))
        for copy in copies:
            _wait(self.leaf, copy, READ_SECONDS)


def _check_form(leaf: Leaf, handle: Any, metadata: Mapping[str, Any]) -> None:
    """Raise an error unless the opened array has a form that Orbax writes, and the shape in its tree.

    Raises:
        CheckpointFormatError: its elements are in another order.
        CheckpointCorruptError: its shape is far too large, or not what was saved.
    """
    shape, order = tuple(handle.shape), tuple(handle.chunk_layout.inner_order or range(handle.rank))
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if math.prod(shape) > _MAX_ELEMENTS:
        raise CheckpointCorruptError.of(f"{where}: its shape {list(shape)} is far too large")
    is_big_endian = str(metadata.get("dtype")).startswith(">") or '"endian": "big"' in json.dumps(
        metadata.get("codecs")
    )
    if order != tuple(range(len(shape))) or is_big_endian:
        raise CheckpointFormatError(
            f"{where}: its metadata has column-major (Fortran) or big-endian chunks, which Orbax never writes. "
            "Restore it from another copy, or save it with Orbax."
        )
    # JAX shards arrays in equal parts, and `write_shape` is the shape of one shard.
    # Source: ParamInfo in orbax/checkpoint/_src/serialization/types.py.
    part = shape if leaf.write_shape is None else leaf.write_shape
    if len(part) != len(shape) or any(
        whole % size if size > 0 else whole != size for whole, size in zip(shape, part, strict=True)
    ):
        raise CheckpointCorruptError.of(
            f"{where}: is {list(shape)}, but by its tree it was written in parts of {list(part)}, which do "
            "not add up to it"
        )


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


def _folder(folder: FilePath, key: str = "") -> dict[str, Any]:
    """Return the place of a folder, on a disk or in a store, for TensorStore."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/{key}"}
    if folder.scheme not in _STORES:
        raise CheckpointFormatError(
            f"checkpoint {folder}: Orbax checkpoints can be read only from disks, s3:// and gs://."
        )
    if folder.scheme == "gs" and os.environ.get("GOOGLE_BASE_URL") and not os.environ.get("TENSORSTORE_GCS_HTTP_URL"):
        raise CheckpointError(
            f"checkpoint {folder}: GOOGLE_BASE_URL names a server, but TensorStore, which reads the arrays, uses "
            "Google's. Set TENSORSTORE_GCS_HTTP_URL to a server with the JSON API, or unset GOOGLE_BASE_URL."
        )
    options: dict[str, Any] = {}
    if folder.scheme == "s3":
        # Stated, because TensorStore otherwise logs a complaint for every credentials file it lacks.
        servers = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
        if endpoint := next(filter(None, servers), None):
            options["endpoint"] = endpoint
        if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE:
            options["aws_credentials"] = {"type": "anonymous"}
        elif os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
            options["aws_credentials"] = {"type": "environment"}
    return {"driver": _STORES[folder.scheme], "bucket": folder.bucket, "path": f"{folder.key}/{key}", **options}


def _wait(leaf: Leaf, future: Any, seconds: int) -> Any:
    """Return the result of `future`. For a store, wait at most `seconds`."""
    return future.result() if isinstance(leaf.item.folder, Path) else future.result(timeout=seconds)


def _fail(leaf: Leaf, error: Exception) -> NoReturn:
    """Raise TensorStore's error as one line: its code and its message."""
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if isinstance(error, TimeoutError):
        raise CheckpointError(
            f"{where}: the store did not answer in time. It must be reachable from here, with credentials that "
            "TensorStore finds."
        ) from None
    text = " ".join(str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0].split())
    message = f"{where}: {text[:500]}"
    if text.startswith(_SYSTEM):
        raise CheckpointError(message) from None
    raise CheckpointCorruptError.of(f"{message}") from None
