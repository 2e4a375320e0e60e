"""Combines the rows of lists of ids into one row per example, by the fastest operations that every TensorFlow runtime
has.

Measured through the C API, 26 features, 100k x 64 float32 tables, one thread (docs/export-reference.md has the numbers):

- Without padding, the gather of [n, hot] rows and one sum is fastest (with weights: one batched product).
- With padding, the present entries are selected, gathered, and summed by `SegmentSum`, whose segments must be sorted.
- `UnsortedSegmentSum` takes twice as long, and a mask over the gathered rows even longer. Padding multiplied by 0 turns
an
  infinity into NaN.
- Many rows are gathered feature by feature. One gather for all of them uses memory that is returned to the system and
  requested again with every request, and it jumps from table to table. Few rows are gathered at once, because each
  operation costs as much as the rows.

Formulas: see `tpuembed.lookup`.
"""

from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

__all__ = ["FEW_ROWS_BYTES", "Gather", "pool_entries", "pool_full", "pool_matrix"]

Tensor = Any
Gather = Callable[[Tensor], Tensor]
"""Returns float32 [n, dim] for int64 [n] rows of a stack."""

FEW_ROWS_BYTES: Final = 4 << 20
"""Up to this many bytes of float32 rows, features are gathered together."""


def pool_matrix(rows: Tensor, present: Tensor, weights: Tensor | None, combiner: str, gather: Gather) -> Tensor:
    """Return float32 [n, dim] for int64 `rows` [n, hot] of a stack. `present` and `weights` have the same shape."""

    def entries() -> Tensor:
        shape = tf.shape(rows, tf.int64)
        segments = tf.broadcast_to(tf.range(shape[0])[:, None], shape)
        return pool_entries(rows, present, weights, segments, shape[0], combiner, gather)

    return tf.cond(tf.reduce_all(present), lambda: pool_full(rows, weights, combiner, gather), entries)


def pool_full(rows: Tensor, weights: Tensor | None, combiner: str, gather: Gather) -> Tensor:
    """Combine int64 `rows` [..., hot] that are all present into float32 [..., dim]; see `pool_matrix`."""
    values = gather(rows)
    if weights is None:
        total = tf.reduce_sum(values, -2)
        if combiner == "sum":
            return total
        count = tf.cast(tf.shape(rows)[-1], tf.float32)
        return tf.math.divide_no_nan(total, count if combiner == "mean" else tf.sqrt(count))
    total = tf.squeeze(tf.matmul(weights[..., None, :], values), -2)
    return _divided(total, weights, combiner, lambda each: tf.reduce_sum(each, -1))


def pool_entries(
    rows: Tensor,
    present: Tensor,
    weights: Tensor | None,
    segments: Tensor,
    count: Tensor,
    combiner: str,
    gather: Gather,
) -> Tensor:
    """Return float32 [count, dim] for int64 `rows`, where `present`; `segments` has the example of each.

    Args:
        rows: of any shape; in row-major order, their segments never fall.
        present, weights, segments: of the shape of `rows`.
        count: scalar int64.
    """
    entries = tf.reshape(tf.where(tf.reshape(present, [-1])), [-1])
    # One more entry, of an example after the last one, so that the sums include trailing examples without ids.
    segments = tf.concat([_at(segments, entries), tf.reshape(count, [1])], 0)
    values = gather(tf.concat([_at(rows, entries), [tf.constant(0, tf.int64)]], 0))
    if weights is not None:
        weights = tf.concat([_at(weights, entries), [0.0]], 0)
        values *= weights[:, None]
    total = tf.math.segment_sum(values, segments)[:count]
    if weights is None and combiner != "sum":
        weights = tf.ones_like(segments, tf.float32)
    return _divided(total, weights, combiner, lambda each: tf.math.segment_sum(each, segments)[:count])


def _at(tensor: Tensor, entries: Tensor) -> Tensor:
    return tf.gather(tf.reshape(tensor, [-1]), entries)


def _divided(total: Tensor, weights: Tensor, combiner: str, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Divide weighted sums by the combiner's denominators. `add_up` sums per-entry numbers for each example."""
    if combiner == "sum":
        return total
    denominator = add_up(weights) if combiner == "mean" else tf.sqrt(add_up(weights * weights))
    return tf.math.divide_no_nan(total, denominator[..., None])
