"""Rows of lists of ids to one row per example, by the fastest operations that every TensorFlow runtime has.

Measured through the C API, 26 features, 100k x 64 float32 tables, one thread (docs/export.md has the numbers):
- where no entry is padding, the gather of [n, hot] rows and one sum (with weights: one batched product with them);
- else the entries that are there are sought out, gathered, and summed by `SegmentSum`, whose segments must be sorted;
- `UnsortedSegmentSum` takes twice as long, a mask over the gathered rows longer still, and padding that is multiplied by 0
  makes NaN of an infinity;
- many rows are gathered feature by feature: one gather for all of them takes memory that is returned to the system and
  asked for again with every request, and jumps from table to table. Few rows are gathered at once, for each operation
  costs as much as the rows.

Formulas: see `tpuembed.lookup`.
"""

from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

__all__ = ["FEW_ROWS_BYTES", "Gather", "pool_entries", "pool_full", "pool_matrix"]

Tensor = Any
Gather = Callable[[Tensor], Tensor]
"""int64 [n] rows of a stack to float32 [n, dim]."""

FEW_ROWS_BYTES: Final = 4 << 20
"""Up to so many bytes of float32 rows, features are gathered together."""


def pool_matrix(ids: Tensor, weights: Tensor | None, combiner: str, gather: Gather) -> Tensor:
    """float32 [n, dim] of int64 `ids` [n, hot] of a stack, negative where there is none, and weights of their shape."""

    def entries() -> Tensor:
        shape = tf.shape(ids, tf.int64)
        segments = tf.broadcast_to(tf.range(shape[0])[:, None], shape)
        return pool_entries(ids, weights, segments, shape[0], combiner, gather)

    return tf.cond(tf.reduce_all(ids >= 0), lambda: pool_full(ids, weights, combiner, gather), entries)


def pool_full(ids: Tensor, weights: Tensor | None, combiner: str, gather: Gather) -> Tensor:
    """`pool_matrix` of ids [..., hot] of which none is negative: float32 [..., dim]."""
    rows = gather(tf.reshape(ids, [-1]))
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [rows.shape[-1]]], 0))
    if weights is None:
        total = tf.reduce_sum(rows, -2)
        if combiner == "sum":
            return total
        count = tf.cast(tf.shape(ids)[-1], tf.float32)
        return tf.math.divide_no_nan(total, count if combiner == "mean" else tf.sqrt(count))
    total = tf.squeeze(tf.matmul(weights[..., None, :], rows), -2)
    return _divided(total, weights, combiner, lambda values: tf.reduce_sum(values, -1))


def pool_entries(
    ids: Tensor, weights: Tensor | None, segments: Tensor, count: Tensor, combiner: str, gather: Gather
) -> Tensor:
    """float32 [count, dim] of `ids`, negative where there is none, each of them in the example `segments`.

    Args:
        ids: int64, of any shape; in row-major order, their segments never fall.
        weights, segments: of the ids' shape.
        count: scalar int64.
    """
    entries = tf.where(tf.reshape(ids, [-1]) >= 0)[:, 0]
    # One entry more, of an example after the last: so the sums reach to it where the last examples have no ids.
    segments = tf.concat([tf.gather(tf.reshape(segments, [-1]), entries), [count]], 0)
    rows = gather(tf.concat([tf.gather(tf.reshape(ids, [-1]), entries), [tf.constant(0, tf.int64)]], 0))
    if weights is not None:
        weights = tf.concat([tf.gather(tf.reshape(weights, [-1]), entries), [0.0]], 0)
        rows *= weights[:, None]
    total = tf.math.segment_sum(rows, segments)[:count]
    if weights is None and combiner != "sum":
        weights = tf.ones_like(segments, tf.float32)
    return _divided(total, weights, combiner, lambda values: tf.math.segment_sum(values, segments)[:count])


def _divided(total: Tensor, weights: Tensor, combiner: str, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Weighted sums over the combiner's denominators, which `add_up` makes of each entry's weight."""
    if combiner == "sum":
        return total
    denominator = add_up(weights) if combiner == "mean" else tf.sqrt(add_up(weights * weights))
    return tf.math.divide_no_nan(total, denominator[..., None])
