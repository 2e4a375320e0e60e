"""What every checkpoint reader offers, whatever is on disk."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

__all__ = [
    "Array",
    "Checkpoint",
    "PieceAdvice",
    "ReadBuffers",
    "ReadSum",
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
        name: what `read` takes.
        rows, dim: its shape.
        dtype: of its elements.
        slots: of its optimizer, each [rows, dim]; TensorFlow's mid-level names (accumulators, momenta, velocities,
            linears) whatever the file calls them.
        layout: how its rows lie in the files, in a few words for people; empty where there is nothing to say.
    """

    name: str
    rows: int
    dim: int
    dtype: np.dtype[Any]
    slots: tuple[str, ...] = ()
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class ReadSum:
    """What reads met of a tensor; sums of different pieces add up.

    Attributes:
        checksum: the pieces' contribution to its CRC32C; see `tpuembed.tensor_bundle.crc_pieces`.
        bytes: how many.
    """

    checksum: int = 0
    bytes: int = 0

    def __add__(self, other: "ReadSum") -> "ReadSum":
        return ReadSum(self.checksum ^ other.checksum, self.bytes + other.bytes)


@runtime_checkable
class Checkpoint(Protocol):
    """A checkpoint opened for reading; reads take the memory of the rows asked for, and any thread may read."""

    @property
    def format(self) -> str:
        """The name of the on-disk format."""

    @property
    def path(self) -> str:
        """What `open_checkpoint` takes to open the same checkpoint again, even when a newer one has come."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What `open_checkpoint` takes beside `path` to open it the same way again: JSON, and usually empty."""

    @property
    def layer_config(self) -> dict[str, Any] | None:
        """The config of the tpuembed layers that wrote it, as `feature_config_from_dict` reads it; None for others."""

    def tables(self) -> dict[str, TableInfo]:
        """The tables by name; never empty."""

    def read(self, table: str, start: int = 0, stop: int | None = None, slot: str | None = None) -> Array:
        """Rows [start, stop) of a table or of one of its slots: [stop - start, dim]; `stop` None is the end.

        Raises:
            UnknownTableError: there is no such table or slot.
            RowRangeError: the range is not inside the table.
        """

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        """Fill `out`, [n, dim] of the table's dtype, with rows [start, start + n).

        Raises:
            UnknownTableError, RowRangeError: as `read`.
            ConfigError: `out` is of another width or dtype.
        """

    def checksum(self, table: str, slot: str | None = None) -> int | None:
        """CRC32C, unmasked, of the rows of a table or slot one after another, as the checkpoint states it; None where it does not.

        Raises:
            UnknownTableError: there is no such table or slot.
        """

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """Read what holds `tables`, or that slot of theirs, through once, and compare it with the checksums that the files keep.

        It takes bounded memory. Where a format keeps no checksums of rows nothing is read.

        Raises:
            UnknownTableError: there is no such table or slot.
            CheckpointCorruptError: a checksum is wrong.
        """

    def fingerprint(self) -> str:
        """Changes when the checkpoint's files change; reads the metadata alone."""

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ReadBuffers(Protocol):
    """What a checkpoint offers beside whose reads hold more than the rows that are asked for."""

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """The most that one thread holds, beside the rows and between reads, that reads `table` `rows` rows at a time.

        Not less for more rows.

        Raises:
            UnknownTableError: there is no such table.
        """


class SummedReader(Protocol):
    """Reads one table, each row once, and adds up what it met."""

    def read_into(self, start: int, out: Array) -> None:
        """As Checkpoint.read_into."""

    def sums(self) -> Mapping[str, ReadSum]:
        """What it met so far, by tensor."""


@runtime_checkable
class SummedReads(Protocol):
    """What a checkpoint offers beside whose checksums are over bytes in another order than a table's rows."""

    def summed(self, table: str) -> SummedReader | None:
        """A reader of `table`; None where `checksum` proves it, or nothing does.

        Raises:
            UnknownTableError: there is no such table.
        """

    def proven(self, tables: Collection[str], met: Mapping[str, ReadSum]) -> Mapping[str, bool]:
        """Which of `tables`, all of whose rows were read, are as the files' checksums say, and which are not.

        What else the checksums cover is read here. Tables of which `met` cannot say it are left out.

        Raises:
            UnknownTableError: there is no such table.
        """


@runtime_checkable
class SmallPieces(Protocol):
    """What a checkpoint offers beside that is read fastest in pieces that stay in a processor's cache."""

    def piece_rows(self, table: str) -> int | None:
        """How many rows of `table` to read at a time; None where more are better.

        Raises:
            UnknownTableError: there is no such table.
        """


@runtime_checkable
class PieceAdvice(Protocol):
    """What a checkpoint offers beside that takes much longer to read piece by piece than at once."""

    def advise(self, table: str, rows: int) -> str | None:
        """What to change before all of a table is read, `rows` rows at a time; None: nothing.

        Raises:
            UnknownTableError: there is no such table.
        """
