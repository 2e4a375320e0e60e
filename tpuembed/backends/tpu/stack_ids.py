"""Ids prepared on the host for SparseCores, which read them as rows of a stack and check none of them.

An id outside its table would read and train padding, another table, or memory beyond the stack.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors.ids import Span, outside_texts
from tpuembed.lookup.ids import DenseIds, RaggedIds, kind_of
from tpuembed.lookup.pooling import Segments, shares
from tpuembed.lookup.ranges import DROPPED, is_inside

__all__ = ["ids_inside", "ids_with_room", "updated_rows"]

Tensor = Any


def ids_inside(
    ids: Any,
    weights: Any,
    name: str,
    rows: int,
    samples: int,
    validate: bool,
    policy: str | int = "error",
    combiner: str = "sum",
    table: str = "",
) -> tuple[Any, Any]:
    """Return the ids as rows of a table, and their weights, after the feature's out_of_vocabulary policy.

    If `validate`, negative ids of sparse and ragged features are dropped. With a `policy` other than "error", only -1
    is dropped. Other ids outside the table follow `policy`. "error" fails the step on the host, before any lookup or
    update. Ragged ids for another number of examples than `samples` fail too. Ragged ids become sparse, because
    TensorFlow before 2.20 fails on ragged weights.

    With "zeros", ids outside the table are removed, and dense ids become sparse. The removed ids count in the
    combiner's denominator. So each weight becomes its row's share, and the returned ids are combined by sum.

    Args:
        ids: integers, a Tensor, a SparseTensor or a RaggedTensor of rank 2.
        weights: the same kind of tensor as the ids, or None.
        name: the feature's name, for messages.
        rows: the rows of the table, without padding.
        samples: the activations of the feature, of one replica.
        validate: the feature's validate_weights_and_indices.
        policy: the feature's out_of_vocabulary.
        combiner: the table's combiner.
        table: the table's name, for messages.
    """
    where = (name, Span(table or name, rows))
    kind = kind_of(ids)
    if kind is DenseIds:
        if policy != "zeros":
            ids = ids if policy == "error" else _replaced(ids, rows, policy)
            flat = tf.reshape(ids, [-1])
            places = tf.range(tf.size(flat, tf.int64)) * tf.shape(ids, tf.int64)[0] // max(samples, 1)
            return _checked(ids, _outside(flat, places, *where)), weights
        values = tf.reshape(_wide(ids), [-1])
        indices = tf.stack([tf.range(tf.size(values, tf.int64)), tf.zeros_like(values)], 1)
        ids, validate, combiner = tf.SparseTensor(indices, values, [samples, 1]), False, "sum"
    checks = []
    if kind is RaggedIds:
        message = (
            f"feature {name!r}: ragged ids must have {samples} examples, one per activation of one replica. They have"
        )
        checks.append(tf.debugging.Assert(tf.equal(ids.nrows(), samples), [message, ids.nrows()]))
        ids, weights = ids.to_sparse(), None if weights is None else weights.to_sparse()
    if validate and not ids.dtype.is_unsigned:  # the highest unsigned ids would become negative
        keep = tf.cast(ids.values, tf.int64) >= 0 if policy == "error" else tf.not_equal(_wide(ids.values), DROPPED)
        ids, weights = tf.sparse.retain(ids, keep), None if weights is None else tf.sparse.retain(weights, keep)
    if policy == "zeros":
        ids, weights = _without_outside(ids, weights, rows, samples, combiner)
    elif policy != "error":
        ids = ids.with_values(_replaced(ids.values, rows, policy))
    checks.append(_outside(ids.values, ids.indices[:, 0], *where))
    return ids.with_values(_checked(ids.values, *checks)), weights


def updated_rows(values: Tensor, rows: int, policy: str | int) -> Tensor:
    """Return the rows, int64 [n], of a table of `rows` rows that a step with the ids `values` updates.

    Args:
        values: integers of any shape.
        rows: the rows of the table, without padding.
        policy: the feature's out_of_vocabulary.
    """
    values = tf.reshape(_wide(values), [-1])
    if not isinstance(policy, str):  # -1 may be padding, and updates nothing; to stamp the row then does no harm
        return _replaced(values, rows, policy)
    return tf.boolean_mask(values, is_inside(values, rows))


def _wide(values: Tensor) -> Tensor:
    """Return any integers as int64. Larger ones become its maximum, which is not a row."""
    return tf.cast(tf.minimum(values, tf.int64.max) if values.dtype == tf.uint64 else values, tf.int64)


def _replaced(values: Tensor, rows: int, row: str | int) -> Tensor:
    wide = _wide(values)
    return tf.where(is_inside(wide, rows), wide, tf.constant(row, tf.int64))


def _without_outside(ids: Any, weights: Any, rows: int, samples: int, combiner: str) -> tuple[Any, Any]:
    """Return the sparse ids inside the table, and the share of each in its example's activation."""
    wide = _wide(ids.values)
    given = tf.ones_like(wide, tf.float32) if weights is None else tf.cast(weights.values, tf.float32)
    given = shares(given, Segments(ids.indices[:, 0], tf.constant(samples, tf.int64)), combiner)
    inside = is_inside(wide, rows)
    kept = tf.sparse.retain(ids.with_values(wide), inside)
    return kept, kept.with_values(tf.boolean_mask(given, inside))


def _outside(values: Tensor, places: Tensor, feature: str, span: Span) -> Any:
    """Return an assertion that fails if a value is outside the table. It checks the ids before TensorFlow casts them to int32."""
    wide = tf.cast(values, tf.int64)
    outside = ~is_inside(wide, span.rows)
    found = [tf.boolean_mask(tensor, outside)[:1] for tensor in (values, places)]
    first, row = (tf.strings.reduce_join(tf.strings.as_string(one)) for one in found)
    before, after = outside_texts(feature, span)
    return tf.debugging.Assert(~tf.reduce_any(outside), [tf.strings.join([before, first, " of row ", row, after])])


def _checked(values: Tensor, *checks: Any) -> Tensor:
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(values)


_ALIGN = 8  # each SparseCore's ids begin at multiples of it


def ids_with_room(ends: Sequence[Tensor], stack: str, size: int) -> list[Tensor]:
    """Return `ends` with a check that the ids fit into the buffer. The error of TensorFlow's op does not name the
    stack.

    Args:
        ends: for every SparseCore of a TPU, [owners + 1]: the ends of the ids of each owner.
        stack: the name of the stack.
        size: the ids that the buffer of one TPU holds.
    """
    counts = tf.concat([of_core[1:] - of_core[:-1] for of_core in ends], 0)
    starts = tf.cumsum((counts + _ALIGN - 1) // _ALIGN * _ALIGN, exclusive=True)
    taken = tf.reduce_max(starts + counts)
    message = (
        f"tables of stack {stack!r}: the ids of one replica's batch do not fit into a buffer of {size} places. Raise "
        "max_ids_per_chip_per_sample of the SparseCoreEmbeddingConfig, or set its allow_id_dropping. Places needed, and ids:"
    )
    room = tf.debugging.Assert(taken <= size, [message, taken, tf.reduce_sum(counts)])
    return [_checked(tf.convert_to_tensor(of_core), room) for of_core in ends]
