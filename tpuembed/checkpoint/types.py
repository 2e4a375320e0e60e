"""The base class of every checkpoint reader: what all formats have, and attributes for what only some have."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from tpuembed.checkpoint.saved_objects import Objects, Weight
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError, RowRangeError, UnknownTableError
from tpuembed.manifest.row_history import RowHistory
from tpuembed.vocabulary import Vocabulary, VocabularyHeader

__all__ = [
    "Array",
    "Checkpoint",
    "Checksums",
    "GatherRows",
    "PartialChecksum",
    "SavedLayers",
    "SavedStamps",
    "SavedVocabulary",
    "SummedRows",
    "TableInfo",
    "by_name",
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
        checksum: the pieces' contribution to its CRC32C; see `tpuembed.formats.tensor_bundle.crc`.
        bytes: number of bytes read.
    """

    checksum: int = 0
    bytes: int = 0

    def __add__(self, other: "PartialChecksum") -> "PartialChecksum":
        return PartialChecksum(self.checksum ^ other.checksum, self.bytes + other.bytes)


class SummedRows(Protocol):
    """Reads each row of a table once, and adds up the checksums of the tensors that hold them."""

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the rows [start, start + n)."""

    def sums(self) -> Mapping[str, PartialChecksum]:
        """Return the partial checksum of each tensor."""


class Checksums(Protocol):
    """The checksums of rows that a checkpoint's files record. An unknown table has none."""

    def recorded(self, table: str, slot: str | None = None) -> int | None:
        """Return the CRC32C, unmasked, of the rows of a table or slot in order; None if the files have none."""

    def piece_rows(self, table: str) -> int | None:
        """Return the rows to read at a time, so that a piece stays in a processor's cache for its checksum. None: any."""

    def reader(self, table: str) -> SummedRows | None:
        """Return a reader of `table` if the checksums cover bytes in a different order than its rows; otherwise None."""

    def proven(self, tables: Iterable[str], sums: Mapping[str, PartialChecksum]) -> Mapping[str, bool]:
        """Compare `tables`, all of whose rows were read by `reader`, with the files' checksums. Return whether each is
        right.

        Other bytes that the checksums cover are read here. Tables for which `sums` are not enough are left out.
        """


class SavedLayers(Protocol):
    """The layers that are saved beside the tables."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Return what `keras.saving.serialize_keras_object` made of the model, or None if the files do not have it."""

    def objects(self, tables: Collection[str]) -> Objects:
        """Return the saved model's layers, without its optimizers and without `tables`."""

    def read(self, weight: Weight) -> Array:
        """Return the value of a weight of `objects`.

        Raises:
            CheckpointCorruptError: it does not have its checksum.
        """


@dataclasses.dataclass(frozen=True)
class SavedStamps:
    """For each row of a table, the number of the update that last touched it.

    Attributes:
        table: name of the table, and of its checkpoint, for messages.
        rows: number of rows.
        history: of the layer that tracks the rows.
        fill: fills an int32 array with the stamps of the rows from `start` on, which exist.
    """

    table: str
    rows: int
    history: RowHistory
    fill: Callable[[int, Array], None]

    def read(self, start: int, out: Array) -> None:
        """Fill `out`, int32 [n], with the stamps of the rows [start, start + n).

        Raises:
            RowRangeError: the range is not inside the table.
            ConfigError: `out` has a different shape or dtype.
            CheckpointCorruptError: the stamps do not have their checksum.
        """
        if out.shape != (len(out),) or out.dtype != np.int32:
            raise ConfigError(f"{self.table}: out must be int32 [rows], got {out.dtype} {list(out.shape)}.")
        _check_range(self.table, self.rows, start, start + len(out))
        self.fill(start, out)


class SavedVocabulary:
    """A vocabulary that is saved with its table, as `Vocabulary.to_bytes` makes it. Nothing is read before it is needed."""

    def __init__(self, where: str, table_rows: int, size: int, read: Callable[[int], bytes]) -> None:
        """Take its name for messages, its size in bytes, and a function that returns the first bytes of it."""
        self._where, self._table_rows, self._size, self._read = where, table_rows, size, read

    @functools.cached_property
    def header(self) -> VocabularyHeader:
        """Return what its first bytes say. No name is read.

        Raises:
            CheckpointCorruptError: it is damaged, or has more rows than the table.
        """
        header = VocabularyHeader.from_bytes(self._read(min(self._size, VocabularyHeader.MOST_BYTES)), self._where)
        if header.rows > self._table_rows:
            raise CheckpointCorruptError.of(
                f"{self._where} has {header.rows} rows, {header.oov_buckets} of them for unknown names, but the table has "
                f"{self._table_rows}"
            )
        return header

    def read(self) -> Vocabulary:
        """Return the vocabulary. Raises CheckpointCorruptError as `header` does."""
        _ = self.header  # a damaged header has the better message
        return Vocabulary.from_bytes(self._read(self._size), self._where)


class Named(Protocol):
    """A table that a reader has found."""

    @property
    def name(self) -> str:
        """Return its name."""


AnyTable = TypeVar("AnyTable", bound=Named)


def by_name(tables: Iterable[AnyTable], refusal: Callable[[AnyTable, AnyTable], str]) -> dict[str, AnyTable]:
    """Return `tables` by name, sorted.

    Raises:
        CheckpointFormatError: two have the same name; `refusal` returns the message for them.
    """
    found: dict[str, AnyTable] = {}
    for table in sorted(tables, key=lambda table: table.name):
        if (other := found.setdefault(table.name, table)) is not table:
            raise CheckpointFormatError(refusal(other, table))
    return found


GatherRows = Callable[[str, Array, Array], None]
"""Fills [n, dim] of a table's dtype with its rows of these numbers, int64 [n], which exist."""


class Checkpoint(abc.ABC):
    """A checkpoint opened for reading. A read uses the memory of the rows read, and any thread may read.

    A reader sets the attributes and implements the abstract methods. What its files have beside tables, it returns by the
    properties; by default there is nothing.

    Attributes:
        format: the name of the on-disk format.
        path: opens the same checkpoint again, even if there is a newer one by then.
        options: open it the same way again: JSON values, and usually empty.
        layer_config: the config of the tpuembed layers that wrote it, as `feature_config_from_dict` reads it; None for
            others.
    """

    format: str
    path: str
    options: Mapping[str, Any] = {}
    layer_config: dict[str, Any] | None = None
    _tables: Mapping[str, TableInfo]
    """The tables by name, sorted; never empty."""

    @abc.abstractmethod
    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        """Return the dtype of the stored rows of a table or slot that exists."""

    @abc.abstractmethod
    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        """Fill `out` with rows from `start` on of a table or slot. All arguments are checked."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes when the checkpoint's files change. Reads only metadata."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files."""

    def tables(self) -> dict[str, TableInfo]:
        """Return the tables by name; never empty."""
        return dict(self._tables)

    def read(self, table: str, start: int = 0, stop: int | None = None, slot: str | None = None) -> Array:
        """Return rows [start, stop) of a table or of one of its slots, [stop - start, dim]. `stop` None is the end.

        Raises:
            UnknownTableError: there is no such table or slot.
            RowRangeError: the range is not inside the table.
        """
        self._check(table, slot)
        info = self._tables[table]
        stop = info.rows if stop is None else stop
        _check_range(self._named(table), info.rows, start, stop)
        out = np.empty((stop - start, info.dim), self._dtype(table, slot))
        self._fill(table, slot, start, out)
        return out

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        """Fill `out`, [n, dim] of the table's dtype, with rows [start, start + n).

        Raises:
            UnknownTableError, RowRangeError: as `read`.
            ConfigError: `out` has another width or dtype.
        """
        self._check(table, slot)
        dim, dtype = self._tables[table].dim, self._dtype(table, slot)
        if out.shape != (len(out), dim) or out.dtype != dtype:
            raise ConfigError(
                f"{self._shown}: table {table!r}: out must be {dtype} [rows, {dim}], got {out.dtype} {list(out.shape)}."
            )
        _check_range(self._named(table), self._tables[table].rows, start, start + len(out))
        self._fill(table, slot, start, out)

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """Read the tensors of `tables`, or of that slot of theirs, and compare them with the checksums in the files.

        It takes bounded memory. If a format has no checksums of rows, nothing is read.

        Raises:
            UnknownTableError: there is no such table or slot.
            CheckpointCorruptError: a checksum is wrong.
        """
        for table in tables:
            self._check(table, slot)

    def read_buffer_bytes(self, table: str, rows: int) -> int:  # noqa: ARG002 - readers without buffers
        """Return the most bytes that a thread holds beside the rows while it reads `table`, `rows` rows at a time.

        The result does not decrease with more rows.

        Raises:
            UnknownTableError: there is no such table.
        """
        self._check(table, None)
        return 0

    @property
    def checksums(self) -> Checksums | None:
        """Return the checksums of the rows, if the files have such."""
        return None

    @property
    def layers(self) -> SavedLayers | None:
        """Return the layers beside the tables, if the files have them."""
        return None

    @property
    def update_counts(self) -> Mapping[str, int]:
        """Return table name -> the number of updates of the tpuembed layer that has it, if the layer wrote it.

        In a checkpoint of other layers, all tables have the number of steps of its Keras optimizers, if they made equally many.

        Raises:
            CheckpointCorruptError: a count is not one integer, or is negative.
        """
        return {}

    @property
    def stamps(self) -> Mapping[str, SavedStamps]:
        """Return the stamps of the tables whose layer tracks rows, by table.

        Raises:
            CheckpointCorruptError: a saved history is none, or stamps have another shape.
        """
        return {}

    @property
    def vocabularies(self) -> Mapping[str, SavedVocabulary]:
        """Return the vocabularies that are saved with tables, by table.

        Raises:
            CheckpointCorruptError: a vocabulary is missing, or is of no table.
        """
        return {}

    @property
    def gather(self) -> GatherRows | None:
        """Return how to read single rows, where they are in memory. Checksums in files cover whole tables."""
        return None

    def vocabulary(self, table: str) -> Vocabulary | None:
        """Return the vocabulary that is saved with `table`, or None. All of its names are read.

        Raises:
            UnknownTableError: there is no such table.
            CheckpointCorruptError: it is damaged, or has more rows than the table.
        """
        self._check(table, None)
        saved = self.vocabularies.get(table)
        return None if saved is None else saved.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, table: str, slot: str | None) -> None:
        """Raise UnknownTableError if there is no such table or slot."""
        if table not in self._tables:
            raise UnknownTableError(f"{self._shown}: has no table {table!r}; {did_you_mean(table, self._tables)}")
        slots = self._tables[table].slots
        if slot is not None and slot not in slots:
            raise UnknownTableError(
                f"{self._shown}: table {table!r} has no slot {slot!r}; {did_you_mean(str(slot), slots)}"
            )

    @property
    def _shown(self) -> str:
        """Return the name of the checkpoint in messages."""
        return f"checkpoint {self.path}"

    def _named(self, table: str) -> str:
        return f"{self._shown}: table {table!r}"


def _check_range(table: str, rows: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= rows:
        raise RowRangeError(
            f"{table}: rows [{start}, {stop}) are not inside its {rows} rows. Give rows in [0, {rows})."
        )
