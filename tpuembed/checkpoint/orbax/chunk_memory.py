"""What decoding whole chunks may cost, and which of them stay decoded from one read to the next."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Hashable
from typing import Any, Final, Protocol

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointFormatError

__all__ = ["DEFAULT_MEMORY_BYTES", "ChunkMemory", "ChunkedArray", "Opener"]

DEFAULT_MEMORY_BYTES: Final = 520 << 20
"""Enough for a chunk of 256 MiB, decoded and as stored."""
_SPARE_BYTES: Final = 40 << 20
"""Of decoded chunks beyond the one at hand, by default: with what Python and TensorStore take, less than 128 MiB."""
_KEPT_FROM_BYTES: Final = 1 << 18
"""A smaller chunk that lies alone is decoded again sooner than it is kept."""
_ENTRY_BYTES: Final = 1 << 10
"""Of TensorStore's for a chunk in its cache."""
_WASTED_PASSES: Final = 2
"""How often all chunks of an array are decoded in vain before somebody is told."""


@dataclasses.dataclass(frozen=True)
class ChunkedArray:
    """An array whose chunks may be kept.

    Attributes:
        chunk: the shape of what is decoded at a time.
        chunk_bytes: of a decoded chunk, which is stored in full even where it reaches over the array's end.
        total_bytes: of all of them.
        is_compressed: whether what is stored is held beside what is decoded from it.
        is_complete: whether a chunk that is not there was lost; without, it is the fill value.
    """

    leaf: Leaf
    chunk: tuple[int, ...]
    chunk_bytes: int
    total_bytes: int
    is_compressed: bool
    is_complete: bool

    @property
    def name(self) -> Hashable:
        """Of one array among those of a checkpoint."""
        return self.leaf.item.folder, self.leaf.key

    @property
    def kept_bytes(self) -> int:
        """Of a chunk in TensorStore's cache."""
        return self.chunk_bytes + self.chunk_bytes // 64 + _ENTRY_BYTES

    @property
    def stored_bytes(self) -> int:
        """What TensorStore holds beside a chunk that it decodes: no compressor makes it much larger than it was."""
        return self.chunk_bytes + self.chunk_bytes // 64 + 4 * _ENTRY_BYTES if self.is_compressed else 0

    @property
    def decoding_bytes(self) -> int:
        """Of a chunk, decoded and as stored."""
        return self.chunk_bytes + self.stored_bytes


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A cache that arrays whose chunks are of one size share, and these arrays, opened with it."""

    chunk_bytes: int
    context: Any
    handles: dict[Hashable, Any] = dataclasses.field(default_factory=dict)


class Opener(Protocol):
    """What ChunkMemory needs of TensorStore."""

    def cache(self, size: int) -> Any:
        """A context with a cache of its own, of `size` bytes, whose chunks are gone when the context is."""

    def open_in(self, array: ChunkedArray, context: Any) -> Any:
        """`array`, opened again."""


class ChunkMemory:
    """Bounds the memory for chunks of all arrays of a checkpoint together.

    By default that is one chunk, decoded and as stored, and few small ones; as much as is given, where it is.
    TensorStore lets go of a chunk only when others have come. So that there are never two large ones, each that is kept
    has a cache of its own, which goes first; smaller ones, if all fit that the next read begins with, share one.
    """

    def __init__(self, given: int | None, opener: Opener) -> None:
        """`given`: bytes."""
        self._is_given = given is not None
        self._bytes = DEFAULT_MEMORY_BYTES if given is None else given
        self._opener = opener
        self._last: tuple[Hashable, Any] | None = None
        self._pool: _Pool | None = None
        self._wasted: Counter[Hashable] = Counter()

    def limit_bytes(self, at_once: int) -> int:
        """The most that is held where `at_once` bytes are what one read decodes together: with what is kept beside."""
        return max(self._bytes, at_once) if self._is_given else _SPARE_BYTES + at_once

    def fits(self, array: ChunkedArray) -> bool:
        """Whether a chunk can be decoded whole."""
        return array.decoding_bytes <= self._bytes

    def takes(self, array: ChunkedArray, limit: int) -> bool:
        """Whether a chunk is to be decoded whole though it may be streamed: in what was given, or below `limit` bytes."""
        return self.fits(array) and (self._is_given or array.chunk_bytes < limit)

    def check(self, array: ChunkedArray) -> None:
        """Raise CheckpointFormatError where a chunk cannot be decoded in the memory for chunks."""
        need = array.decoding_bytes
        if not self.fits(array):
            stored = (
                f" and held beside up to {array.stored_bytes} as stored, {need} together" if array.stored_bytes else ""
            )
            raise CheckpointFormatError(
                f"checkpoint {array.leaf.item.folder}: array {array.leaf.shown} lies in chunks of {list(array.chunk)}, "
                f"{array.chunk_bytes} bytes, which are decoded whole{stored}, over the {self._bytes} allowed: give the "
                f"option chunk_memory_bytes={need}, or save it with orbax.checkpoint.SaveArgs(chunk_byte_size=...)"
            )

    def pool(self, array: ChunkedArray, chunks: int, *, spread: bool) -> Any:
        """What to read through so that `chunks` chunks are there for the next read; None where they do not fit.

        Args:
            array: whose.
            chunks: how many the next read begins with.
            spread: whether they are of rows far apart; with the default memory others do without.
        """
        room = self._room(array, spread=spread)
        if chunks * array.kept_bytes > room:
            return None
        self._last = None
        pool = self._pool  # other threads may set another one
        if pool is None or pool.chunk_bytes != array.chunk_bytes:
            self._pool = pool = None  # its chunks go before others come
            self._pool = pool = _Pool(array.chunk_bytes, self._opener.cache(room))
        if array.name not in pool.handles:
            pool.handles[array.name] = self._opener.open_in(array, pool.context)
        return pool.handles[array.name]

    def single(self, array: ChunkedArray, chunk: Hashable, *, keep: bool) -> Any:
        """What to read `chunk` through, `keep` it for the next read, which often begins where this one ends; None: anyhow."""
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
        """Bytes for chunks of `array` that stay decoded while another one is."""
        room = self._bytes - array.decoding_bytes
        if self._is_given:
            return room
        return min(room, _SPARE_BYTES - array.chunk_bytes) if spread else 0

    def advice(self, array: ChunkedArray, chunks: int, decoders: int | None = None) -> str | None:
        """What makes it fast to read spread rows of which every piece lies in `chunks` chunks; None where it is.

        `decoders`: bytes for as many, if there are not; without, chunks are decoded whole.
        """
        need = chunks * array.kept_bytes + array.decoding_bytes
        if chunks * array.kept_bytes <= self._room(array, spread=True) or decoders == 0:
            return None
        return (
            f"checkpoint {array.leaf.item.folder}: array {array.leaf.shown}: every piece of its rows lies in {chunks} chunks "
            f"of {array.chunk_bytes} bytes, which are decoded anew for each; give the option "
            f"chunk_memory_bytes={decoders or need} to decode them once, or save it with smaller chunks: "
            "orbax.checkpoint.SaveArgs(chunk_byte_size=...)"
        )

    def count(self, array: ChunkedArray, wasted: int, advice: str | None) -> None:
        """Give `advice`, once, where chunks are decoded over and over: `wasted` bytes more than were needed this time."""
        before = self._wasted[array.name]
        self._wasted[array.name] += wasted
        limit = _WASTED_PASSES * array.total_bytes
        if before <= limit < self._wasted[array.name] and advice:
            warnings.warn(advice, stacklevel=4)

    def clear(self) -> None:
        """Let go of all chunks."""
        self._last = self._pool = None
