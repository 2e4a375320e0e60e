"""What a lowered step of a cell must hold, computed from the cell alone: nothing here asks the layer."""

import dataclasses
import itertools
from typing import Final

from tests.tpu.cells import MODELS, Cell, Model, Table

__all__ = ["CONSTANTS", "DEFAULT_LIMIT", "LEARNING_RATE", "SLOTS", "Stack", "buffer_lengths", "model_of", "stacks"]

LEARNING_RATE: Final = 0.3
OPTIONS: Final[dict[str, dict[str, float | bool]]] = {
    "SGD": {},
    "Adagrad": {"initial_accumulator_value": 0.2},
    "AdagradMomentum": {"momentum": 0.9, "use_nesterov": True, "exponent": 3.0, "beta2": 0.75, "epsilon": 1e-3},
    "Adam": {"beta_1": 0.8, "beta_2": 0.6, "epsilon": 1e-2, "sum_inside_sqrt": True},
    "FTRL": {
        "learning_rate_power": -0.4,
        "l1_regularization_strength": 0.15,
        "l2_regularization_strength": 0.35,
        "beta": 0.25,
    },
}
"""Arguments of each optimizer, no default among the numbers."""
SLOTS: Final = {"SGD": 0, "Adagrad": 1, "AdagradMomentum": 2, "Adam": 2, "FTRL": 2}
"""Slots of each optimizer."""
CONSTANTS: Final[dict[str, tuple[float, ...]]] = {
    "SGD": (),
    "Adagrad": (),
    "AdagradMomentum": (0.9, 1 / 3, 0.75, 0.25, 1e-3),
    "Adam": (0.8, 0.2, 0.6, 0.4, 1e-4),  # the square of epsilon, which is inside of the root
    "FTRL": (0.4, 0.15, 2 * 0.35, 0.25),
}
"""Absolute numbers of each rule that its computation must hold, by the formulas of optimization_parameters.proto."""

DEFAULT_LIMIT: Final = 256
"""Ids that a SparseCore takes from another one for a stack of which nothing is said (TPUEmbeddingV2.DEFAULT_MAX_IDS_PER_TABLE)."""
_ALIGN = 8  # rows of a table per SparseCore, owners in a row of pointers
_MINIBATCHES = 64  # at most, of one SparseCore


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that are looked up together.

    Attributes:
        shape: [rows, width] of one TPU's shard.
        samples: activations of one replica.
        max_ids, max_unique_ids: limits of a SparseCore.
    """

    shape: tuple[int, int]
    samples: int
    max_ids: int
    max_unique_ids: int


def model_of(cell: Cell) -> Model:
    """The model of a cell."""
    return MODELS[cell.tables]


def stacks(cell: Cell) -> list[Stack]:
    """One per width of the tables."""
    model = model_of(cell)
    ordered = sorted(model.tables, key=lambda table: table.dim)
    return [_stack(cell, model, list(tables)) for _, tables in itertools.groupby(ordered, lambda table: table.dim)]


def _stack(cell: Cell, model: Model, tables: list[Table]) -> Stack:
    cores = cell.hardware.sparse_cores
    unit = _ALIGN * cores * cell.replicas
    rows = sum(-(-table.rows // unit) * unit for table in tables)
    ids, unique = _limit([table.max_ids for table in tables]), _limit([table.max_unique_ids for table in tables])
    return Stack((rows // cell.replicas, tables[0].dim), model.batch * len(tables), ids, unique)


def _limit(of_tables: list[int | None]) -> int:
    """Of a stack: its tables' together, TensorFlow's default for one that does not say; the default where none says."""
    return sum(limit or DEFAULT_LIMIT for limit in of_tables) if any(of_tables) else DEFAULT_LIMIT


def buffer_lengths(cell: Cell, stack: Stack) -> tuple[int, int]:
    """(row pointers, ids) of one TPU: pointers for all minibatches of its SparseCores, each to all owners."""
    cores = cell.hardware.sparse_cores
    owners = -(-cores * cell.replicas // _ALIGN) * _ALIGN
    return _MINIBATCHES * cores * owners, model_of(cell).ids_per_sample * stack.samples
