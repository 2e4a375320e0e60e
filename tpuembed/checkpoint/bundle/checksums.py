"""The checksums of a bundle's tables, of mod-sharded ones by partial checksums: their own cover the bytes in another order.

A reader adds up the contributions of its runs to the CRC32C of their tensor. After all rows of some tables of a stack,
and the other bytes of the stack, were read, the sum must equal the tensor's checksum. So a streamed table need not be
read a second time to be verified.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Final

import numpy as np

from tpuembed.checkpoint.bundle.rows import ModSharded, read_mod_sharded
from tpuembed.checkpoint.bundle.table_keys import TableKeys
from tpuembed.checkpoint.types import Array, PartialChecksum, TableInfo
from tpuembed.formats.tensor_bundle import Bundle, Entry, crc

__all__ = ["DISK_PIECE_BYTES", "BundleChecksums"]

DISK_PIECE_BYTES: Final = 1 << 20
"""A piece of this size stays in a processor's cache between the read and the checksum."""


class BundleChecksums:
    """The checksums in a bundle's index; see Checksums."""

    def __init__(self, bundle: Bundle, keys: Mapping[str, TableKeys], tables: Mapping[str, TableInfo]) -> None:
        self._bundle, self._keys, self._tables = bundle, keys, tables

    def recorded(self, table: str, slot: str | None = None) -> int | None:
        """See Checksums. None if the index has checksums of the rows in another order."""
        keys = self._keys.get(table)
        if keys is None or keys.rows.mod_sharding is not None:
            return None
        return _recorded(self._bundle.entries[keys.key if slot is None else keys.slots[slot]])

    def piece_rows(self, table: str) -> int | None:
        """Return the rows of a megabyte or two, on a disk: this was a fifth faster than four."""
        if table not in self._keys or not isinstance(self._bundle.prefix, Path):
            return None
        info = self._tables[table]
        runs = 1 if self._keys[table].rows.mod_sharding is None else 2  # a piece may contain rows of every SparseCore
        return max(1, runs * DISK_PIECE_BYTES // (info.dim * info.dtype.itemsize))

    def reader(self, table: str) -> "_ModShardedReader | None":
        """Return a reader of a mod-sharded table; None for others."""
        keys = self._keys.get(table)
        sharding = None if keys is None else keys.rows.mod_sharding
        return None if keys is None or sharding is None else _ModShardedReader(sharding, self._bundle, keys.key)

    def proven(self, tables: Iterable[str], sums: Mapping[str, PartialChecksum]) -> Mapping[str, bool]:
        """See Checksums."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for table in tables:
            if table in self._keys:
                groups[self._keys[table].key].append(table)
        found: dict[str, bool] = {}
        for key, names in groups.items():
            shardings = [(self._keys[name].rows.mod_sharding, self._tables[name].rows) for name in names]
            answer = _matches(self._bundle, key, shardings, sums.get(key, PartialChecksum()))
            found |= {} if answer is None else dict.fromkeys(names, answer)
        return found


def _recorded(entry: Entry) -> int | None:
    """Return the CRC32C of a matrix's slices in order, if they are runs of rows; None if they also cut columns."""
    parts = sorted(entry.parts(), key=lambda part: part.start)
    if any(part.shape[1] != entry.shape[1] for part in parts):
        return None
    return reduce(lambda checksum, part: crc.combine(checksum, part.crc32c, part.size), parts, 0)


class _ModShardedReader:
    """Reads a mod-sharded table in tensor `key`, placed as `source` describes, each row once, and adds up the checksums.

    Several threads may read.
    """

    def __init__(self, source: ModSharded, bundle: Bundle, key: str) -> None:
        self._source, self._bundle, self._key = source, bundle, key
        self._runs: list[tuple[Array, list[int], list[int]]] = []

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the rows [start, start + n)."""
        read_mod_sharded(self._source, self._bundle, self._key, start, out, self._read)

    def _read(self, rows: Array, views: Sequence[memoryview]) -> None:
        self._bundle.read_runs(self._key, rows, views)
        self._runs.append((rows, [len(view) for view in views], [crc.value(view) for view in views]))

    def sums(self) -> Mapping[str, PartialChecksum]:
        """Return the partial checksum of the tensor."""
        if not self._runs:
            return {self._key: PartialChecksum()}
        runs = (np.concatenate(column) for column in zip(*self._runs, strict=True))
        return {self._key: _sum_of(self._bundle.entries[self._key], *runs)}


def _matches(
    bundle: Bundle, key: str, tables: Sequence[tuple[ModSharded | None, int]], read: PartialChecksum
) -> bool | None:
    """Returns True if tensor `key` has the checksum in its entry; None if `read` does not cover enough to tell.

    `tables` has the mod-sharding and the number of rows of each table of which all rows were read, with the checksum
    `read`. Bytes beside them, which are padding and other tables of the stack, are read here.
    """
    entry = bundle.entries[key]
    recorded = _recorded(entry)
    if recorded is None or not read.bytes:
        return None
    found = []  # [parts, 2] of each table: the first stored row of each part, and the number of rows
    for source, rows in tables:
        if source is not None:
            parts = np.arange(min(source.count, rows))
            found.append(np.stack([source.first_rows(parts), (rows - parts + source.count - 1) // source.count], 1))
    runs = np.concatenate(found)
    runs = runs[np.argsort(runs[:, 0])]
    ends = runs[:, 0] + runs[:, 1]
    if (ends[:-1] > runs[1:, 0]).any() or int(runs[:, 1].sum()) * _row_bytes(entry) != read.bytes:
        return None
    step = max(1, DISK_PIECE_BYTES // max(1, _row_bytes(entry)))
    for begin, end in zip([0, *ends.tolist()], [*runs[:, 0].tolist(), entry.shape[0]], strict=True):
        for row in range(begin, end, step):
            data = bundle.read_rows(key, row, min(row + step, end)).reshape(-1).view(np.uint8)
            read += _sum_of(entry, np.array([row]), np.array([len(data)]), np.array([crc.value(data)]))
    return read.checksum == recorded


def _sum_of(entry: Entry, rows: Array, sizes: Array, checksums: Array) -> PartialChecksum:
    """Return the partial checksum of runs, given the first row of each, its bytes and its CRC32C."""
    after = _size(entry) - rows * _row_bytes(entry) - sizes
    return PartialChecksum(crc.sum_of_pieces(checksums, after), int(sizes.sum()))


def _size(entry: Entry) -> int:
    return sum(part.size for part in entry.parts())


def _row_bytes(entry: Entry) -> int:
    return _size(entry) // max(1, entry.shape[0])
