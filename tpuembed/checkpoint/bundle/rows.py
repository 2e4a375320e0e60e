"""How the rows of a table lie in the tensor that holds them: one class per on-disk format, chosen once per table."""

from functools import partial, reduce
from pathlib import Path
from typing import ClassVar, Final, Protocol

from tpuembed.checkpoint.bundle.mod_sharded import DISK, STORE, Interleaved, ReadRuns, buffer_bytes, read_interleaved
from tpuembed.checkpoint.types import Array
from tpuembed.files import IN_FLIGHT_BYTES
from tpuembed.tensor_bundle import Bundle, Entry, crc
from tpuembed.tensor_bundle.dtypes import numpy_dtype
from tpuembed.tensor_bundle.reader import strided_bytes

__all__ = ["DENSE", "DenseRows", "RowLayout", "dealt_bytes", "read_dealt_rows", "stated_checksum"]


class RowLayout(Protocol):
    """Finds the rows of one table, and of its slots, in a tensor of a bundle."""

    @property
    def format(self) -> str:
        """The name of the on-disk format."""

    def shape(self, entry: Entry) -> tuple[int, int]:
        """(rows, dim) of the table in a tensor, which is a matrix.

        Raises:
            MalformedError: the tensor cannot hold it.
        """

    def describe(self, entry: Entry, /) -> str:
        """The layout in a few words for people; empty for rows one after another in one piece."""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the table's rows [start, start + n), which it has, from tensor `key`."""

    def checksum(self, entry: Entry) -> int | None:
        """CRC32C, unmasked, of the table's rows one after another; None where the tensor's entry does not say."""

    @property
    def dealt(self) -> Interleaved | None:
        """How the rows are dealt out, where they are: then the tensor's checksums are over runs of rows in another order."""

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """The most that reading `rows` rows holds beside them; not less for more rows."""


class DenseRows:
    """Row = id, whatever slices and data files hold the tensor."""

    format: ClassVar[str] = "dense"

    @property
    def dealt(self) -> Interleaved | None:
        """They are not."""
        return None

    def shape(self, entry: Entry) -> tuple[int, int]:
        """That of the tensor."""
        rows, dim = entry.shape
        return rows, dim

    def describe(self, entry: Entry, /) -> str:
        """The number of slices."""
        return f"{len(entry.slices)} slices" if entry.slices else ""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Read them straight into `out`."""
        bundle.read_rows(key, start, start + len(out), out)

    def checksum(self, entry: Entry) -> int | None:
        """Of the tensor's slices one after another, where they are runs of rows; None where they cut columns too."""
        return stated_checksum(entry)

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Where slices cut columns, rows go through a small buffer."""
        return _transfer_bytes(bundle) + strided_bytes(entry, rows)


def stated_checksum(entry: Entry) -> int | None:
    """CRC32C of a matrix's slices one after another, where they are runs of rows; None where they cut columns too."""
    parts = sorted(entry.parts(), key=lambda part: part.start)
    if any(part.shape[1] != entry.shape[1] for part in parts):
        return None
    return reduce(lambda checksum, part: crc.combine(checksum, part.crc32c, part.size), parts, 0)


DENSE: Final = DenseRows()


def dealt_bytes(source: Interleaved, bundle: Bundle, entry: Entry, rows: int, dim: int) -> int:
    """The most that `read_dealt_rows` of [rows, dim] holds beside them."""
    sizes = DISK if isinstance(bundle.prefix, Path) else STORE
    dealt = buffer_bytes(source, rows, dim, numpy_dtype(entry.dtype).itemsize, sizes)
    return _transfer_bytes(bundle) + strided_bytes(entry, rows) + dealt


def _transfer_bytes(bundle: Bundle) -> int:
    """Of what is on its way from a store."""
    return 0 if isinstance(bundle.prefix, Path) else IN_FLIGHT_BYTES


def read_dealt_rows(
    source: Interleaved, bundle: Bundle, key: str, start: int, out: Array, read: ReadRuns | None = None
) -> None:
    """Fill `out`, [n, dim], with the rows [start, start + n) that are dealt out in tensor `key` as `source` says.

    `read` reads the tensor, where it is not the bundle itself.
    """
    sizes = DISK if isinstance(bundle.prefix, Path) else STORE
    read_interleaved(source, start, out, read or partial(bundle.read_runs, key), sizes)
