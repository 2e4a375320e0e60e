"""Ids and weights to activations: the one CPU lookup that layer, exporter and tests share.

A feature's ids, whatever their form, become one flat vector; its rows are gathered by the caller, from a table or from a
stack of tables, together with other features' rows; `combine` then makes activations of the rows, and `spread` is its
transpose, from gradients of activations to gradients of rows.

Formulas, over the ids i of one example with weights w_i (1 where none are given); an example without ids gives zeros:
    sum: Σ w_i row_i      mean: Σ w_i row_i / Σ w_i      sqrtn: Σ w_i row_i / sqrt(Σ w_i²)
Source: `tf.nn.embedding_lookup_sparse`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors import ConfigError

__all__ = ["DROPPED", "LookupIds", "PaddedIds", "flatten_ids", "gather_grouped", "merged_shape", "pad_ids"]

Tensor = Any

DROPPED = -1
"""The id of an entry that contributes nothing: padding, or a negative id that validation removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupIds:
    """One feature's ids, flattened to n of them.

    Attributes:
        ids: int64 [n]; `DROPPED` entries only where `droppable`.
        shape: int64 [r], the activation's shape without its last dimension.
        static_shape: what is known of `shape` while tracing.
        segments: int64 [n], the activation that each row adds to (negative: none); None where row k is activation k.
        scale: float32 [n], the factor of each row; None for 1.
        droppable: whether `ids` may hold `DROPPED`.
    """

    ids: Tensor
    shape: Tensor
    static_shape: tuple[int | None, ...]
    segments: Tensor | None = None
    scale: Tensor | None = None
    droppable: bool = False

    def row_ids(self) -> Tensor:
        """int64 [n] to gather: dropped entries read row 0, which `combine` then ignores."""
        return tf.maximum(self.ids, 0) if self.droppable else self.ids

    def combine(self, rows: Tensor) -> Tensor:
        """Activations [*shape, dim] of gathered `rows` [n, dim]."""
        if self.scale is not None:
            rows *= self.scale[:, None]
        if self.segments is not None:
            rows = tf.math.unsorted_segment_sum(rows, self.segments, tf.reduce_prod(self.shape))
        return self._shaped(rows)

    def spread(self, gradients: Tensor) -> Tensor:
        """Row gradients [n, dim] of activation `gradients` [*shape, dim]; those of dropped entries mean nothing."""
        rows = tf.reshape(gradients, [-1, gradients.shape[-1]])
        if self.segments is not None:
            rows = tf.gather(rows, tf.maximum(self.segments, 0))
        return rows if self.scale is None else rows * self.scale[:, None]

    def _shaped(self, rows: Tensor) -> Tensor:
        dim = rows.shape[-1]
        activations = tf.reshape(rows, tf.concat([self.shape, [dim]], 0))
        activations.set_shape((*self.static_shape, dim))
        return activations


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedIds(LookupIds):
    """Ids of a [batch, hot] matrix, combined by one reduction over `hot` (no scatter): the serving form.

    Attributes:
        hot: scalar, the width of the matrix.
        sequence: keep the rows apart: the activation is [batch, hot, dim].
    """

    hot: Tensor
    sequence: bool

    def combine(self, rows: Tensor) -> Tensor:
        """Activations of `rows` [batch * hot, dim]; a dropped row is replaced, not multiplied: it may hold NaN."""
        rows = tf.where((self.ids >= 0)[:, None], rows, 0.0)
        if self.scale is not None:
            rows *= self.scale[:, None]
        if not self.sequence:
            rows = tf.reduce_sum(tf.reshape(rows, [self._examples(), tf.cast(self.hot, tf.int64), rows.shape[-1]]), 1)
        return self._shaped(rows)

    def spread(self, gradients: Tensor) -> Tensor:
        """Row gradients [batch * hot, dim] of activation `gradients`: each example's for each of its ids."""
        if self.sequence:
            return super().spread(gradients)
        dim = gradients.shape[-1]
        examples = tf.reshape(gradients, [self._examples(), 1, dim])
        rows = tf.reshape(tf.repeat(examples, self.hot, 1), [-1, dim])
        return rows if self.scale is None else rows * self.scale[:, None]

    def _examples(self) -> Tensor:
        return self.shape[0] if len(self.static_shape) == 1 else tf.reduce_prod(self.shape)


def pad_ids(ids: Tensor, weights: Tensor | None, combiner: str, max_sequence_length: int = 0) -> PaddedIds:
    """The lookup of an int64 [batch, hot] matrix padded with `DROPPED`, with float32 weights of the same shape."""
    if max_sequence_length:
        padding = tf.fill([tf.shape(ids)[0], max_sequence_length], tf.constant(DROPPED, tf.int64))
        ids = tf.concat([ids, padding], 1)[:, :max_sequence_length]
        static_shape: tuple[int | None, ...] = (ids.shape[0], max_sequence_length)
        scale = None
    else:
        static_shape = (ids.shape[0],)
        scale = _padded_scale(ids, weights, combiner)
    return PaddedIds(
        ids=tf.reshape(ids, [-1]),
        shape=tf.shape(ids, tf.int64)[: len(static_shape)],
        static_shape=static_shape,
        scale=None if scale is None else tf.reshape(scale, [-1]),
        droppable=True,
        hot=tf.shape(ids)[1],
        sequence=max_sequence_length > 0,
    )


def _padded_scale(ids: Tensor, weights: Tensor | None, combiner: str) -> Tensor | None:
    """float32 [batch, hot]: w over its example's denominator."""
    if combiner == "sum" and weights is None:
        return None
    present = tf.not_equal(ids, DROPPED)
    weights = tf.cast(present, tf.float32) if weights is None else tf.where(present, weights, 0.0)
    if combiner == "sum":
        return weights
    total = tf.reduce_sum(weights if combiner == "mean" else weights * weights, 1, keepdims=True)
    return tf.math.divide_no_nan(weights, total if combiner == "mean" else tf.sqrt(total))


def flatten_ids(
    ids: Tensor,
    weights: Tensor | None,
    *,
    path: str,
    combiner: str,
    max_sequence_length: int = 0,
    output_shape: tuple[int | None, ...] | None = None,
    input_shape: tuple[int | None, ...] | None = None,
    validate: bool = True,
    densify: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
) -> LookupIds:
    """One training feature: dense ids are looked up one by one, sparse and ragged ids are combined over their last axis.

    Args:
        ids: integer Tensor of any rank, SparseTensor of rank 2 or above, or RaggedTensor of rank 2.
        weights: None, or the same kind of tensor with the same ids' positions (sparse and ragged only).
        path: the feature, for messages.
        combiner: sum, mean or sqrtn.
        max_sequence_length: above 0: [batch, max_sequence_length, dim], cut and zero-padded, instead of combining.
        output_shape: the activation's leading shape, to check and to complete what tracing knows; ragged examples are
            laid out in it, and kept as sequences where it has room for several rows of each.
        input_shape: what is known of the ids' shape from elsewhere, to check and to complete in the same way.
        validate: drop negative ids, and check that the weights stand where the ids stand.
        densify: gives sparse or ragged ids and their weights as dense tensors [..., hot], padded with `DROPPED`, for programs
            that are compiled for one shape; None to keep them as they are.

    Raises:
        ConfigError: a combination without meaning; the message names the feature.
    """
    if densify is not None and isinstance(ids, tf.SparseTensor | tf.RaggedTensor):
        length = max_sequence_length
        if isinstance(ids, tf.RaggedTensor):
            length = length or _ragged_length(ids.shape[0], output_shape, path)
        flat: LookupIds = _flatten_padded(*densify(ids, weights), combiner, length)
    elif isinstance(ids, tf.SparseTensor):
        flat = _flatten_sparse(ids, weights, path, combiner, max_sequence_length, validate)
    elif isinstance(ids, tf.RaggedTensor):
        length = max_sequence_length or _ragged_length(ids.shape[0], output_shape, path)
        flat = _flatten_ragged(ids, weights, path, combiner, length, validate)
    else:
        flat = _flatten_dense(ids, weights, path, max_sequence_length)
    if input_shape is not None:
        combined = isinstance(ids, tf.SparseTensor | tf.RaggedTensor)
        leading = _leading(flat, input_shape) if combined else input_shape
        flat = _completed(flat, leading, f"feature {path!r}: build()'s input_shape {input_shape}")
    if output_shape is None:
        return flat
    if isinstance(ids, tf.RaggedTensor):
        flat = _laid_out(flat, output_shape)
    return _completed(flat, output_shape, f"feature {path!r}: output_shape {output_shape}")


def _flatten_padded(ids: Tensor, weights: Tensor | None, combiner: str, length: int) -> PaddedIds:
    """Dense ids [..., hot], with weights of the same shape, combined over the last axis or kept as sequences."""
    if ids.shape.rank == 2:  # not reshaped: the number of examples would be forgotten
        return pad_ids(tf.maximum(ids, DROPPED), weights, combiner, length)
    matrices = [None if dense is None else tf.reshape(dense, [-1, _last(dense)]) for dense in (ids, weights)]
    flat = pad_ids(tf.maximum(matrices[0], DROPPED), matrices[1], combiner, length)
    return dataclasses.replace(flat, shape=tf.shape(ids, tf.int64)[:-1], static_shape=tuple(ids.shape)[:-1])


def _last(dense: Tensor) -> Tensor:
    return dense.shape[-1] if dense.shape[-1] is not None else tf.shape(dense)[-1]


def _flatten_dense(ids: Tensor, weights: Tensor | None, path: str, max_sequence_length: int) -> LookupIds:
    if weights is not None:
        raise ConfigError(
            f"feature {path!r}: weights were given for dense ids, which are not combined; drop the weights"
        )
    if max_sequence_length:
        raise ConfigError(
            f"feature {path!r}: max_sequence_length needs sparse or ragged ids; dense ids keep their shape"
        )
    shape = tf.shape(ids, tf.int64)
    return LookupIds(ids=tf.reshape(ids, [-1]), shape=shape, static_shape=tuple(ids.shape))


def _flatten_sparse(
    ids: Any, weights: Any, path: str, combiner: str, max_sequence_length: int, validate: bool
) -> LookupIds:
    rank = ids.shape.rank
    if rank is None or rank < 2:
        raise ConfigError(f"feature {path!r}: sparse ids must have rank 2 or above, got {rank}")
    if weights is not None and not isinstance(weights, tf.SparseTensor):
        raise ConfigError(
            f"feature {path!r}: the ids are sparse, the weights are {type(weights).__name__}; make both sparse"
        )
    if max_sequence_length and rank != 2:
        raise ConfigError(f"feature {path!r}: max_sequence_length needs sparse ids of rank 2, got rank {rank}")
    shape = tf.cast(ids.dense_shape[:-1], tf.int64)
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    segments = tf.reduce_sum(ids.indices[:, :-1] * strides, 1)
    if weights is not None:
        weights = _same_positions(weights.values, weights.indices, ids.indices, path, validate)
    positions = ids.indices[:, -1]
    entries = _Entries(ids.values, segments, positions, weights, shape, tuple(ids.shape)[:-1])
    return _segmented(entries, path, combiner, max_sequence_length, validate)


def _flatten_ragged(
    ids: Any, weights: Any, path: str, combiner: str, max_sequence_length: int, validate: bool
) -> LookupIds:
    if ids.shape.rank != 2 or ids.ragged_rank != 1:
        raise ConfigError(f"feature {path!r}: ragged ids must have rank 2, got rank {ids.shape.rank}")
    if weights is not None and not isinstance(weights, tf.RaggedTensor):
        raise ConfigError(
            f"feature {path!r}: the ids are ragged, the weights are {type(weights).__name__}; make both ragged"
        )
    segments = tf.cast(ids.value_rowids(), tf.int64)
    starts = tf.cast(tf.gather(ids.row_starts(), segments), tf.int64)
    positions = tf.range(tf.size(segments, tf.int64)) - starts
    if weights is not None:
        weights = _same_positions(weights.values, weights.row_splits, ids.row_splits, path, validate)
    shape = tf.reshape(tf.cast(ids.nrows(), tf.int64), [1])
    entries = _Entries(ids.values, segments, positions, weights, shape, (ids.shape[0],))
    return _segmented(entries, path, combiner, max_sequence_length, validate)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Sparse or ragged ids: n values, the example of each, its position there, its weight; the examples' shape."""

    ids: Tensor
    segments: Tensor
    positions: Tensor
    weights: Tensor | None
    shape: Tensor
    static_shape: tuple[int | None, ...]


def _same_positions(weights: Tensor, where: Tensor, ids_where: Tensor, path: str, validate: bool) -> Tensor:
    """float32 `weights`, checked to stand at the same positions as the ids."""
    if not validate or where is ids_where:
        return tf.cast(weights, tf.float32)
    message = f"feature {path!r}: the weights do not stand where the ids stand"
    check = tf.debugging.assert_equal(tf.cast(where, tf.int64), tf.cast(ids_where, tf.int64), message)
    with tf.control_dependencies([check] if check is not None else []):
        return tf.cast(weights, tf.float32)


def _segmented(entries: _Entries, path: str, combiner: str, max_sequence_length: int, validate: bool) -> LookupIds:
    ids, segments = entries.ids, entries.segments
    if max_sequence_length:
        if entries.weights is not None:
            raise ConfigError(
                f"feature {path!r}: weights have no meaning with max_sequence_length or an output_shape of sequences; drop one"
            )
        keep = entries.positions < max_sequence_length
        segments = tf.where(keep, segments * max_sequence_length + entries.positions, -1)
    else:
        keep = tf.ones_like(ids, tf.bool)
    if validate:
        keep &= ids >= 0
        segments = tf.where(keep, segments, -1)
    droppable = validate or max_sequence_length > 0
    extra = (max_sequence_length,) if max_sequence_length else ()
    return LookupIds(
        ids=tf.where(keep, ids, DROPPED) if droppable else ids,
        shape=tf.concat([entries.shape, tf.constant(extra, tf.int64)], 0),
        static_shape=(*entries.static_shape, *extra),
        segments=segments,
        scale=None if max_sequence_length else _segment_scale(entries, segments, combiner),
        droppable=droppable,
    )


def _segment_scale(entries: _Entries, segments: Tensor, combiner: str) -> Tensor | None:
    """float32 [n]: w over its example's denominator."""
    if combiner == "sum":
        return entries.weights
    weights = entries.weights if entries.weights is not None else tf.ones_like(entries.ids, tf.float32)
    squares = weights if combiner == "mean" else weights * weights
    total = tf.math.unsorted_segment_sum(squares, segments, tf.reduce_prod(entries.shape))
    denominator = total if combiner == "mean" else tf.sqrt(total)
    return tf.math.divide_no_nan(weights, tf.gather(denominator, tf.maximum(segments, 0)))


def _ragged_length(batch: int | None, output_shape: tuple[int | None, ...] | None, path: str) -> int:
    """The rows of each ragged example that `output_shape` has room for; 0 where it asks for one combined row.

    Source: `serving_embedding_lookup`, which reads an output_shape of as many rows as there are examples as combined rows, one
    of a multiple as sequences.
    """
    if output_shape is None:
        return 0
    size = _product(output_shape)
    if batch is not None and size is not None:
        return size // batch if size > batch > 0 and size % batch == 0 else 0
    if len(output_shape) > 1:
        raise ConfigError(
            f"feature {path!r}: output_shape {output_shape} of {batch or 'an unknown number of'} ragged examples may mean "
            "combined rows or sequences; make both known (tf.ensure_shape), or set max_sequence_length instead"
        )
    return 0


def _product(shape: tuple[int | None, ...]) -> int | None:
    """The size of a shape; None where a dimension is unknown."""
    known = [size for size in shape if size is not None]
    return math.prod(known) if len(known) == len(shape) else None


def _laid_out(flat: LookupIds, output_shape: tuple[int | None, ...]) -> LookupIds:
    """Ragged activations in `output_shape` where it has as many; as they are where they do not fit."""
    if _product(flat.static_shape) is None or _product(flat.static_shape) != _product(output_shape):
        return flat
    return dataclasses.replace(flat, shape=tf.constant(output_shape, tf.int64), static_shape=output_shape)


def _leading(flat: LookupIds, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The activation's leading shape of combined ids of `input_shape`: without the last axis, or with its length."""
    return (*input_shape[:-1], *flat.static_shape[max(len(input_shape) - 1, 0) :])


def _completed(flat: LookupIds, wanted: tuple[int | None, ...], what: str) -> LookupIds:
    """`flat` with what `wanted` knows of its shape, checked now or, where tracing does not know, when it runs."""
    known = flat.static_shape
    merged = merged_shape(known, wanted, what)
    new = [(index, size) for index, size in enumerate(wanted) if size is not None and known[index] is None]
    checks = [
        tf.debugging.assert_equal(flat.shape[index], tf.constant(size, tf.int64), f"{what}: the ids give another shape")
        for index, size in new
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        shape = tf.identity(flat.shape) if new else flat.shape
    return dataclasses.replace(flat, shape=shape, static_shape=merged)


def merged_shape(known: tuple[int | None, ...], wanted: tuple[int | None, ...], what: str) -> tuple[int | None, ...]:
    """What two shapes of one activation know together, without its last dimension.

    Raises:
        ConfigError: they contradict each other; the message starts with `what`.
    """
    if not tf.TensorShape(known).is_compatible_with(wanted):
        raise ConfigError(
            f"{what}: the ids give activations of {known}; a combined feature has its ids' shape without the last "
            "dimension, a dense one its ids' shape; make them equal"
        )
    return tuple(tf.TensorShape(known).merge_with(wanted))


def gather_grouped(
    features: Sequence[LookupIds], groups: Sequence[str], gather: Callable[[str, Tensor], Tensor]
) -> list[Tensor]:
    """Activations of `features`, with one `gather(group, ids [n]) -> rows [n, dim]` per group instead of per feature."""
    activations: list[Tensor] = [None] * len(features)
    for group in dict.fromkeys(groups):
        members = [index for index, name in enumerate(groups) if name == group]
        parts = [features[index].row_ids() for index in members]
        rows = gather(group, parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        split = [rows] if len(parts) == 1 else tf.split(rows, [tf.size(part) for part in parts])
        for index, part in zip(members, split, strict=True):
            activations[index] = features[index].combine(part)
    return activations
