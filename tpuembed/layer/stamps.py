"""The stamps of a layer's rows in memory: what updates them besides training, and the checkpoint node that holds them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from tpuembed.backends.host import NO_STAMP
from tpuembed.backends.table_rows import PIECE_BYTES, copies
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_config import SavedNode, local
from tpuembed.errors import ConfigError
from tpuembed.manifest.row_history import UNKNOWN, RowHistory
from tpuembed.runtime.keras_saving import check_state_tree

__all__ = ["RowStamps", "TableWeight"]

Array = np.ndarray[Any, Any]

_PIECE: Final = PIECE_BYTES // 4


class RowStamps(SavedNode):
    """The checkpoint node `_row_stamps`: a child `<table>`, int32 [rows], for each table, and the history.

    Whatever writes whole tables calls `rewritten` before, and `adopt` after, if it also restored the tables' stamps. So a
    restore that fails halfway leaves a new history, with which no stamp is compared.
    """

    def __init__(self, states: Mapping[str, TableState], updates: Any) -> None:
        """Hold the stamps of `states`, whose updates the variable `updates` counts."""
        self._stamps = {name: state.stamps for name, state in states.items()}
        self._shapes = {name: [state.config.vocabulary_size, state.config.dim] for name, state in states.items()}
        self._updates = updates
        self._spans: tuple[tuple[str, int], ...] = ((RowHistory.token(), 0),)
        self._was_read = False
        for name, variable in self._stamps.items():
            self._track_trackable(variable, name)

    # ---- reading

    def history(self) -> RowHistory:
        """Return the history up to now."""
        self._was_read = True
        return RowHistory(self._spans, self._count())

    def read_into(self, table: str, start: int, out: Array) -> None:
        """Fill `out`, int32 [n], with the stamps of rows [start, start + n) of `table`."""
        for first in range(0, len(out), _PIECE):
            piece = out[first : first + _PIECE]
            ids = tf.range(start + first, start + first + len(piece), dtype=tf.int64)
            piece[...] = tf.gather(local(self._stamps[table]), ids).numpy()

    # ---- writing

    def wrote(self, table: str, start: int, stop: int) -> None:
        """Stamp rows [start, stop), which are about to be written from outside of training.

        A base may contain the write, and a checkpoint of the same update may not. So the write begins a span, unless
        nobody has read the history since the last one began.

        Raises:
            ConfigError: the layer made as many updates as stamps can number.
        """
        count = self._count()
        if count + 1 >= UNKNOWN:
            raise ConfigError(NO_STAMP)
        if self._was_read:
            self._spans = (*self._spans, (RowHistory.token(), count))
            self._was_read = False
        self._fill(table, start, stop, count + 1)

    def rewritten(self) -> None:
        """Begin a new history: tables or the count of updates are about to be written as a whole.

        No base has it before the write ends, so no row has changed since a base.
        """
        self._spans, self._was_read = ((RowHistory.token(), 0),), False
        for table, (rows, _) in self._shapes.items():
            self._fill(table, 0, rows, 0)

    def adopt(self, history: RowHistory, tables: Iterable[str]) -> None:
        """Continue the saved `history`, after the rows of that point and the stamps of `tables` were restored."""
        for table in self._shapes.keys() - set(tables):
            self._fill(table, 0, self._shapes[table][0], min(history.updates + 1, UNKNOWN))
        self._spans, self._was_read = (*history.spans, (RowHistory.token(), history.updates)), False

    def write(self, table: str, start: int, stamps: Array) -> None:
        """Overwrite the stamps of rows [start, start + n) with `stamps`, int32 [n]."""
        for first in range(0, len(stamps), _PIECE):
            piece = tf.constant(stamps[first : first + _PIECE], tf.int32)
            self._scatter(table, start + first, piece)

    def _fill(self, table: str, start: int, stop: int, stamp: int) -> None:
        for first in range(start, stop, _PIECE):
            self._scatter(table, first, tf.fill([min(_PIECE, stop - first)], np.int32(stamp)))

    def _scatter(self, table: str, start: int, stamps: Any) -> None:
        """Write stamps by number. Assigning would need a second copy of all of them."""
        ids = tf.range(start, start + stamps.shape[0], dtype=tf.int64)
        for copy in copies(self._stamps[table]):
            tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=ids, updates=stamps)

    def _count(self) -> int:
        return int(local(self._updates).numpy())

    # ---- saving

    def saved(self) -> str:
        """Return the history and the shapes of the tables, as JSON text beside saved stamps."""
        return self.history().to_json(self._shapes)

    def adopt_saved(self, text: str | bytes) -> None:
        """Continue the history that `saved` returned, if no table has another shape.

        Such a table cannot have been restored, so the new history stays.
        """
        history, shapes = RowHistory.from_json(text, "TPUEmbedding: restored checkpoint")
        if all(shapes.get(table, shape) == shape for table, shape in self._shapes.items()):
            self.adopt(history, shapes)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (table, int32 [rows])."""
        for table, (rows, _) in self._shapes.items():
            out = np.empty(rows, np.int32)
            self.read_into(table, 0, out)
            yield table, out

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # As an operation: asynchronous saves run it in a graph.
        return {"history": tf.ensure_shape(tf.py_function(self.saved, [], tf.string), [])}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        if tf.executing_eagerly():  # else the new history stays
            self.adopt_saved(restored["history"].numpy())
        return tf.no_op()


class TableWeight(keras.Variable):
    """A Keras weight that is a given variable. If its layer tracks rows, assigning it, as `set_weights` does, begins a new history:
    it changes rows that no step looked up.

    Attributes:
        watcher: the stamps of the layer's rows. None if it does not track them.
        assigned: is called when all its rows were given.
    """

    watcher: RowStamps | None = None
    assigned: Callable[[], None] | None = None

    def __init__(self, variable: Any, trainable: bool, name: str | None = None) -> None:
        """Wrap `variable`, of any shape. Its name scope is left out, such as a model's `build`: Keras allows no "/" in names."""
        name, shape = name or variable.name.split(":")[0].rpartition("/")[2], variable.shape
        dtype = variable.dtype.name
        super().__init__(lambda *_, **__: variable, shape, dtype, trainable=trainable, autocast=False, name=name)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        """Wrap what `initializer` returns, where Keras makes a copy.

        Keras calls it late if a layer is created while shapes are computed, where it refuses a weight that has a value.
        """
        self._initialize(initializer())

    def assign(self, value: Any) -> Any:
        """Assign `value`, after a new history has begun.

        Raises:
            ConfigError: the call is in a graph, where no row would be stamped; or Keras loads a state that does not fit its model.
        """
        check_state_tree(self.name)
        if self.watcher is not None:
            if not tf.executing_eagerly():
                raise ConfigError(
                    f"weight {self.name!r}: its layer has track_rows=True. Assign it eagerly, outside tf.function."
                )
            self.watcher.rewritten()
        result = super().assign(value)
        if self.assigned is not None and tf.executing_eagerly():
            self.assigned()
        return result
