"""The exporter's tables in a graph: uninitialised stacked variables, looked up by offset ids, with gathers only."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tpuembed.config import QuantizationConfig, TableConfig
from tpuembed.errors import CheckpointMismatchError, ExportError
from tpuembed.export.decode import decode_rows
from tpuembed.export.plan import Placement, StackPlan
from tpuembed.export.signature import find_table
from tpuembed.lookup import DROPPED, LookupIds, gather_grouped

if TYPE_CHECKING:
    from tpuembed.checkpoint import TableInfo

__all__ = ["StackedTables"]

Tensor = Any


class StackedTables:
    """A `tpuembed.table_scope.TableSource` over the checkpoint's tables.

    Layers register what they need while the model is built, `required`, and what they were trained with, `quantization`;
    `bind` then says in which variable each table lies.
    """

    def __init__(self, available: Mapping[str, "TableInfo"]) -> None:
        self.required: list[str] = []
        self.quantization: dict[str, QuantizationConfig] = {}
        self._available = available
        self._places: dict[str, tuple[StackPlan, Placement]] = {}
        self._variables: Mapping[str, Any] = {}
        self._stacks: Mapping[str, StackPlan] = {}

    def register(self, table: TableConfig) -> None:
        """Note that a layer needs `table`.

        Raises:
            UnknownTableError, CheckpointMismatchError: the checkpoint has no such table, or one of another shape.
        """
        found = find_table(table.name, self._available)
        if (found.rows, found.dim) != (table.vocabulary_size, table.dim):
            raise CheckpointMismatchError(
                f"table {table.name!r} is [{table.vocabulary_size}, {table.dim}] in the model and "
                f"[{found.rows}, {found.dim}] in the checkpoint; build the model as it was trained"
            )
        if table.name not in self.required:
            self.required.append(table.name)
        if table.quantization_config is not None:
            self.quantization[table.name] = table.quantization_config

    def bind(self, stacks: Sequence[StackPlan], variables: Mapping[str, Any]) -> None:
        """Say where the tables lie: `variables` by stack name, of stored rows."""
        self._variables = variables
        self._stacks = {stack.name: stack for stack in stacks}
        self._places = {place.table: (stack, place) for stack in stacks for place in stack.tables}

    def row_range(self, table: str) -> tuple[int, int]:
        """The ids [start, stop) that can be looked up in a table."""
        _, place = self._places[table]
        return place.first_row, place.first_row + place.rows

    def lookup(self, features: Sequence[LookupIds], tables: Sequence[str]) -> list[Tensor]:
        """Activations of `features`, each in its table, with one gather per stack."""
        if not self._places:
            raise ExportError("the model looked up its tables while it was being built; build it from symbolic inputs")
        shifted = [self._shifted(feature, table) for feature, table in zip(features, tables, strict=True)]
        return gather_grouped(shifted, [self._places[table][0].name for table in tables], self._gather)

    def _gather(self, stack: str, ids: Tensor) -> Tensor:
        stored = tf.gather(self._variables[stack], ids, name=f"gather_{stack}")
        return decode_rows(stored, self._stacks[stack].storage, self._stacks[stack].dim)

    def _shifted(self, feature: LookupIds, table: str) -> LookupIds:
        """`feature` with ids of the stack. An id outside its table fails; it never reads a neighbour's row."""
        stack, place = self._places[table]
        ids = feature.ids
        lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
        first, stop = self.row_range(table)
        inside = (lowest >= (DROPPED if feature.droppable else 0)) & (highest < stop)
        if first:
            inside &= tf.reduce_all((ids >= first) | (ids == DROPPED))
        message = f"ids of table {table} must be in [{first}, {stop}); these go from"
        # The raw op: `tf.debugging.Assert` wraps it in a branch, which costs more than a small lookup.
        check = tf.raw_ops.Assert(condition=inside, data=[message, lowest, "to", highest])
        with tf.control_dependencies([check]):
            # Past the end of the stack, so that the gather itself fails should a runtime strip the assertion.
            known = (ids >= first) & (ids < stop) if first else ids < stop
            shifted = tf.where(known, ids + (place.row_offset - first), tf.constant(stack.rows, tf.int64))
        return dataclasses.replace(feature, ids=tf.where(ids < 0, ids, shifted))
