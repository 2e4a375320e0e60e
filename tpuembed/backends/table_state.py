"""The variables of one table and of its slots, and the checkpoint node that holds those of a layer."""

import contextlib
import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.backends.checkpoint_keys import TABLES_NODE, saved_attributes, saved_keys, tables_with_keras_slots
from tpuembed.backends.restores import GivenRows, watch_restores
from tpuembed.backends.tf_config import SavedNode, local, resolve_optimizer
from tpuembed.backends.tpu.stacked_table import StackLayout
from tpuembed.backends.tpu.tf_tpu import saved_layouts
from tpuembed.config import Optimizer, TableConfig
from tpuembed.errors import ConfigError

__all__ = [
    "TableState",
    "TablesNode",
    "check_saved_names",
    "check_tracked",
    "create_table",
    "filled",
    "initial_rows",
    "safe_name",
    "table_initializer",
]

_LARGE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class TableState:
    """One table in memory.

    Attributes:
        config: its TableConfig.
        optimizer: the spec that trains it. None if the user's own optimizer does.
        variable: float32 [vocabulary_size, dim].
        slots: slot name -> float32 [vocabulary_size, dim].
        stamps: int32 [vocabulary_size], the number of the update that last touched each row (0: never). None if rows are
            not tracked.
    """

    config: TableConfig
    optimizer: Optimizer | None
    variable: Any
    slots: Mapping[str, Any]
    stamps: Any = None

    def named_variables(self) -> dict[str, Any]:
        """Return {checkpoint name: variable}. A table has its own name, a slot `<table>/<slot>`."""
        slots = {f"{self.config.name}/{slot}": variable for slot, variable in self.slots.items()}
        return {self.config.name: self.variable, **slots}


def create_table(config: TableConfig, layer_optimizer: Any, track_rows: bool = False) -> TableState:
    """Allocate the table and its slots, each once. (`add_weight` would hold two or three copies of a table meanwhile.)

    Raises:
        ConfigError: the initializer gives another shape, the optimizer cannot train a table, or rows cannot be tracked
            because a step moves rows that it did not look up.
    """
    chosen = config.optimizer if config.optimizer is not None else layer_optimizer
    optimizer = None if chosen is None else resolve_optimizer(chosen)
    if track_rows:
        check_tracked(config, optimizer)
    variable = _variable(config.name, lambda: initial_rows(config), trainable=optimizer is None)
    slots = {} if optimizer is None else _create_slots(config, optimizer, variable)
    zeros = lambda: tf.zeros([config.vocabulary_size], tf.int32)  # noqa: E731
    stamps = _variable(f"{config.name}/stamps", zeros, trainable=False, dtype=tf.int32) if track_rows else None
    return TableState(config, optimizer, variable, slots, stamps)


def check_tracked(config: TableConfig, optimizer: Optimizer | None) -> None:
    """Raise ConfigError if a step with `optimizer` moves rows that it did not look up."""
    moved_by = "optimizer=None" if optimizer is None else "lazy_adam=False"
    if optimizer is None or not getattr(optimizer, "lazy_adam", True):
        raise ConfigError(
            f"table {config.name!r}: track_rows=True needs an optimizer that changes only the rows that a step looks up. "
            f"With {moved_by} every row may change. Change the optimizer, or set track_rows=False."
        )


def _create_slots(config: TableConfig, optimizer: Optimizer, table: Any) -> dict[str, Any]:
    values = {slot: optimizer.slot_initial_value(slot) for slot in optimizer.slots}
    if optimizer.slot_variable_creation_fn is None or not values:
        shape = (config.vocabulary_size, config.dim)
        return {
            slot: _variable(f"{config.name}/{slot}", lambda value=value: tf.fill(shape, value), trainable=False)
            for slot, value in values.items()
        }
    create = CheckedSlots(optimizer.slot_variable_creation_fn)
    return create(table, list(values), [tf.constant_initializer(value) for value in values.values()])


@dataclasses.dataclass(frozen=True)
class CheckedSlots:
    """A user's slot_variable_creation_fn, with a check of its result. TensorFlow's classes accept any result.

    Attributes:
        create: the user's function.
    """

    create: Callable[..., Any]

    def __call__(self, table: Any, slots: Sequence[str], initializers: Sequence[Any]) -> dict[str, Any]:
        """Return {slot: variable} for the variable `table`.

        Raises:
            ConfigError: a slot has no variable of the table's size and class.
        """
        made = self.create(table, list(slots), list(initializers))
        for slot in slots:
            found = made.get(slot) if isinstance(made, Mapping) else None
            if not isinstance(found, type(table)) or found.shape != table.shape or found.dtype != tf.float32:
                raise ConfigError(
                    f"table {table.name.split(':')[0]!r}: slot_variable_creation_fn must return a float32 variable of shape "
                    f"{tuple(table.shape)} for {slot!r}, a {type(table).__name__} like the table. It returned {found!r}."
                )
        return {slot: made[slot] for slot in slots}


def _variable(name: str, initial_value: Any, trainable: bool, dtype: Any = tf.float32) -> Any:
    with tf.init_scope():
        return tf.Variable(initial_value, trainable=trainable, name=safe_name(name), dtype=dtype)


def safe_name(name: str) -> str:
    """Return `name` without the characters that names of variables cannot have."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip("._-") or "table"


def initial_rows(config: TableConfig) -> Any:
    """Return the initial rows of a new table, float32 [vocabulary_size, dim].

    Raises:
        ConfigError: the initializer gives another shape or dtype.
    """
    shape = (config.vocabulary_size, config.dim)
    rows = tf.convert_to_tensor(filled(table_initializer(config), shape, tf.float32))
    if tuple(rows.shape) != shape or rows.dtype != tf.float32:
        raise ConfigError(
            f"table {config.name!r}: its initializer gave {rows.dtype.name} {tuple(rows.shape)}. "
            f"The table is float32 {shape}. Fix the initializer."
        )
    return rows


def filled(initializer: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Return the rows of `initializer`. Keras initializers hold up to three copies. In a graph, an op reuses its input's memory."""
    is_small = 4 * math.prod(shape) < _LARGE_BYTES
    if is_small or not tf.executing_eagerly() or type(initializer).__module__.split(".")[0] != "keras":
        return initializer(shape, dtype=dtype)
    with _no_constant_folding():
        # Called as a concrete function, because TensorFlow warns of retracing when a loop calls new tf.functions.
        return tf.function(lambda: initializer(shape, dtype=dtype)).get_concrete_function()()


@contextlib.contextmanager
def _no_constant_folding() -> Iterator[None]:
    """Disable constant folding. It would run the graph of a seeded initializer twice, because all its inputs are constants."""
    option = "constant_folding"
    before = tf.config.optimizer.get_experimental_options().get(option, True)
    tf.config.optimizer.set_experimental_options({option: False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({option: before})


def table_initializer(config: TableConfig) -> Any:
    """Return the initializer of a new table: `initializer(shape, dtype=...)`."""
    value = config.initializer
    if value is None:
        return keras.initializers.TruncatedNormal(0.0, 1.0 / math.sqrt(config.dim))
    return keras.initializers.get(value) if isinstance(value, str | Mapping) else value


_TAKEN: Final = {
    "|updates": "the layer's count of updates",
    "|config": "the layer's config",
    "|history": "the history of the layer's rows",
    "_sparse_core_table_layouts": "how tables lie in SparseCores",
    "_engine": "the accelerator's own variables",
    ".": "all of a layer's variables",
}


def check_saved_names(slots: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError if two variables of {table: its slots} would be saved under one name.

    Weight files write "/" as "|". Some names are reserved for the layer in weight files, checkpoints or HDF5.
    """
    taken = dict(_TAKEN)
    for name in (name for table in slots for name in (table, *(f"{table}/{slot}" for slot in slots[table]))):
        saved = name.replace("/", "|")
        if saved in taken:
            raise ConfigError(f"table or slot {name!r} would be saved over {taken[saved]}. Rename the table.")
        taken[saved] = repr(name)


_UPDATES = "tpuembed_iterations"
"""The node's attribute with the count of updates."""


class TablesNode(SavedNode):
    """The checkpoint node `_tpu_embedding`, with children `<table>` and `<table>/<slot>`, as TFRS and TensorFlow name
    them.

    The layer's config (JSON) and its count of updates are attributes of the node. So a checkpoint without them (TFRS)
    restores into the layer, and a TFRS layer finds all its variables in a checkpoint of the layer. The config repeats
    the SparseCore layouts. With a wrong layout that fits its stack, a reader would silently read other rows.
    """

    def __init__(
        self,
        layer: str,
        config: Mapping[str, Any],
        states: Sequence[TableState],
        children: Mapping[str, Any],
        layouts: Mapping[str, StackLayout],
        updates: Any,
    ) -> None:
        """Raise ConfigError if two variables of the `layer` of that name would be saved under one name."""
        self.layer = layer
        check_saved_names({state.config.name: state.slots for state in states})
        self._layouts = dict(layouts)
        said = {"layouts": {table: dataclasses.asdict(layout) for table, layout in layouts.items()}} if layouts else {}
        self._config = json.dumps({**config, **said})
        self._tables = [state.config.name for state in states]
        self._slots = {state.config.name: tuple(state.slots) for state in states}
        self._rows_lie_elsewhere = False
        self.given = GivenRows()
        self.traced_by: weakref.WeakSet[Any] = weakref.WeakSet()
        self.restore_rows: Callable[[str, Sequence[str]], Any] | None = None
        self.restore_count: Callable[[str], None] | None = None
        self.restoring: Callable[[], None] = lambda: None
        self.saving: Callable[[], None] = lambda: None
        self.check_saved: Callable[[str], None] = lambda _: None
        self.updates = updates
        for name, child in children.items():
            self._track_trackable(child, name)

    def _checkpoint_adapter(self, path: str) -> None:
        """Restore rows by number before TensorFlow restores the other variables of the checkpoint.

        A checkpoint from other hardware has rows at other positions, in tensors that may have the same names and
        shapes. TensorFlow would restore them permuted. TensorFlow would also leave out slots that a Keras optimizer
        saved, and the count of its steps. All are restored here.
        """
        self.check_saved(path)
        self._rows_lie_elsewhere = saved_layouts(path) != self._layouts
        keys = saved_keys(path)
        tables = self._tables if self._rows_lie_elsewhere else tables_with_keras_slots(keys, self._slots)
        if tables and self.restore_rows is not None:
            self.restore_rows(path, tables)
        is_counted = saved_attributes(keys, TABLES_NODE, _UPDATES) or set(tables) == set(self._tables)
        if not is_counted and self.restore_count is not None:
            self.restore_count(path)
        self.restoring()

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        return None if self._rows_lie_elsewhere else super()._lookup_dependency(name, cached_dependencies)

    def count(self) -> int:
        """Return the layer's count of updates."""
        return int(local(self.updates).numpy())

    def rows_by_table(self) -> dict[str, Any]:
        """Return {table: the child that holds its rows}. Tables of a stack share one."""
        children = self._trackable_children()
        stacks = {table: layout.stack for table, layout in self._layouts.items()}
        return {table: children[stacks.get(table, table)] for table in self._tables}

    @property
    def table_names(self) -> set[str]:
        """Return the names of the layer's tables."""
        return set(json.loads(self._config)["tables"])

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self.saving()
        return {"tpuembed_config": tf.constant(self._config), _UPDATES: self.updates.read_value()}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        return self.updates.assign(restored[_UPDATES])


watch_restores(TablesNode)
