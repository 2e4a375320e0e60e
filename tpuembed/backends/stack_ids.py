"""Ids made ready for SparseCores, on the host: they take ids for rows of a stack, and check none.

An id outside of its table would be looked up, and trained, in padding, in another table, or in memory beyond.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["ids_inside", "ids_with_room"]

Tensor = Any


def ids_inside(ids: Any, weights: Any, name: str, rows: int, samples: int, validate: bool) -> tuple[Any, Any]:
    """Ids of a table of `rows` rows, and weights of their kind, as the layer's policy wants them.

    Negative ids of sparse and ragged features are dropped where `validate`. Another id outside of the table fails the step on the
    host, before anything is looked up or trained, as it does off the TPU; and so do ragged ids that are not of `samples`
    examples. Ragged ids become sparse ones, because TensorFlow's class before 2.20 fails on ragged weights.

    Args:
        ids: integers, a Tensor, a SparseTensor or a RaggedTensor of rank 2.
        weights: of the ids' kind, or None.
        name: the feature's, for messages.
        rows: of the table, without padding.
        samples: activations of the feature, of one replica.
        validate: the feature's validate_weights_and_indices.
    """
    if isinstance(ids, tf.Tensor):
        return _checked(ids, _outside(ids, name, rows)), weights
    checks = []
    if isinstance(ids, tf.RaggedTensor):
        checks.append(_miscounted(ids, name, samples))
        ids, weights = ids.to_sparse(), None if weights is None else weights.to_sparse()
    if validate and not ids.dtype.is_unsigned:  # of which the highest would turn negative
        keep = tf.cast(ids.values, tf.int64) >= 0
        ids, weights = tf.sparse.retain(ids, keep), None if weights is None else tf.sparse.retain(weights, keep)
    checks.append(_outside(ids.values, name, rows))
    return ids.with_values(_checked(ids.values, *checks)), weights


def _outside(values: Tensor, name: str, rows: int) -> Any:
    """Asked of the ids' own type, before TensorFlow makes int32 of it."""
    wide = tf.cast(values, tf.int64)
    inside = (wide >= 0) & (wide < rows)
    message = f"feature {name!r}: ids outside of their table of {rows} rows:"
    return tf.debugging.Assert(tf.reduce_all(inside), [message, tf.boolean_mask(values, ~inside)], summarize=5)


def _miscounted(ids: Any, name: str, samples: int) -> Any:
    message = f"feature {name!r}: ragged ids for {samples} activations of one replica must be of as many examples, they are of"
    return tf.debugging.Assert(tf.equal(ids.nrows(), samples), [message, ids.nrows()])


def _checked(values: Tensor, *checks: Any) -> Tensor:
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(values)


_ALIGN = 8  # an owner's ids begin at multiples of it


def ids_with_room(ends: Sequence[Tensor], stack: str, size: int) -> list[Tensor]:
    """`ends`, which fail the step where the ids do not fit into the buffer: TensorFlow's op says so without the stack's name.

    Args:
        ends: of every SparseCore of a TPU, [owners + 1]: where the ids of each owner begin and end.
        stack: its name.
        size: ids that the buffer of one TPU holds.
    """
    counts = tf.concat([of_core[1:] - of_core[:-1] for of_core in ends], 0)
    starts = tf.cumsum((counts + _ALIGN - 1) // _ALIGN * _ALIGN, exclusive=True)
    taken = tf.reduce_max(starts + counts)
    message = (
        f"tables of stack {stack!r}: the ids of one replica's batch do not fit into a buffer of {size} places; raise "
        "max_ids_per_chip_per_sample of the SparseCoreEmbeddingConfig, or set its allow_id_dropping. Places needed, and ids:"
    )
    room = tf.debugging.Assert(taken <= size, [message, taken, tf.reduce_sum(counts)])
    return [_checked(tf.convert_to_tensor(of_core), room) for of_core in ends]
