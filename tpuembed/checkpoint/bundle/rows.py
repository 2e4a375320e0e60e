"""The order of a table's rows in its tensor, chosen once per table."""

from functools import partial, reduce
from pathlib import Path
from typing import Final

from tpuembed.checkpoint.bundle.mod_sharded import (
    DISK_BLOCK_BYTES,
    STORE_BLOCK_BYTES,
    ModSharded,
    ReadRuns,
    buffer_bytes,
    read_mod_sharded,
)
from tpuembed.checkpoint.types import Array
from tpuembed.files import IN_FLIGHT_BYTES
from tpuembed.tensor_bundle import Bundle, Entry, crc
from tpuembed.tensor_bundle.dtypes import numpy_dtype
from tpuembed.tensor_bundle.reader import strided_bytes

__all__ = ["DENSE", "RowLayout", "read_mod_sharded_rows", "recorded_checksum"]


class RowLayout:
    """Finds the rows of one table, and of its slots, in a tensor of a bundle: in the order of their ids, or mod-sharded.

    Attributes:
        format: the name of the on-disk format.
        mod_sharding: of the rows, or None. If there is one, the tensor's checksums cover runs of rows in another order.
    """

    def __init__(self, format: str, pieces: str, mod_sharding: ModSharded | None = None) -> None:  # noqa: A002
        """Take the words for the tensor's slices as `pieces`."""
        self.format, self._pieces, self.mod_sharding = format, pieces, mod_sharding

    def shape(self, entry: Entry) -> tuple[int, int]:
        """Return (rows, dim) of the table in a tensor, which is a matrix. Raises MalformedError if it cannot hold it."""
        rows, dim = entry.shape
        return rows, dim

    def describe(self, entry: Entry) -> str:
        """Return a short description of the layout; empty for rows in order in one piece."""
        return f"{len(entry.slices)} {self._pieces}" if entry.slices else ""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the existing rows [start, start + n) of the table, from tensor `key`."""
        if self.mod_sharding is None:
            bundle.read_rows(key, start, start + len(out), out)
        else:
            read_mod_sharded_rows(self.mod_sharding, bundle, key, start, out)

    def checksum(self, entry: Entry) -> int | None:
        """Return the CRC32C, unmasked, of the table's rows in order; None if the tensor's entry does not have it."""
        return recorded_checksum(entry) if self.mod_sharding is None else None

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Return the most bytes that reading `rows` rows holds beside them. It does not decrease with more rows."""
        held = strided_bytes(entry, rows) + (0 if isinstance(bundle.prefix, Path) else IN_FLIGHT_BYTES)
        if self.mod_sharding is None:
            return held
        itemsize = numpy_dtype(entry.dtype).itemsize
        return held + buffer_bytes(self.mod_sharding, rows, itemsize, _block_bytes(bundle))


DENSE: Final = RowLayout("dense", "slices")


def recorded_checksum(entry: Entry) -> int | None:
    """Return the CRC32C of a matrix's slices in order, if they are runs of rows; None if they also cut columns."""
    parts = sorted(entry.parts(), key=lambda part: part.start)
    if any(part.shape[1] != entry.shape[1] for part in parts):
        return None
    return reduce(lambda checksum, part: crc.combine(checksum, part.crc32c, part.size), parts, 0)


def read_mod_sharded_rows(
    source: ModSharded, bundle: Bundle, key: str, start: int, out: Array, read: ReadRuns | None = None
) -> None:
    """Fill `out`, [n, dim], with the rows [start, start + n) of a table that is mod-sharded in tensor `key`.

    `read` reads the tensor; None for the bundle itself.
    """
    read_mod_sharded(source, start, out, read or partial(bundle.read_runs, key), _block_bytes(bundle))


def _block_bytes(bundle: Bundle) -> int:
    return DISK_BLOCK_BYTES if isinstance(bundle.prefix, Path) else STORE_BLOCK_BYTES
