"""Finds the arrays of an Orbax checkpoint that are tables and slots, opens them, and checks their shapes and layouts.

Source of the names: keras.Model.get_state_tree, keras/src/optimizers/base_optimizer.py (add_variable_from_reference).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.rows import ModSharded
from tpuembed.checkpoint.orbax.arrays import ArrayStore, StoredArray
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.stack_specs import StackSpec
from tpuembed.checkpoint.orbax.stacks import TableLeaves, find_stacks, match_specs, place_tables
from tpuembed.checkpoint.types import TableInfo, by_name
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
_IN_ORDER: Final = ModSharded(1, 0, lambda parts: parts)
"""The place of rows that are stored in the order of their ids: all in one part."""
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


def _keras_tables(leaves: Sequence[Leaf]) -> Iterator[TableLeaves]:
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
        words = leaf.path[-1].split("_")
        # The longest name of a variable before a "_".
        ends = range(len(words) - 1, 0, -1)
        prefix = next((start for end in ends if (start := "_".join(words[:end])) in prefixes), None)
        if prefix is None:
            continue
        optimizer, name = leaf.path[1].rstrip("0123456789").removesuffix("_"), leaf.path[-1][len(prefix) + 1 :]
        name = _SLOTS.get(name, name) if name in _OF_KERAS.get(optimizer, ()) else name
        if len(prefixes[prefix]) > 1:
            one, other = prefixes[prefix][:2]
            raise CheckpointFormatError(
                f"checkpoint {leaf.item.folder}: {leaf.shown} may be {name!r} of {one.shown} or of {other.shown}. Rename one "
                "and save again."
            )
        variable = prefixes[prefix][0]
        if (other := kept[variable.path].setdefault(name, leaf)) is not leaf:
            raise CheckpointFormatError(
                f"checkpoint {leaf.item.folder}: {other.shown} and {leaf.shown} are both {name!r} of "
                f"{variable.shown}. Save again with one optimizer."
            )
    return kept


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table: its description, the arrays of its rows (None) and slots, and the place of its rows in them."""

    info: TableInfo
    arrays: Mapping[str | None, StoredArray]
    place: ModSharded = _IN_ORDER

    @property
    def name(self) -> str:
        """Return its name."""
        return self.info.name


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
    specs_by_name = match_specs(where, stacks, specs)
    found = [table for stack in stacks for table in _stacked_tables(where, stack, specs_by_name[stack.name], store)]
    found += [_dense_table(layer, store) for layer in _by_name(_keras_tables(leaves))]
    if not found:
        several_items = len({leaf.item for leaf in leaves}) > 1
        plain = [
            TableLeaves("/".join((leaf.item.folder.name, *leaf.path) if several_items else leaf.path), leaf)
            for leaf in leaves
            if leaf.is_array and leaf.rank in {None, 2}
        ]
        for table in _by_name(plain):
            if _is_matrix(array := store.open(table.table)):
                array.check_stored()
                found.append(_row_by_row(table.name, {None: array}))
    if not found:
        raise CheckpointFormatError(
            f"checkpoint {where}: has no table, neither an embedding layer's nor an array that is a matrix of "
            f"floats, among {len(leaves)} leaves. Check that the layer was built before the checkpoint was saved."
        )
    return by_name(
        found,
        lambda one, _: (
            f"checkpoint {where}: has two tables {one.name!r}, one of them stacked. Rename one and save again."
        ),
    )


def _by_name(tables: Iterable[TableLeaves]) -> Iterable[TableLeaves]:
    return by_name(
        tables,
        lambda one, other: (
            f"checkpoint {other.table.item.folder}: arrays {one.table.shown} and {other.table.shown} are both "
            f"table {one.name!r}. Rename one and save again."
        ),
    ).values()


def _stacked_tables(where: str, stack: TableLeaves, spec: StackSpec, store: ArrayStore) -> Iterator[StoredTable]:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(stack.table, store)}
    rows, dim = arrays[None].shape
    for name, leaf in stack.slots.items():
        slot = _SLOTS.get(name, name)
        if slot in arrays:
            raise CheckpointFormatError(
                f"checkpoint {where}: stack {stack.name!r} has two slots {slot!r}, one of them called "
                f"{name!r}. Save it without the other."
            )
        arrays[slot] = _open_slot(stack.table, (rows, dim), leaf, store)
    for layout in place_tables(where, spec, (rows, dim)):
        info = TableInfo(layout.table, *layout.shape, arrays[None].dtype, _names(arrays), layout.words)
        yield StoredTable(info, arrays, layout.rows)


def _dense_table(layer: TableLeaves, store: ArrayStore) -> StoredTable:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(layer.table, store)}
    for name, leaf in layer.slots.items():
        if name in _SLOTS.values():  # these have a value per element of the table; others may have any shape
            arrays[name] = _open_slot(layer.table, arrays[None].shape, leaf, store)
        elif leaf.rank in {None, 2} and (slot := store.open(leaf)).shape == arrays[None].shape and _is_matrix(slot):
            arrays[name] = slot
    return _row_by_row(layer.name, arrays)


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
