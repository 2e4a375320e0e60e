"""Reads and writes of a table's rows in place, without a copy of the table."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tpuembed.backends.table_state import TableState, initial_rows
from tpuembed.backends.tf_config import local
from tpuembed.errors import ConfigError

__all__ = ["PIECE_BYTES", "copies", "gather_rows", "initial_pieces", "piece_rows", "read_rows", "write_rows"]

Array = np.ndarray[Any, Any]

PIECE_BYTES: Final = 16 << 20
"""Rows are moved in pieces of about this many bytes."""

_INITIALIZER_COPIES: Final = 4  # Keras holds three copies of what it makes; the fourth is the last piece, being written


def piece_rows(dim: int) -> int:
    """Return how many float32 rows [dim] make a piece."""
    return max(1, PIECE_BYTES // (4 * dim))


def write_rows(variable: Any, start: int, values: Any) -> None:
    """Overwrite rows [start, start + n) of `variable`, [rows, dim], with `values`, float32 [n, dim]. Writes every
    replica's copy.

    It scatters, because assigning to a slice copies the whole table once it has been trained. Source:
    PrepareToUpdateVariable and EnsureSparseVariableAccess in tensorflow/core/kernels/training_op_helpers.h.

    Raises:
        ConfigError: the variable's rows cannot be written from the host.
    """
    if hasattr(variable, "assign_rows"):  # in an accelerator
        variable.assign_rows(start, np.asarray(values, np.float32))
        return
    rows = tf.constant(values, tf.float32)
    ids = tf.range(start, start + rows.shape[0], dtype=tf.int64)
    for copy in copies(variable):
        tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=ids, updates=rows)


def read_rows(variable: Any, start: int, stop: int) -> Array:
    """Return rows [start, stop) of `variable`, float32 [stop - start, dim], from its first copy.

    It gathers, because slicing a table copies it once it has been trained.
    """
    if hasattr(variable, "read_rows"):  # in an accelerator
        rows: Array = variable.read_rows(start, stop)
        return rows
    return np.asarray(tf.gather(local(variable), tf.range(start, stop, dtype=tf.int64)).numpy())


def gather_rows(variable: Any, numbers: Array, out: Array) -> None:
    """Fill `out`, float32 [n, dim], with the rows `numbers`, int64 [n] and sorted, of the first copy of `variable`."""
    step = piece_rows(out.shape[1])
    if not hasattr(variable, "read_rows"):
        for first in range(0, len(numbers), step):
            out[first : first + step] = tf.gather(local(variable), numbers[first : first + step]).numpy()
        return
    first = 0
    while first < len(numbers):  # an accelerator reads ranges
        start = int(numbers[first])
        count = int(np.searchsorted(numbers[first:], start + step))
        chosen = numbers[first : first + count]
        out[first : first + count] = variable.read_rows(start, int(chosen[-1]) + 1)[chosen - start]
        first += count


def copies(variable: Any) -> tuple[Any, ...]:
    """Return the variable of each replica, or the one variable.

    Raises:
        ConfigError: the variable's rows cannot be written from the host.
    """
    found = variable.values if isinstance(variable, tf.distribute.DistributedValues) else (variable,)
    for copy in found:
        if not hasattr(copy, "handle") or copy.shape != variable.shape:
            raise ConfigError(
                f"variable {variable.name!r}: a {type(variable).__name__} cannot be written row by row. Restore it with "
                "tf.train.Checkpoint under the strategy that made it."
            )
    return tuple(found)


def initial_pieces(state: TableState, slot: str | None, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield (first row, float32 [n, dim]) of the initial values of rows [start, stop) of a new table, or of one of its
    slots.

    The default initializer and slots are made piece by piece, all copies together about PIECE_BYTES. Another
    initializer may depend on the table's shape or on the order of random numbers. So it makes the whole table, and
    [start, stop) is cut from it.
    """
    config = state.config
    step = -(-piece_rows(config.dim) // _INITIALIZER_COPIES)
    in_pieces = slot is not None or config.initializer is None or start == stop
    whole = None if in_pieces else initial_rows(config)
    for first in range(start, stop, step):
        count = min(step, stop - first)
        if slot is not None:
            assert state.optimizer is not None, "a table without an optimizer has no slots"
            yield first, tf.fill((count, config.dim), state.optimizer.slot_initial_value(slot))
        elif whole is None:
            yield first, initial_rows(dataclasses.replace(config, vocabulary_size=count))
        else:
            yield first, whole[first : first + count]
