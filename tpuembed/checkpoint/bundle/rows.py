"""The order of a table's rows in its tensor: one class per on-disk format, chosen once per table."""

from functools import partial, reduce
from pathlib import Path
from typing import ClassVar, Final, Protocol

from tpuembed.checkpoint.bundle.mod_sharded import DISK, STORE, ModSharded, ReadRuns, buffer_bytes, read_mod_sharded
from tpuembed.checkpoint.types import Array
from tpuembed.files import IN_FLIGHT_BYTES
from tpuembed.tensor_bundle import Bundle, Entry, crc
from tpuembed.tensor_bundle.dtypes import numpy_dtype
from tpuembed.tensor_bundle.reader import strided_bytes

__all__ = ["DENSE", "DenseRows", "RowLayout", "mod_sharded_bytes", "read_mod_sharded_rows", "recorded_checksum"]


class RowLayout(Protocol):
    """Finds the rows of one table, and of its slots, in a tensor of a bundle."""

    @property
    def format(self) -> str:
        """Return the name of the on-disk format."""

    def shape(self, entry: Entry) -> tuple[int, int]:
        """Return (rows, dim) of the table in a tensor, which is a matrix.

        Raises:
            MalformedError: the tensor cannot hold it.
        """

    def describe(self, entry: Entry, /) -> str:
        """Return a short description of the layout; empty for rows in order in one piece."""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the existing rows [start, start + n) of the table, from tensor `key`."""

    def checksum(self, entry: Entry) -> int | None:
        """Return the CRC32C, unmasked, of the table's rows in order; None if the tensor's entry does not have it."""

    @property
    def mod_sharding(self) -> ModSharded | None:
        """Return the mod-sharding of the rows, or None. If they are, the tensor's checksums cover runs of rows in
        another order.
        """

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Return the most bytes that reading `rows` rows holds beside them. It does not decrease with more rows."""


class DenseRows:
    """Rows in the order of their ids, in any slices and data files."""

    format: ClassVar[str] = "dense"

    @property
    def mod_sharding(self) -> ModSharded | None:
        """Return None: the rows are in order."""
        return None

    def shape(self, entry: Entry) -> tuple[int, int]:
        """Return the shape of the tensor."""
        rows, dim = entry.shape
        return rows, dim

    def describe(self, entry: Entry, /) -> str:
        """Return the number of slices as text."""
        return f"{len(entry.slices)} slices" if entry.slices else ""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Read the rows straight into `out`."""
        bundle.read_rows(key, start, start + len(out), out)

    def checksum(self, entry: Entry) -> int | None:
        """Return the CRC32C of the tensor's slices in order, if they are runs of rows; None if they also cut columns."""
        return recorded_checksum(entry)

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Return the bytes of the small buffer that rows pass through if slices cut columns."""
        return _transfer_bytes(bundle) + strided_bytes(entry, rows)


def recorded_checksum(entry: Entry) -> int | None:
    """Return the CRC32C of a matrix's slices in order, if they are runs of rows; None if they also cut columns."""
    parts = sorted(entry.parts(), key=lambda part: part.start)
    if any(part.shape[1] != entry.shape[1] for part in parts):
        return None
    return reduce(lambda checksum, part: crc.combine(checksum, part.crc32c, part.size), parts, 0)


DENSE: Final = DenseRows()


def mod_sharded_bytes(source: ModSharded, bundle: Bundle, entry: Entry, rows: int, dim: int) -> int:
    """Return the most bytes that `read_mod_sharded_rows` of [rows, dim] holds beside them."""
    sizes = DISK if isinstance(bundle.prefix, Path) else STORE
    buffer = buffer_bytes(source, rows, dim, numpy_dtype(entry.dtype).itemsize, sizes)
    return _transfer_bytes(bundle) + strided_bytes(entry, rows) + buffer


def _transfer_bytes(bundle: Bundle) -> int:
    """Return the most bytes in transfer from a store."""
    return 0 if isinstance(bundle.prefix, Path) else IN_FLIGHT_BYTES


def read_mod_sharded_rows(
    source: ModSharded, bundle: Bundle, key: str, start: int, out: Array, read: ReadRuns | None = None
) -> None:
    """Fill `out`, [n, dim], with the rows [start, start + n) of a table that is mod-sharded in tensor `key`.

    `read` reads the tensor; None for the bundle itself.
    """
    sizes = DISK if isinstance(bundle.prefix, Path) else STORE
    read_mod_sharded(source, start, out, read or partial(bundle.read_runs, key), sizes)
