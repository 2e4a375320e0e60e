"""The memory for decoding whole chunks, and the chunks that stay decoded from one read to the next."""

import dataclasses
from collections import Counter
from collections.abc import Hashable
from typing import Any, Final, Protocol

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointFormatError, warn

__all__ = ["DEFAULT_MEMORY_BYTES", "ChunkMemory", "ChunkedArray", "Opener"]

DEFAULT_MEMORY_BYTES: Final = 520 << 20
"""Enough for a chunk of 256 MiB, decoded and as stored."""
_SPARE_BYTES: Final = 40 << 20
"""Default for decoded chunks beyond the current one: less than 128 MiB in all, with Python and TensorStore."""
_KEPT_FROM_BYTES: Final = 1 << 18
"""A smaller single chunk is decoded again rather than kept."""
_ENTRY_BYTES: Final = 1 << 10
"""TensorStore's overhead for a chunk in its cache."""
_WASTED_PASSES: Final = 2
"""How often all chunks of an array may be decoded repeatedly before a warning."""


@dataclasses.dataclass(frozen=True)
class ChunkedArray:
    """An array whose chunks may be kept.

    Attributes:
        chunk: the shape of the unit of decoding.
        chunk_bytes: of a decoded chunk, which is stored in full even if it extends beyond the array's end.
        total_bytes: of all of them.
        is_compressed: whether the stored bytes are held beside the decoded ones.
        is_complete: whether a missing chunk was lost; if not, it is the fill value.
    """

    leaf: Leaf
    chunk: tuple[int, ...]
    chunk_bytes: int
    total_bytes: int
    is_compressed: bool
    is_complete: bool

    @property
    def name(self) -> Hashable:
        """Return a name that is unique among the arrays of a checkpoint."""
        return self.leaf.item.folder, self.leaf.key

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of a chunk in TensorStore's cache."""
        return self.chunk_bytes + self.chunk_bytes // 64 + _ENTRY_BYTES

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that TensorStore holds beside a chunk that it decodes. No compressor makes it much larger."""
        return self.chunk_bytes + self.chunk_bytes // 64 + 4 * _ENTRY_BYTES if self.is_compressed else 0

    @property
    def decoding_bytes(self) -> int:
        """Return the bytes of a chunk, decoded and as stored."""
        return self.chunk_bytes + self.stored_bytes


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A cache shared by arrays with chunks of one size, and these arrays, opened with it."""

    chunk_bytes: int
    context: Any
    handles: dict[Hashable, Any] = dataclasses.field(default_factory=dict)


class Opener(Protocol):
    """The interface that ChunkMemory needs of TensorStore."""

    def cache(self, size: int) -> Any:
        """Return a context with its own cache of `size` bytes, whose chunks are dropped with the context."""

    def open_in(self, array: ChunkedArray, context: Any) -> Any:
        """Return `array`, opened again."""


class ChunkMemory:
    """Bounds the memory for chunks of all arrays of a checkpoint together.

    The default is one chunk, decoded and as stored, and few small ones; otherwise it is the given memory. TensorStore
    drops a chunk only after others have arrived. To avoid holding two large ones, each kept chunk has its own cache,
    which is dropped first. Smaller ones share a cache if all chunks that the next read begins with fit.
    """

    def __init__(self, given: int | None, opener: Opener) -> None:
        """Set the bound to `given` bytes, or to the default."""
        self._is_given = given is not None
        self._bytes = DEFAULT_MEMORY_BYTES if given is None else given
        self._opener = opener
        self._last: tuple[Hashable, Any] | None = None
        self._pool: _Pool | None = None
        self._wasted: Counter[Hashable] = Counter()

    def limit_bytes(self, at_once: int) -> int:
        """Return the most bytes held if one read decodes `at_once` bytes together, including kept chunks."""
        return max(self._bytes, at_once) if self._is_given else _SPARE_BYTES + at_once

    def fits(self, array: ChunkedArray) -> bool:
        """Returns True if a chunk can be decoded whole."""
        return array.decoding_bytes <= self._bytes

    def takes(self, array: ChunkedArray, limit: int) -> bool:
        """Returns True if a chunk that can be streamed is decoded whole: in the given memory, or if it is below `limit`
        bytes.
        """
        return self.fits(array) and (self._is_given or array.chunk_bytes < limit)

    def check(self, array: ChunkedArray) -> None:
        """Raise CheckpointFormatError if a chunk cannot be decoded in the memory for chunks."""
        need = array.decoding_bytes
        if not self.fits(array):
            stored = f" ({array.chunk_bytes} decoded, {array.stored_bytes} stored)" if array.stored_bytes else ""
            raise CheckpointFormatError(
                f"checkpoint {array.leaf.item.folder}: array {array.leaf.shown}: a chunk of {list(array.chunk)} takes {need} "
                f"bytes of memory{stored}, but the limit is {self._bytes}. Give the option chunk_memory_bytes={need}, or save "
                "smaller chunks with orbax.checkpoint.SaveArgs(chunk_byte_size=...)."
            )

    def pool(self, array: ChunkedArray, chunks: int, *, spread: bool) -> Any:
        """Return a handle to read through that keeps the `chunks` chunks of the next read; None if they do not fit.

        The default memory keeps only chunks that have rows far apart, `spread`.
        """
        room = self._room(array, spread=spread)
        if chunks * array.kept_bytes > room:
            return None
        self._last = None
        pool = self._pool  # other threads may set another one
        if pool is None or pool.chunk_bytes != array.chunk_bytes:
            self._pool = pool = None  # drop its chunks before others arrive
            self._pool = pool = _Pool(array.chunk_bytes, self._opener.cache(room))
        if array.name not in pool.handles:
            pool.handles[array.name] = self._opener.open_in(array, pool.context)
        return pool.handles[array.name]

    def single(self, array: ChunkedArray, chunk: Hashable, *, keep: bool) -> Any:
        """Return a handle to read `chunk` through, or None for the default. `keep` keeps it, because reads are often
        consecutive.
        """
        self._pool = None
        if array.chunk_bytes < _KEPT_FROM_BYTES:
            return None
        name, last = (array.name, chunk), self._last
        if last is not None and last[0] == name:
            return last[1]
        self._last = last = None
        if not keep:
            return None
        handle = self._opener.open_in(array, self._opener.cache(array.chunk_bytes + _KEPT_FROM_BYTES))
        self._last = (name, handle)
        return handle

    def _room(self, array: ChunkedArray, *, spread: bool) -> int:
        """Return the bytes for chunks of `array` that stay decoded while another one is decoded."""
        room = self._bytes - array.decoding_bytes
        if self._is_given:
            return room
        return min(room, _SPARE_BYTES - array.chunk_bytes) if spread else 0

    def advice(self, array: ChunkedArray, chunks: int, decoders: int | None = None) -> str | None:
        """Return advice for spread rows of which every piece is in `chunks` chunks; None if reading them is fast.

        `decoders`: bytes for that many streams if memory is short, 0 if it suffices; None if chunks are decoded whole.
        """
        need = chunks * array.kept_bytes + array.decoding_bytes
        if chunks * array.kept_bytes <= self._room(array, spread=True) or decoders == 0:
            return None
        return (
            f"checkpoint {array.leaf.item.folder}: array {array.leaf.shown}: every piece of its rows is in "
            f"{chunks} chunks of {array.chunk_bytes} bytes, which are decoded again for each piece. Give the "
            f"option chunk_memory_bytes={decoders or need} to decode them once, or save it with smaller chunks: "
            "orbax.checkpoint.SaveArgs(chunk_byte_size=...)."
        )

    def count(self, array: ChunkedArray, wasted: int, advice: str | None) -> None:
        """Warn with `advice`, once, if chunks are decoded repeatedly. `wasted` are the superfluous bytes of this read."""
        before = self._wasted[array.name]
        self._wasted[array.name] += wasted
        limit = _WASTED_PASSES * array.total_bytes
        if before <= limit < self._wasted[array.name] and advice:
            warn(advice)

    def clear(self) -> None:
        """Drop all chunks."""
        self._last = self._pool = None
