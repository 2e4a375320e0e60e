"""The tables of a live layer, as rows are read and written besides training."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tpuembed.backends.table_rows import copies, piece_rows, write_rows
from tpuembed.backends.table_state import TablesNode, TableState
from tpuembed.backends.tf_config import local
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError
from tpuembed.layer.stamps import RowStamps
from tpuembed.vocabulary import Vocabulary

__all__ = ["HasTables", "LiveTables", "check_writable", "write_numbers"]

Array = np.ndarray[Any, Any]

_EXACT_IN_FLOAT32 = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class LiveTables:
    """The tables that a layer holds in memory.

    Attributes:
        layer: the layer's name.
        states: table name -> TableState, at least one.
        updates: the variable that counts the layer's updates.
        writing: returns a context in which rows may be written.
        fetch: must be called before rows are read.
        stamps: of the rows. None if they are not tracked.
        nodes: the checkpoint nodes, which are told of rows that were written.
    """

    layer: str
    states: Mapping[str, TableState]
    updates: Any
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    fetch: Callable[[], None] = lambda: None
    stamps: RowStamps | None = None
    nodes: Sequence[TablesNode] = ()

    def state(self, table: str) -> TableState:
        """Return the state of `table`.

        Raises:
            UnknownTableError: the layer has no such table.
        """
        if table not in self.states:
            raise UnknownTableError(
                f"layer {self.layer!r}: has no table {table!r}; {did_you_mean(str(table), self.states)}"
            )
        return self.states[table]

    def variable(self, table: str, slot: str | None) -> Any:
        """Return the variable of a table, or of one of its slots.

        Raises:
            UnknownTableError: there is no such table or slot.
        """
        state = self.state(table)
        if slot is None:
            return state.variable
        if slot not in state.slots:
            raise UnknownTableError(
                f"layer {self.layer!r}: table {table!r} has no slot {slot!r}; {did_you_mean(str(slot), state.slots)}"
            )
        return state.slots[slot]

    def assign_rows(self, table: str, start: int, values: Any, slot: str | None = None) -> None:
        """Overwrite rows of a table, or of one of its slots. See `TPUEmbedding.assign_rows`."""
        variable, config = self.variable(table, slot), self.state(table).config
        where = f"layer {self.layer!r}: {table if slot is None else f'{table}/{slot}'!r}"
        rows = _checked_rows(where, values, config.dim)
        _check_range(where, start, rows.shape[0], config.vocabulary_size)
        if self.stamps is not None:  # before the write, which may fail halfway
            self.stamps.wrote(table, int(start), int(start) + rows.shape[0])
        with self.writing():
            _write_pieces(variable, int(start), rows, config.dim)
        if slot is None:
            for node in self.nodes:
                node.given.note_rows(table, int(start), int(start) + rows.shape[0], config.vocabulary_size)

    def assign_table(self, table: str, values: Any) -> None:
        """Overwrite all rows of a table. See `TPUEmbedding.update_embedding_table`."""
        config = self.state(table).config
        shape = _shape(f"layer {self.layer!r}: table {table!r}: embedding_table", values)
        if shape != (config.vocabulary_size, config.dim):
            raise ConfigError(
                f"layer {self.layer!r}: table {table!r} is [{config.vocabulary_size}, {config.dim}], but embedding_table is "
                f"{list(shape)}. Write a part of the table with assign_rows."
            )
        self.assign_rows(table, 0, values)


def write_numbers(variable: Any, numbers: Array, values: Array) -> None:
    """Overwrite the rows `numbers`, int64 [n] and all different, of `variable` with `values`, float32 [n, dim].

    An accelerator's table is written by runs of consecutive rows, so that scattered rows take a write each.

    Raises:
        ConfigError: the variable's rows cannot be written from the host.
    """
    if not hasattr(variable, "assign_rows"):
        step = piece_rows(values.shape[1])
        for first in range(0, len(numbers), step):
            ids, rows = tf.constant(numbers[first : first + step]), tf.constant(values[first : first + step])
            for copy in copies(variable):
                tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=ids, updates=rows)
        return
    order = np.argsort(numbers)
    for run in np.split(order, np.flatnonzero(np.diff(numbers[order]) != 1) + 1):
        if len(run):
            write_rows(variable, int(numbers[run[0]]), values[run])


class HasTables(Protocol):
    """A layer whose tables can be written.

    Attributes:
        name: the layer's name.
    """

    name: str

    def live_tables(self, doing: str) -> LiveTables:
        """Return the tables in memory, for `doing`. Raises ConfigError if they cannot be written."""

    def sources_of(self, names: Iterable[str]) -> Mapping[str, str] | None:
        """Return {table: its name in a checkpoint with the tables `names`}; None if layer and checkpoint must have the same."""

    def take_names(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of a table whose rows were restored with them."""


def check_writable(layer: str, doing: str, states: Mapping[str, TableState]) -> None:
    """Raise ConfigError if the tables `states` of a layer cannot be written from here."""
    if not states:
        raise ConfigError(
            f"layer {layer!r}: {doing}: the layer holds no tables inside an export. Give the export another checkpoint."
        )
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if in_replica or not tf.executing_eagerly():
        raise ConfigError(
            f"layer {layer!r}: {doing} writes tables eagerly. Call it outside tf.function and strategy.run."
        )


def _shape(where: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(np.shape(values))
    except ValueError:
        raise ConfigError(f"{where} has rows of different lengths. Give a matrix.") from None


def _checked_rows(where: str, values: Any, dim: int) -> Any:
    """Return `values` as float rows [n, dim] that can be sliced."""
    values = values.value if isinstance(values, keras.Variable) else values
    rows = values if hasattr(values, "shape") and hasattr(values, "dtype") else np.asarray(values)
    dtype = getattr(rows.dtype, "name", str(rows.dtype))
    if len(rows.shape) != 2 or rows.shape[1] != dim:
        raise ConfigError(f"{where} takes rows [n, {dim}], got {list(rows.shape)}. Reshape them.")
    if dtype not in _EXACT_IN_FLOAT32:
        raise ConfigError(f"{where} is float32. The rows are {dtype}. Convert them with astype('float32').")
    return rows


def _check_range(where: str, start: Any, count: int, rows: int) -> None:
    if isinstance(start, bool) or not hasattr(start, "__index__"):
        raise ConfigError(f"{where}: start must be an integer, got {start!r}.")
    if not 0 <= start <= rows - count:
        raise RowRangeError(f"{where}: rows [{start}, {start + count}) are not inside its {rows} rows. Check start.")


def _write_pieces(variable: Any, start: int, rows: Any, dim: int) -> None:
    step = piece_rows(dim)
    for first in range(0, rows.shape[0], step):
        write_rows(variable, start + first, tf.cast(_piece(rows, first, min(first + step, rows.shape[0])), tf.float32))


def _piece(rows: Any, first: int, stop: int) -> Any:
    """Return rows [first, stop). A variable is gathered, because slicing one may read it all."""
    return tf.gather(local(rows), tf.range(first, stop)) if isinstance(rows, tf.Variable) else rows[first:stop]
