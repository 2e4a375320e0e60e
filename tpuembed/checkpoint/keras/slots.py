"""Assigns the arrays of a Keras optimizer to tables. Keras numbers them and does not name them, so each must be proven.

Keras' optimizers keep their own scalars first, then for each trainable variable, in the model's order, its slots.

Source: keras/src/optimizers/base_optimizer.py (`build`, `add_optimizer_variables`, `save_own_variables`).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from tpuembed.checkpoint.keras.h5_listing import Dataset
from tpuembed.checkpoint.keras.model_config import OptimizerConfig, optimizer_config
from tpuembed.checkpoint.keras.tables import Table
from tpuembed.checkpoint.keras.weights import Weights

__all__ = ["with_optimizer_slots"]

_OPTIMIZER = "optimizer"


def with_optimizer_slots(weights: Weights, tables: Sequence[Table]) -> list[Table]:
    """Return `tables` with their proven slots. A table whose slots could be another variable's gets none.

    Slots are proven for a table whose shape no other variable has. They are also proven for all tables of one layer
    that share a shape with no other variable, because layer and optimizer number them in the same order.
    """
    optimizer = optimizer_config(weights.config)
    kept = [] if optimizer is None else list(_kept(weights, optimizer))
    return [_with_slots(weights, table, tables, kept) for table in tables] if kept else list(tables)


@dataclasses.dataclass(frozen=True)
class _VariableSlots:
    """The slots that the optimizer keeps for one variable."""

    shape: tuple[int, ...] | None
    slots: dict[str, Dataset]


def _kept(weights: Weights, optimizer: OptimizerConfig) -> Iterator[_VariableSlots]:
    """Yield the slots in the order of the model's trainable variables; nothing if the file has anything unexpected."""
    group = weights.groups.get(_OPTIMIZER)
    datasets = {} if group is None else group.datasets
    numbered = [datasets.get(str(number)) for number in range(len(datasets))]
    variables = [dataset for dataset in numbered if dataset is not None]
    own, rest = variables[: optimizer.scalars], variables[optimizer.scalars :]
    step = len(optimizer.slots)
    if len(variables) < len(datasets) or any(dataset.shape != () for dataset in own) or len(rest) % step:
        return
    found = [rest[first : first + step] for first in range(0, len(rest), step)]
    if any(dataset.shape != slots[0].shape for slots in found for dataset in slots):
        return
    for slots in found:
        yield _VariableSlots(slots[0].shape, dict(zip(optimizer.slots, slots, strict=True)))


def _with_slots(weights: Weights, table: Table, tables: Sequence[Table], kept: Sequence[_VariableSlots]) -> Table:
    alike = sorted((other for other in tables if other.shape == table.shape), key=lambda other: other.order)
    candidates = [one for one in kept if one.shape == table.shape]
    if (
        {other.layer for other in alike} != {table.layer}
        or len(candidates) != len(alike)
        or _variables_of_shape(weights, table) != len(alike)
    ):
        return table
    slots = candidates[alike.index(table)].slots
    return dataclasses.replace(table, slots=slots) if _same_dtype(table, slots.values()) else table


def _variables_of_shape(weights: Weights, table: Table) -> int:
    """Return the number of variables of the model that have the table's shape."""
    return sum(
        dataset.shape == table.shape
        for group in weights.groups.values()
        if group.path.partition("/")[0] != _OPTIMIZER
        for dataset in group.datasets.values()
    )


def _same_dtype(table: Table, slots: Iterable[Dataset]) -> bool:
    return all((slot.dtype, slot.stated_dtype) == (table.dataset.dtype, table.dataset.stated_dtype) for slot in slots)
