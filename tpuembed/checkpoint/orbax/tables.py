"""Opens the arrays of an Orbax checkpoint's tables, and checks their shapes and layouts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.sparsecore_layouts import TableLayout
from tpuembed.checkpoint.orbax.arrays import ArrayStore, StoredArray
from tpuembed.checkpoint.orbax.discovery import KNOWN_SLOTS, TableLeaves, keras_tables, matrices, merge, slot_name
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.row_runs import Run, contiguous_run, mod_sharded_runs
from tpuembed.checkpoint.orbax.stack_specs import StackSpec
from tpuembed.checkpoint.orbax.stacks import Stack, find_stacks, match_specs, place_tables
from tpuembed.checkpoint.types import TableInfo
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointMismatchError

__all__ = ["StoredTable", "open_tables"]

_FLOATS: Final = frozenset({"float32", "float64", "float16", "bfloat16"})


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
        return mod_sharded_runs(self.layout, start, stop)


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
