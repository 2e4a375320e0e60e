"""A bundle opened for reading."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from tpuembed.config.checks import did_you_mean
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    RowRangeError,
    UnknownTableError,
    reason,
)
from tpuembed.files import ByteFile, FilePath, FileVersion, as_path, open_bytes, read_all, versions
from tpuembed.formats.dtypes import OPAQUE, STRING, numpy_dtype
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import crc
from tpuembed.formats.tensor_bundle.entries import Entry, Slice
from tpuembed.formats.tensor_bundle.index import BundleIndex, index_path, read_index, shard_path
from tpuembed.formats.tensor_bundle.strings import decode_strings, strings_crc

__all__ = ["Bundle", "Damage", "damaged_parts", "strided_bytes", "unchecked_keys"]

Array = np.ndarray[Any, Any]

_PIECE_BYTES: Final = 1 << 22
"""The bytes to hold at a time of a slice that is narrower than its tensor."""
_CHECKED_BYTES: Final = 16 << 20
_VARIANT: Final = "variant"
_Ranges = Iterable[tuple[int, memoryview]]
"""(offset in a data file, the bytes to fill)."""


class _RowParts:
    """The parts of a tensor that is not empty, and whose slices, if any, have whole rows."""

    def __init__(self, entry: Entry) -> None:
        parts = sorted((part for part in entry.parts() if part.size), key=lambda part: part.start[0])
        self._starts, self._shards, self._offsets, self._ends = (
            np.array(numbers, np.int64)
            for numbers in zip(*((p.start[0], p.shard, p.offset, p.offset + p.size) for p in parts), strict=True)
        )
        self._rows = entry.shape[0]
        self._row_bytes = sum(part.size for part in parts) // self._rows

    @classmethod
    def of(cls, entry: Entry) -> Self | None:
        """Return the parts of a tensor, or None if it is empty, or if its slices cut more than rows."""
        if not entry.shape or 0 in entry.shape or any(part.shape[1:] != entry.shape[1:] for part in entry.parts()):
            return None
        return cls(entry)

    def locate(self, rows: Array, views: Sequence[memoryview]) -> Iterator[tuple[int, _Ranges]]:
        """Yield, by data file, the place of the bytes of every view, which starts with the row in `rows` (int64).

        Raises IndexError for rows outside of the tensor.
        """
        sizes = np.fromiter(map(len, views), np.int64, len(views))
        if len(rows) and (rows.min() < 0 or (rows + sizes // self._row_bytes).max() > self._rows):
            raise IndexError(f"{len(rows)} runs from row {rows.min()} on are not all inside its {self._rows} rows")
        parts = np.searchsorted(self._starts, rows, "right") - 1
        offsets = self._offsets[parts] + (rows - self._starts[parts]) * self._row_bytes
        places = offsets.tolist()
        if not (offsets + sizes > self._ends[parts]).any():  # neighbours in one data file are one request
            shards = self._shards[parts]
            changes = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
            for begin, end in itertools.pairwise((0, *changes, len(views)) if views else ()):
                yield int(shards[begin]), zip(places[begin:end], views[begin:end], strict=True)
            return
        for part, offset, view in zip(parts.tolist(), places, views, strict=True):
            while len(view):  # a run may continue in the next parts
                room = int(self._ends[part]) - offset
                yield int(self._shards[part]), [(offset, view[:room])]
                view, part = view[room:], part + 1
                offset = int(self._offsets[part]) if len(view) else 0


def strided_bytes(entry: Entry, rows: int) -> int:
    """Return the most bytes that reading `rows` rows holds beside them: a piece of a slice that also cuts other axes."""
    cut = [part.size // max(1, part.shape[0]) for part in entry.parts() if part.shape[1:] != entry.shape[1:]]
    return max((min(rows * row_bytes, max(_PIECE_BYTES, row_bytes)) for row_bytes in cut), default=0)


class Bundle:
    """TensorFlow's tensor bundle `prefix`.index + `prefix`.data-*, read by byte range. Safe to share among threads.

    Methods raise UnknownTableError for a tensor that it does not have, CheckpointFormatError for one of another dtype or shape,
    CheckpointCorruptError where bytes contradict a CRC or slices leave holes, and CheckpointError where a file cannot be read.

    Attributes:
        prefix: its path without the extensions.
        num_shards: the number of data files.
        entries: the index entry of each tensor.
    """

    def __init__(self, prefix: FilePath, index: BundleIndex) -> None:
        self.prefix, self.num_shards = prefix, index.num_shards
        self.entries: Mapping[str, Entry] = MappingProxyType(dict(index.entries))
        self._row_parts: dict[str, _RowParts | None] = {}
        self._lock, self._closed = threading.Lock(), False
        self._files: dict[int, ByteFile] = {}  # opened on first use
        self._versions = self._check_ranges()

    @classmethod
    def open(cls, prefix: str | FilePath) -> Self:
        """Read the index and check it against itself and the data files' sizes. No payload byte is read.

        Raises:
            CheckpointNotFoundError: `prefix`.index does not exist.
            CheckpointCorruptError: the index contradicts itself or the data files.
            CheckpointFormatError: the index is of a kind that is not supported.
        """
        prefix = as_path(prefix)
        return cls(prefix, read_index(index_path(prefix)))

    def _check_ranges(self) -> dict[int, FileVersion]:
        """Return the versions of the data files, of which every part is inside one and overlaps no other part."""
        parts = [(name, part) for name, entry in self.entries.items() for part in entry.parts()]
        shards = sorted({part.shard for _, part in parts})
        try:
            found = dict(zip(shards, versions([self.data_path(shard) for shard in shards]), strict=True))
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"data file {error.filename}: is missing, but the index puts tensors in it. Copy it here."
            ) from None
        except OSError as error:
            raise _unreadable(error) from None
        ends: dict[int, int] = {}
        for name, part in sorted(parts, key=lambda item: (item[1].shard, item[1].offset, item[1].size)):
            path, size, end = self.data_path(part.shard), found[part.shard].size, part.offset + part.size
            if end > size:
                raise CheckpointCorruptError.of(
                    f"data file {path}: has {size} bytes, but the index puts tensor {name!r} at bytes [{part.offset}, "
                    f"{end}). It is truncated"
                )
            if part.size and part.offset < ends.get(part.shard, 0):
                raise CheckpointCorruptError(
                    f"data file {path}: the index puts tensor {name!r} at byte {part.offset}, inside the previous "
                    f"tensor, which ends at {ends[part.shard]}. Restore the index from another copy."
                )
            ends[part.shard] = max(end, ends.get(part.shard, 0))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the data files."""
        with self._lock:
            self._closed = True
            while self._files:
                self._files.popitem()[1].close()

    def data_path(self, shard: int) -> FilePath:
        """Return the path of data file `shard`."""
        return shard_path(self.prefix, shard, self.num_shards)

    def fingerprint(self) -> str:
        """Return a digest of the index's bytes, and of the current sizes and modification times (or ETags) of files."""
        index = index_path(self.prefix)
        shards = {part.shard for entry in self.entries.values() for part in entry.parts()}
        try:
            stamps = versions([index, *(self.data_path(shard) for shard in sorted(shards))])
            parts = [crc.value(index.read_bytes()), *((stamp.size, stamp.tag) for stamp in stamps)]
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.prefix}: cannot be read any more: {reason(error)}.") from None
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def entry(self, key: str) -> Entry:
        """Return the entry of tensor `key`, if its bytes are complete."""
        if key not in self.entries:
            raise UnknownTableError(f"bundle {self.prefix}: has no tensor {key!r}; {did_you_mean(key, self.entries)}")
        entry = self.entries[key]
        if entry.holes:
            raise CheckpointCorruptError.of(f"index {index_path(self.prefix)}: tensor {key!r}: {entry.holes}")
        return entry

    def read(self, key: str) -> Array:
        """Return the whole tensor. A string tensor is an object array of bytes."""
        entry = self.entry(key)
        if entry.dtype == STRING:
            return self._read_strings(key, entry)
        if entry.shape:
            return self.read_rows(key, 0, entry.shape[0])
        out = np.empty((), self._dtype(key, entry))
        self._read_into([(entry.shard, entry.offset, out)])
        return out

    def read_rows(self, key: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Return rows [start, stop) of tensor `key`, [stop - start, *shape[1:]], read into `out` if it is given.

        Only these bytes are read. If they are contiguous, they go straight into `out`.

        Raises:
            RowRangeError: the range is not inside the tensor.
            ConfigError: `out` has another shape or dtype.
        """
        entry = self.entry(key)
        dtype, rows = self._dtype(key, entry), entry.shape[0] if entry.shape else 0
        if not 0 <= start <= stop <= rows:
            raise RowRangeError(
                f"tensor {key!r}: rows [{start}, {stop}) are not inside its {rows} rows. Give rows in [0, {rows})."
            )
        shape = (stop - start, *entry.shape[1:])
        if out is None:
            out = np.empty(shape, dtype)
        elif out.shape != shape or out.dtype != dtype:
            raise ConfigError(f"tensor {key!r}: out must be {dtype} {shape}, got {out.dtype} {out.shape}.")
        targets = []
        for part in entry.parts():
            first, last = max(start, part.start[0]), min(stop, part.start[0] + part.shape[0])
            if first < last and 0 not in part.shape:
                columns = (slice(low, low + size) for low, size in zip(part.start[1:], part.shape[1:], strict=True))
                offset = part.offset + (first - part.start[0]) * (part.size // part.shape[0])
                targets.append((part.shard, offset, out[(slice(first - start, last - start), *columns)]))
        self._read_into(target for target in targets if target[2].flags.c_contiguous)
        for shard, offset, target in targets:
            if target.flags.c_contiguous:
                continue
            row_bytes = target[0].nbytes  # its rows are not contiguous: read them through a small buffer
            step = min(len(target), max(1, _PIECE_BYTES // row_bytes))
            buffer = np.empty((step, *target.shape[1:]), target.dtype)
            for row in range(0, len(target), step):
                piece = buffer[: len(target) - row]
                self._read_into([(shard, offset + row * row_bytes, piece)])
                target[row : row + step] = piece
        return out

    def read_runs(self, key: str, rows: Array, views: Sequence[memoryview]) -> None:
        """Fill every view with the bytes of whole rows of tensor `key`. `rows` (int64) has the first row of each view.

        Made for many short runs of rows. From a store they are read in parallel.

        Raises:
            RowRangeError: a run is not inside the tensor.
        """
        entry = self.entry(key)
        dtype = self._dtype(key, entry)
        if key not in self._row_parts:
            self._row_parts[key] = _RowParts.of(entry)
        parts = self._row_parts[key]
        if parts is None:  # slices also cut columns, or the tensor is empty
            for row, view in zip(rows.tolist(), views, strict=True):
                out = np.frombuffer(view, dtype).reshape(-1, *entry.shape[1:])
                self.read_rows(key, row, row + len(out), out)
            return
        try:
            self._read_views(parts.locate(rows, views))
        except IndexError as error:
            raise RowRangeError(f"tensor {key!r}: {error}.") from None

    def read_string(self, key: str) -> bytes:
        """Return the string of a scalar string tensor."""
        entry = self.entry(key)
        if entry.dtype != STRING or entry.shape:
            raise CheckpointFormatError(
                f"bundle {self.prefix}: tensor {key!r} is {entry.dtype} {list(entry.shape)}. It should be a scalar string. "
                "Choose another tensor."
            )
        text: bytes = self._read_strings(key, entry).item()
        return text

    def _read_strings(self, key: str, entry: Entry) -> Array:
        if entry.slices:
            raise CheckpointFormatError(
                f"bundle {self.prefix}: string tensor {key!r} is sliced, which is not supported."
            )
        payload = np.empty(entry.size, np.uint8)
        self._read_into([(entry.shard, entry.offset, payload)])
        try:
            values = decode_strings(payload.tobytes(), math.prod(entry.shape), entry.crc32c)
        except MalformedError as error:
            raise CheckpointCorruptError.of(
                f"data file {self.data_path(entry.shard)}: tensor {key!r}: {error}"
            ) from None
        out = np.empty(len(values), object)
        out[:] = values
        return out.reshape(entry.shape)

    def verify(self, key: str, chunk_bytes: int = 1 << 23) -> None:
        """Read tensor `key`, `chunk_bytes` at a time, and compare its CRCs."""
        entry = self.entry(key)
        if entry.dtype == STRING:
            self._read_strings(key, entry)
            return
        self._dtype(key, entry)
        for part in entry.parts():
            if fault := self.fault(key, part, chunk_bytes):
                raise CheckpointCorruptError.of(f"data file {self.data_path(part.shard)}: tensor {key!r}: {fault}")

    def fault(
        self, key: str, part: Slice, chunk_bytes: int, on_read: Callable[[int], None] = lambda _: None
    ) -> str | None:
        """Read a part of tensor `key`, `chunk_bytes` at a time. Return in what it differs from its CRC, or None.

        `on_read` is called with the number of bytes just read. The dtype variant has another kind of CRC.
        """
        place = f"bytes [{part.offset}, {part.offset + part.size})"
        pieces = self._pieces(part, chunk_bytes, on_read)
        try:
            if self.entries[key].dtype == STRING:
                actual = strings_crc((piece.tobytes() for piece in pieces), math.prod(part.shape), part.size)
            else:
                actual = functools.reduce(crc.extend, pieces, 0)
        except MalformedError as error:
            return f"{place}: {error}"
        if actual == part.crc32c:
            return None
        return f"{place} have CRC32C {actual:#010x}, but the index has {part.crc32c:#010x}"

    def _pieces(self, part: Slice, chunk_bytes: int, on_read: Callable[[int], None]) -> Iterator[Array]:
        """Yield the bytes of a part. Each piece is valid until the next."""
        buffer = np.empty(min(chunk_bytes, part.size), np.uint8)
        for done in range(0, part.size, chunk_bytes):
            piece = buffer[: part.size - done]
            self._read_into([(part.shard, part.offset + done, piece)])
            on_read(len(piece))
            yield piece

    def _read_into(self, ranges: Iterable[tuple[int, int, Array]]) -> None:
        """Fill every C-contiguous array with the bytes of its data file at its offset, without an intermediate copy."""
        self._read_views((shard, [(at, out.reshape(-1).view(np.uint8).data)]) for shard, at, out in ranges if out.size)

    def _read_views(self, ranges: Iterable[tuple[int, _Ranges]]) -> None:
        """Fill the buffers, given with their offsets for each data file, in parallel from a store."""
        try:
            read_all((self._files.get(shard) or self._opened(shard), in_file) for shard, in_file in ranges)
        except OSError as error:
            raise _unreadable(error) from None
        except EOFError as error:
            raise CheckpointCorruptError(
                f"data file {error}. It was truncated after it was opened. Read it when no program writes to it."
            ) from None

    def _opened(self, shard: int) -> ByteFile:
        with self._lock:
            if self._closed:
                raise CheckpointError(f"bundle {self.prefix}: is closed. Open it again.")
            if shard not in self._files:
                file = open_bytes(self.data_path(shard))
                if file.version != self._versions[shard]:
                    file.close()
                    raise CheckpointError(
                        f"data file {self.data_path(shard)}: has changed since the checkpoint was opened, so it may not "
                        "match the index. Open the checkpoint again."
                    )
                self._files[shard] = file
            return self._files[shard]

    def _dtype(self, key: str, entry: Entry) -> np.dtype[Any]:
        if entry.dtype == STRING or entry.dtype in OPAQUE:
            raise CheckpointFormatError(
                f"bundle {self.prefix}: tensor {key!r} has dtype {entry.dtype}. It should be numeric. Choose another tensor."
            )
        return numpy_dtype(entry.dtype)


def _unreadable(error: OSError) -> CheckpointError:
    return CheckpointError(f"data file {error.filename}: cannot be read: {reason(error)}.")


@dataclasses.dataclass(frozen=True)
class Damage:
    """A tensor, or one of its slices, whose bytes do not match their checksum.

    Attributes:
        name: of the tensor.
        file: its data file.
        reason: the fault, in one line.
    """

    name: str
    file: str
    reason: str


def unchecked_keys(bundle: Bundle) -> list[str]:
    """Return the tensors whose kind of checksum is not supported."""
    return sorted(key for key, entry in bundle.entries.items() if entry.dtype == _VARIANT)


def damaged_parts(bundle: Bundle, on_read: Callable[[int], None], without: Container[str] = ()) -> Iterator[Damage]:
    """Read every data file, except for the tensors `without`, and yield what does not match its checksum.

    `on_read` is called with the number of bytes just read.
    """
    parts = [
        (part.shard, part.offset, key, part)
        for key, entry in bundle.entries.items()
        if entry.dtype != _VARIANT and key not in without
        for part in entry.parts()
    ]
    for shard, _, key, part in sorted(parts, key=lambda item: item[:3]):
        try:
            fault = bundle.fault(key, part, _CHECKED_BYTES, on_read)
        except CheckpointError as error:
            fault = str(error)
        if fault is not None:
            yield Damage(key, str(bundle.data_path(shard)), fault)
