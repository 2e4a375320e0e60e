"""Looks up rows of a stack whose changed rows lie beside it, with TensorFlow's own operations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.export.plan.plan import OverlayPlan, StackPlan

__all__ = ["gather_overlaid"]

Tensor = Any


def gather_overlaid(stack: StackPlan, variables: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return the stored rows [n, columns] for int64 `ids` [n], rows of the stack.

    A row whose bit is set in its word is in the overlay. Its place there is the number of bits up to its own, plus the
    upper half of the word. There is no branch: with no such row, these operations take less time than the parts of a branch
    that is not taken, and TensorFlow optimizes every part once per signature when it loads the graph.

    Args:
        stack: has an overlay.
        variables: the arrays of the stack, by name.
        ids: inside the stack.
    """
    assert stack.overlay is not None
    base, rows, words = (variables[array.name] for array in stack.arrays)
    word = tf.gather(words, tf.bitwise.right_shift(ids, 5))
    up_to_own = tf.bitwise.left_shift(word, 63 - tf.bitwise.bitwise_and(ids, 31))  # the bit of the row is the sign
    hit = up_to_own < 0
    hits = tf.where(hit)
    found = tf.gather(base, _base_rows(stack, stack.overlay, ids, hit), name=f"gather_{stack.name}")
    count = tf.cast(tf.raw_ops.PopulationCount(x=tf.gather_nd(up_to_own, hits)), tf.int64)
    place = tf.bitwise.right_shift(tf.gather_nd(word, hits), 32) + count
    # In place, because `TensorScatterUpdate` copies all rows. Nothing else reads the tensor, which is a copy of the base's rows.
    return tf.raw_ops.InplaceUpdate(x=found, i=tf.cast(tf.squeeze(hits, 1), tf.int32), v=tf.gather(rows, place))


def _base_rows(stack: StackPlan, overlay: OverlayPlan, ids: Tensor, hit: Tensor) -> Tensor:
    """Return the rows of the base's stack for `ids`: any row for a hit."""
    moved = np.array([table.row_offset - overlay.base_tables[table.table][0] for table in stack.tables], np.int64)
    if moved.any():
        ends = tf.constant([[table.row_offset + table.rows for table in stack.tables]], tf.int64)
        table = tf.raw_ops.UpperBound(sorted_inputs=ends, values=ids[None, :], out_type=tf.int64)
        ids -= tf.gather(tf.constant(moved), tf.reshape(table, [-1]))
    elif overlay.base_rows == stack.rows:
        return ids
    return tf.where(hit, tf.constant(0, tf.int64), ids)
