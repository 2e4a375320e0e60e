"""The interface of every checkpoint reader."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

__all__ = [
    "Array",
    "Checkpoint",
    "PartialChecksum",
    "PieceAdvice",
    "ReadBuffers",
    "SmallPieces",
    "SummedReader",
    "SummedReads",
    "TableInfo",
]

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class TableInfo:
    """A table of a checkpoint.

    Attributes:
        name: the name that `read` takes.
        rows, dim: its shape.
        dtype: of its elements.
        slots: of its optimizer, each [rows, dim], by TensorFlow's mid-level names (accumulators, momenta, velocities,
            linears), whatever names the file has.
        layout: a short description, for people, of the order of its rows in the files; empty if rows are in order.
    """

    name: str
    rows: int
    dim: int
    dtype: np.dtype[Any]
    slots: tuple[str, ...] = ()
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class PartialChecksum:
    """Partial CRC32C of the pieces of a tensor that were read. Partial checksums of disjoint pieces can be added.

    Attributes:
        checksum: the pieces' contribution to its CRC32C; see `tpuembed.tensor_bundle.crc_pieces`.
        bytes: number of bytes read.
    """

    checksum: int = 0
    bytes: int = 0

    def __add__(self, other: "PartialChecksum") -> "PartialChecksum":
        return PartialChecksum(self.checksum ^ other.checksum, self.bytes + other.bytes)


@runtime_checkable
class Checkpoint(Protocol):
    """A checkpoint opened for reading. A read uses the memory of the rows read, and any thread may read."""

    @property
    def format(self) -> str:
        """Return the name of the on-disk format."""

    @property
    def path(self) -> str:
        """Return the path that opens the same checkpoint again, even if there is a newer one by then."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the options that open it the same way again: JSON values, and usually empty."""

    @property
    def layer_config(self) -> dict[str, Any] | None:
        """Return the config of the tpuembed layers that wrote it, as `feature_config_from_dict` reads it; None for
        others.
        """

    def tables(self) -> dict[str, TableInfo]:
        """Return the tables by name; never empty."""

    def read(self, table: str, start: int = 0, stop: int | None = None, slot: str | None = None) -> Array:
        """Return rows [start, stop) of a table or of one of its slots, [stop - start, dim]. `stop` None is the end.

        Raises:
            UnknownTableError: there is no such table or slot.
            RowRangeError: the range is not inside the table.
        """

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        """Fill `out`, [n, dim] of the table's dtype, with rows [start, start + n).

        Raises:
            UnknownTableError, RowRangeError: as `read`.
            ConfigError: `out` has another width or dtype.
        """

    def checksum(self, table: str, slot: str | None = None) -> int | None:
        """Return the recorded CRC32C, unmasked, of the rows of a table or slot in order; None if the checkpoint has
        none.

        Raises:
            UnknownTableError: there is no such table or slot.
        """

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """Read the tensors of `tables`, or of that slot of theirs, and compare them with the checksums in the files.

        It takes bounded memory. If a format has no checksums of rows, nothing is read.

        Raises:
            UnknownTableError: there is no such table or slot.
            CheckpointCorruptError: a checksum is wrong.
        """

    def fingerprint(self) -> str:
        """Return a text that changes when the checkpoint's files change. Reads only metadata."""

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ReadBuffers(Protocol):
    """A checkpoint whose reads hold more memory than the rows that are read."""

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """Return the most bytes that a thread holds beside the rows while it reads `table`, `rows` rows at a time.

        The result does not decrease with more rows.

        Raises:
            UnknownTableError: there is no such table.
        """


class SummedReader(Protocol):
    """Reads one table, each row once, and adds up the checksums."""

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`; see Checkpoint.read_into."""

    def sums(self) -> Mapping[str, PartialChecksum]:
        """Return the checksums of what it has read so far, by tensor."""


@runtime_checkable
class SummedReads(Protocol):
    """A checkpoint whose checksums cover bytes in another order than a table's rows."""

    def summed(self, table: str) -> SummedReader | None:
        """Return a reader of `table`, or None if `checksum` covers it, or if it has no checksum.

        Raises:
            UnknownTableError: there is no such table.
        """

    def proven(self, tables: Collection[str], sums: Mapping[str, PartialChecksum]) -> Mapping[str, bool]:
        """Compare `tables`, all of whose rows were read, with the files' checksums. Return whether each is right.

        Other bytes that the checksums cover are read here. Tables for which `sums` are not enough are left out.

        Raises:
            UnknownTableError: there is no such table.
        """


@runtime_checkable
class SmallPieces(Protocol):
    """A checkpoint that is read fastest in pieces that fit in a processor's cache."""

    def piece_rows(self, table: str) -> int | None:
        """Return the number of rows of `table` to read at a time, or None if more are better.

        Raises:
            UnknownTableError: there is no such table.
        """


@runtime_checkable
class PieceAdvice(Protocol):
    """A checkpoint that takes much longer to read in pieces than at once."""

    def advise(self, table: str, rows: int) -> str | None:
        """Return advice for reading all of a table, `rows` rows at a time, or None if there is none.

        Raises:
            UnknownTableError: there is no such table.
        """
