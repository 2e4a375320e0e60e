"""Assigns the arrays of a Keras optimizer to tables. Keras numbers them and does not name them, so each must be proven.

Keras' optimizers keep their own scalars first, then for each trainable variable, in the model's order, its slots.

Source: keras/src/optimizers/base_optimizer.py (`build`, `add_optimizer_variables`, `save_own_variables`).
"""

import dataclasses
from collections.abc import Sequence

from tpuembed.checkpoint.keras.hdf5 import Dataset
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
    if optimizer is None or not (kept := _kept(weights, optimizer)):
        return list(tables)
    return [_with_slots(weights, table, tables, optimizer.slots, kept) for table in tables]


def _kept(weights: Weights, optimizer: OptimizerConfig) -> list[list[Dataset]]:
    """Return the slots of each trainable variable, in the model's order; [] if the file has anything unexpected."""
    group = weights.groups.get(_OPTIMIZER)
    datasets = {} if group is None else group.datasets
    numbered = [datasets.get(str(number)) for number in range(len(datasets))]
    variables = [dataset for dataset in numbered if dataset is not None]
    own, rest = variables[: optimizer.scalars], variables[optimizer.scalars :]
    step = len(optimizer.slots)
    if len(variables) < len(datasets) or any(dataset.shape != () for dataset in own) or len(rest) % step:
        return []
    found = [rest[first : first + step] for first in range(0, len(rest), step)]
    return [] if any(dataset.shape != slots[0].shape for slots in found for dataset in slots) else found


def _with_slots(
    weights: Weights, table: Table, tables: Sequence[Table], names: Sequence[str], kept: Sequence[Sequence[Dataset]]
) -> Table:
    alike = sorted((other for other in tables if other.shape == table.shape), key=lambda other: other.order)
    candidates = [slots for slots in kept if slots[0].shape == table.shape]
    layers = {other.layer for other in alike}
    if layers != {table.layer} or not len(candidates) == len(alike) == _variables_of_shape(weights, table):
        return table
    slots = candidates[alike.index(table)]
    form = (table.dataset.dtype, table.dataset.stated_dtype)
    if any((slot.dtype, slot.stated_dtype) != form for slot in slots):
        return table
    return dataclasses.replace(table, slots=dict(zip(names, slots, strict=True)))


def _variables_of_shape(weights: Weights, table: Table) -> int:
    """Return the number of variables of the model that have the table's shape."""
    return sum(
        dataset.shape == table.shape
        for group in weights.groups.values()
        if group.path.partition("/")[0] != _OPTIMIZER
        for dataset in group.datasets.values()
    )
