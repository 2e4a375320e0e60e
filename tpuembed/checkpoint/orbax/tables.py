"""Finds the arrays of an Orbax checkpoint that are tables and slots, opens them, and checks their shapes and layouts.

Source of the names: keras.Model.get_state_tree, keras/src/optimizers/base_optimizer.py (add_variable_from_reference).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.sparsecore import TableLayout
from tpuembed.checkpoint.orbax.arrays import ArrayStore, Run, StoredArray, contiguous_run, mod_sharded_runs
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.stack_specs import StackSpec
from tpuembed.checkpoint.orbax.stacks import Stack, find_stacks, match_specs, place_tables
from tpuembed.checkpoint.types import TableInfo
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointMismatchError

__all__ = ["StoredTable", "open_tables"]

_FLOATS: Final = frozenset({"float32", "float64", "float16", "bfloat16"})
_VARIABLES: Final = frozenset({"trainable_variables", "non_trainable_variables"})
_OPTIMIZERS: Final = "optimizer_variables"
_EMBEDDINGS: Final = "embeddings"
_CHANGED_BY: Final = ("lora_embeddings_a", "embeddings_scale")
"""Leaves beside `embeddings` that change the rows that the layer looks up."""
_SLOTS: Final = {
    "accumulator": "accumulators",
    "linear": "linears",
    "momentum": "momenta",
    "velocity": "velocities",
}
"""Slot names of Keras 3 and jax-tpu-embedding -> those of `tf.tpu.experimental.embedding`; others stay unchanged."""
KNOWN_SLOTS: Final = frozenset(_SLOTS.values())
"""These slots have a value per element of the table. Other slots may have any shape."""


@dataclasses.dataclass(frozen=True)
class TableLeaves:
    """A table that is stored row by row, and its slots by their names."""

    name: str
    table: Leaf
    slots: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


_OF_KERAS: Final[Mapping[str, frozenset[str]]] = {
    "adagrad": frozenset({"accumulator"}),
    "adam": frozenset({"momentum", "velocity"}),
    "adamw": frozenset({"momentum", "velocity"}),
    "ftrl": frozenset({"accumulator", "linear"}),
    "lamb": frozenset({"momentum", "velocity"}),
    "sgd": frozenset({"momentum"}),
}
"""Keras' optimizers by their default names -> their slots that TensorFlow also has. Other optimizers use the same names
for other quantities: RMSprop's velocity, Lion's momentum.
"""


def slot_name(name: str) -> str:
    """Return TensorFlow's name of the slot that Keras or JAX calls `name`."""
    return _SLOTS.get(name, name)


def keras_tables(leaves: Sequence[Leaf]) -> Iterator[TableLeaves]:
    """Yield the embedding layers of keras-rs and Keras, by their table's name, with their slots in optimizers.

    Raises:
        CheckpointFormatError: a table is more than its `embeddings`.
    """
    variables = [leaf for leaf in leaves if leaf.path[0] in _VARIABLES]
    paths = {leaf.path for leaf in variables}
    kept = _optimizer_slots([leaf for leaf in leaves if leaf.path[0] == _OPTIMIZERS], variables)
    for leaf in variables:
        if leaf.path[-1] != _EMBEDDINGS or len(leaf.path) < 3:
            continue
        for name in _CHANGED_BY:
            if (*leaf.path[:-1], name) in paths:
                raise CheckpointFormatError(
                    f"checkpoint {leaf.item.folder}: table {leaf.shown} has {name!r} beside it, which changes the "
                    "rows that the layer looks up. Merge it into the table and save again."
                )
        yield TableLeaves(leaf.path[-2], leaf, kept.get(leaf.path, {}))


def _optimizer_slots(leaves: Iterable[Leaf], variables: Iterable[Leaf]) -> dict[tuple[str, ...], dict[str, Leaf]]:
    """Return the slots by the path of their variable. They are named after that path, joined by "_", and the slot."""
    prefixes: defaultdict[str, list[Leaf]] = defaultdict(list)
    for variable in variables:
        prefixes["_".join(variable.path[1:])].append(variable)
    kept: defaultdict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        prefix = _longest_prefix(leaf.path[-1], prefixes)
        if prefix is not None:
            optimizer, name = leaf.path[1].rstrip("0123456789").removesuffix("_"), leaf.path[-1][len(prefix) + 1 :]
            name = slot_name(name) if name in _OF_KERAS.get(optimizer, ()) else name
            _refuse_ambiguous(leaf, name, prefixes[prefix], kept[prefixes[prefix][0].path].get(name))
            kept[prefixes[prefix][0].path][name] = leaf
    return kept


def _refuse_ambiguous(leaf: Leaf, name: str, variables: Sequence[Leaf], other: Leaf | None) -> None:
    """Raise CheckpointFormatError for one slot of two variables, or two slots of one name for one variable."""
    if len(variables) > 1:
        raise CheckpointFormatError(
            f"checkpoint {leaf.item.folder}: {leaf.shown} may be {name!r} of {variables[0].shown} or of "
            f"{variables[1].shown}. Rename one and save again."
        )
    if other is not None:
        raise CheckpointFormatError(
            f"checkpoint {leaf.item.folder}: {other.shown} and {leaf.shown} are both {name!r} of "
            f"{variables[0].shown}. Save again with one optimizer."
        )


def _longest_prefix(name: str, prefixes: Container[str]) -> str | None:
    """Return the longest of `prefixes` that `name` has before a "_"."""
    end = name.rfind("_")
    while end > 0:
        if name[:end] in prefixes:
            return name[:end]
        end = name.rfind("_", 0, end)
    return None


def matrices(leaves: Iterable[Leaf], several_items: bool) -> Iterator[TableLeaves]:
    """Yield arrays that may be matrices, by path, which starts with the item's name if there are several items."""
    for leaf in leaves:
        if leaf.is_array and leaf.rank in {None, 2}:
            path = (leaf.item.folder.name, *leaf.path) if several_items else leaf.path
            yield TableLeaves("/".join(path), leaf)


def merge(tables: Iterable[TableLeaves]) -> dict[str, TableLeaves]:
    """Return `tables` by name.

    Raises:
        CheckpointFormatError: two have the same name.
    """
    merged: dict[str, TableLeaves] = {}
    for table in tables:
        other = merged.setdefault(table.name, table)
        if other is not table:
            raise CheckpointFormatError(
                f"checkpoint {table.table.item.folder}: arrays {other.table.shown} and {table.table.shown} are both "
                f"table {table.name!r}. Rename one and save again."
            )
    return merged


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table: its description, the arrays of its rows (None) and slots, and the place of its rows in them."""

    info: TableInfo
    arrays: Mapping[str | None, StoredArray]
    layout: TableLayout | None = None

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Return the runs of the rows [start, stop)."""
        if self.layout is None:
            return contiguous_run(start, stop)
        return mod_sharded_runs(self.layout.rows, start, stop)


def open_tables(
    where: str, leaves: Sequence[Leaf], specs: Sequence[StackSpec], store: ArrayStore
) -> dict[str, StoredTable]:
    """Return all tables by name: stacks and embedding layers, or else all matrices of floats.

    `specs` say how tables are stacked; () if that is not known.

    Raises:
        CheckpointFormatError: there is no table, or two have the same name.
        CheckpointMismatchError, CheckpointCorruptError: specs or metadata contradict the arrays.
    """
    stacks = find_stacks(leaves, [spec.name for spec in specs])
    by_name = match_specs(where, stacks, specs)
    found = [table for stack in stacks for table in _stacked_tables(where, stack, by_name[stack.name], store)]
    layers = merge(keras_tables(leaves)).values()
    found.extend(_dense_table(layer, store) for layer in layers)
    if not found:
        plain = merge(matrices(leaves, len({leaf.item for leaf in leaves}) > 1)).values()
        found.extend(table for leaf in plain if (table := _plain_table(leaf, store)) is not None)
    if not found:
        raise CheckpointFormatError(
            f"checkpoint {where}: has no table, neither an embedding layer's nor an array that is a matrix of "
            f"floats, among {len(leaves)} leaves. Check that the layer was built before the checkpoint was saved."
        )
    return _by_name(where, found)


def _by_name(where: str, found: Iterable[StoredTable]) -> dict[str, StoredTable]:
    tables: dict[str, StoredTable] = {}
    for table in sorted(found, key=lambda table: table.info.name):
        if tables.setdefault(table.info.name, table) is not table:
            raise CheckpointFormatError(
                f"checkpoint {where}: has two tables {table.info.name!r}, one of them stacked. Rename one and "
                "save again."
            )
    return tables


def _stacked_tables(where: str, stack: Stack, spec: StackSpec, store: ArrayStore) -> Iterator[StoredTable]:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(stack.table, store)}
    shape = arrays[None].shape
    for name, leaf in stack.slots.items():
        if slot_name(name) in arrays:
            raise CheckpointFormatError(
                f"checkpoint {where}: stack {stack.name!r} has two slots {slot_name(name)!r}, one of them called "
                f"{name!r}. Save it without the other."
            )
        arrays[slot_name(name)] = _open_slot(stack.table, shape, leaf, store)
    for layout in place_tables(where, spec, (shape[0], shape[1])):
        info = TableInfo(layout.table, *layout.shape, arrays[None].dtype, _names(arrays), layout.words)
        yield StoredTable(info, arrays, layout)


def _dense_table(layer: TableLeaves, store: ArrayStore) -> StoredTable:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(layer.table, store)}
    for name, leaf in layer.slots.items():
        if name in KNOWN_SLOTS:
            arrays[name] = _open_slot(layer.table, arrays[None].shape, leaf, store)
        elif leaf.rank in {None, 2} and (slot := store.open(leaf)).shape == arrays[None].shape and _is_matrix(slot):
            arrays[name] = slot
    return _row_by_row(layer.name, arrays)


def _plain_table(leaf: TableLeaves, store: ArrayStore) -> StoredTable | None:
    array = store.open(leaf.table)
    if not _is_matrix(array):
        return None
    array.check_stored()
    return _row_by_row(leaf.name, {None: array})


def _row_by_row(name: str, arrays: Mapping[str | None, StoredArray]) -> StoredTable:
    table = arrays[None]
    rows, dim = table.shape
    layout = f"chunks of {min(table.chunk[0], rows)} rows" if rows else ""
    return StoredTable(TableInfo(name, rows, dim, table.dtype, _names(arrays), layout), arrays)


def _names(arrays: Mapping[str | None, StoredArray]) -> tuple[str, ...]:
    return tuple(sorted(name for name in arrays if name is not None))


def _is_matrix(array: StoredArray) -> bool:
    return len(array.shape) == 2 and array.dtype.name in _FLOATS


def _open_matrix(leaf: Leaf, store: ArrayStore) -> StoredArray:
    array = store.open(leaf)
    if not _is_matrix(array):
        raise CheckpointMismatchError(
            f"checkpoint {leaf.item.folder}: table {leaf.shown} should be a matrix of floats, but is "
            f"{array.dtype.name} {list(array.shape)}. Save the table as it was trained."
        )
    array.check_stored()
    return array


def _open_slot(table: Leaf, shape: tuple[int, ...], leaf: Leaf, store: ArrayStore) -> StoredArray:
    slot = _open_matrix(leaf, store)
    if slot.shape != shape:
        raise CheckpointCorruptError.of(
            f"checkpoint {leaf.item.folder}: table {table.shown} is {list(shape)}, but its slot {leaf.shown} is "
            f"{list(slot.shape)}"
        )
    return slot
