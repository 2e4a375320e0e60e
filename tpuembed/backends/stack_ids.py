"""Ids made ready for SparseCores, on the host: they take ids for rows of a stack, and check none.

An id outside of its table would be looked up, and trained, in padding, in another table, or in memory beyond.
"""

from typing import Any

import tensorflow as tf

__all__ = ["ids_inside"]

Tensor = Any


def ids_inside(ids: Any, weights: Any, rows: int, samples: int, validate: bool) -> tuple[Any, Any]:
    """Ids of a table of `rows` rows, and weights of their kind, as the layer's policy wants them.

    Negative ids of sparse and ragged features are dropped where `validate`. Another id outside of the table has the weight NaN,
    which makes its activation NaN: loud, where another row would be silently wrong. Ragged ids become sparse ones, because
    TensorFlow's class before 2.20 fails on ragged weights; they are NaN where they are not of `samples` examples.

    Args:
        ids: integers, a Tensor, a SparseTensor or a RaggedTensor of rank 2.
        weights: of the ids' kind, or None.
        rows: of the table, without padding.
        samples: activations of the feature, of one replica.
        validate: the feature's validate_weights_and_indices.
    """
    if isinstance(ids, tf.Tensor):
        inside = _is_inside(ids, rows)
        return tf.where(inside, ids, 0), _loud(inside, tf.ones_like(ids, tf.float32))
    if weights is None:
        weights = ids.with_values(tf.ones_like(ids.values, tf.float32))
    complete: Any = True
    if isinstance(ids, tf.RaggedTensor):
        complete = tf.equal(ids.nrows(), samples)
        ids, weights = ids.to_sparse(), weights.to_sparse()
    if validate and not ids.dtype.is_unsigned:  # of which the highest would turn negative
        keep = tf.cast(ids.values, tf.int64) >= 0
        ids, weights = tf.sparse.retain(ids, keep), tf.sparse.retain(weights, keep)
    inside = _is_inside(ids.values, rows) & complete
    return ids.with_values(tf.where(inside, ids.values, 0)), weights.with_values(_loud(inside, weights.values))


def _is_inside(values: Tensor, rows: int) -> Tensor:
    """Asked of the ids' own type, before TensorFlow makes int32 of it."""
    return (tf.cast(values, tf.int64) >= 0) & (tf.cast(values, tf.int64) < rows)


def _loud(inside: Tensor, weights: Tensor) -> Tensor:
    return tf.where(inside, tf.cast(weights, tf.float32), float("nan"))
