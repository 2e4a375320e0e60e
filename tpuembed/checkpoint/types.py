"""The base class of every checkpoint reader."""

import abc
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, Self

import numpy as np

from tpuembed.checkpoint.saved_objects import Objects, Weight
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError, RowRangeError, UnknownTableError
from tpuembed.manifest.row_history import RowHistory
from tpuembed.vocabulary import Vocabulary, VocabularyHeader

__all__ = ["Array", "Checkpoint", "PartialChecksum", "SummedRows", "TableInfo"]

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


class Checkpoint(abc.ABC):
    """A checkpoint opened for reading. A read uses the memory of the rows read, and any thread may read.

    A reader sets the attributes and implements the abstract methods. The others have defaults for files in which rows
    are cheap to read in any pieces.

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
    is_in_memory = False
    """`read_numbers` reads single rows."""
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
        self._check_range(table, start, stop)
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
        self._check_range(table, start, start + len(out))
        self._fill(table, slot, start, out)

    def checksum(self, table: str, slot: str | None = None) -> int | None:
        """Return the recorded CRC32C, unmasked, of the rows of a table or slot in order; None if the checkpoint has
        none.

        Raises:
            UnknownTableError: there is no such table or slot.
        """
        self._check(table, slot)
        return None

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

    def piece_rows(self, table: str) -> int | None:
        """Return the number of rows of `table` to read at a time, such as a piece that fits in a processor's cache.
        None if more are better.

        Raises:
            UnknownTableError: there is no such table.
        """
        self._check(table, None)
        return None

    def summed(self, table: str) -> SummedRows | None:
        """Return a reader of `table` if the checksums cover bytes in another order than its rows. None if `checksum`
        covers it, or if it has no checksum.

        Raises:
            UnknownTableError: there is no such table.
        """
        self._check(table, None)
        return None

    def proven(self, tables: Collection[str], sums: Mapping[str, PartialChecksum]) -> Mapping[str, bool]:  # noqa: ARG002 - readers without sums
        """Compare `tables`, all of whose rows were read by `summed`, with the files' checksums. Return whether each is
        right.

        Other bytes that the checksums cover are read here. Tables for which `sums` are not enough are left out.

        Raises:
            UnknownTableError: there is no such table.
        """
        return {}

    def objects(self, tables: Collection[str]) -> Objects | None:  # noqa: ARG002 - readers without layers
        """Return the saved model's layers, without its optimizers and without `tables`; None if the files have none."""
        return None

    def read_weight(self, weight: Weight) -> Array:
        """Return the value of a weight of `objects`.

        Raises:
            CheckpointCorruptError: it does not have its checksum.
        """
        raise CheckpointFormatError(
            f"{self._shown}: weight {weight.key!r}: this format holds tables only. Export tables."
        )

    def update_counts(self) -> Mapping[str, int]:
        """Return table name -> the number of updates of the tpuembed layer that has it, if the layer wrote it.

        In a checkpoint of other layers, all tables have the number of steps of its Keras optimizers, if they made equally many.

        Raises:
            CheckpointCorruptError: a count is not one integer, or is negative.
        """
        return {}

    def row_history(self, table: str) -> RowHistory | None:
        """Return the history of the layer that has `table`, if that layer tracks rows, or None.

        Raises:
            UnknownTableError: there is no such table.
            CheckpointCorruptError: the saved history is none.
        """
        self._check(table, None)
        return None

    def vocabulary(self, table: str) -> Vocabulary | None:
        """Return the vocabulary that is saved with `table`, or None. All of its names are read.

        Raises:
            UnknownTableError: there is no such table.
            CheckpointCorruptError: it is damaged, or has more rows than the table.
        """
        header = self.vocabulary_header(table)
        size = self._vocabulary_size(table)
        if header is None or size is None:
            return None
        return Vocabulary.from_bytes(self._read_vocabulary(table, size), self._vocabulary_of(table))

    def vocabulary_header(self, table: str) -> VocabularyHeader | None:
        """Return what the first bytes of the vocabulary of `table` say, or None. No name is read.

        Raises:
            UnknownTableError: there is no such table.
            CheckpointCorruptError: it is damaged, or has more rows than the table.
        """
        self._check(table, None)
        size = self._vocabulary_size(table)
        if size is None:
            return None
        where = self._vocabulary_of(table)
        first = self._read_vocabulary(table, min(size, VocabularyHeader.MOST_BYTES))
        header, rows = VocabularyHeader.from_bytes(first, where), self._tables[table].rows
        if header.rows > rows:
            raise CheckpointCorruptError.of(
                f"{where} has {header.rows} rows, {header.oov_buckets} of them for unknown names, but the table has {rows}"
            )
        return header

    def _vocabulary_of(self, table: str) -> str:
        return f"{self._shown}: the vocabulary of table {table!r}"

    def _vocabulary_size(self, table: str) -> int | None:  # noqa: ARG002 - readers without vocabularies
        """Return the number of bytes of the vocabulary of `table`, or None if there is none."""
        return None

    def _read_vocabulary(self, table: str, size: int) -> bytes:
        """Return the first `size` bytes of the vocabulary of `table`, which has them."""
        raise NotImplementedError

    def read_stamps(self, table: str, start: int, out: Array) -> None:
        """Fill `out`, int32 [n], with the number of the update that last touched each of rows [start, start + n).

        Raises:
            UnknownTableError, RowRangeError: as `read`.
            CheckpointFormatError: the rows of the table are not tracked.
            ConfigError: `out` has another shape or dtype.
        """
        if self.row_history(table) is None:
            raise CheckpointFormatError(
                f"{self._shown}: table {table!r}: its rows are not tracked. Train its layer with track_rows=True."
            )
        if out.shape != (len(out),) or out.dtype != np.int32:
            raise ConfigError(
                f"{self._shown}: table {table!r}: out must be int32 [rows], got {out.dtype} {list(out.shape)}."
            )
        self._check_range(table, start, start + len(out))
        self._fill_stamps(table, start, out)

    def read_numbers(self, table: str, numbers: Array, out: Array) -> None:
        """Fill `out`, [n, dim] of the table's dtype, with the rows `numbers`, int64 [n], which the table has.

        A checkpoint that is not in memory has no such read: its checksums cover whole tables.
        """
        raise NotImplementedError

    def _fill_stamps(self, table: str, start: int, out: Array) -> None:
        """Fill `out` with stamps from row `start` on of a table with a history. All arguments are checked."""
        raise NotImplementedError

    def model_config(self) -> Mapping[str, Any] | None:
        """Return what `keras.saving.serialize_keras_object` made of the model, or None if the files do not have it."""
        return None

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

    def _check_range(self, table: str, start: int, stop: int) -> None:
        rows = self._tables[table].rows
        if not 0 <= start <= stop <= rows:
            raise RowRangeError(
                f"{self._shown}: table {table!r}: rows [{start}, {stop}) are not inside its {rows} rows. "
                f"Give rows in [0, {rows})."
            )
