"""The CPU lookup, from ids and weights to activations. Layer, exporter and tests share it.

A feature's ids, in any form, become one flat vector. The caller gathers the rows from a table or from a stack of
tables, together with other features' rows. `combine` turns the rows into activations. `spread` is its transpose, from
gradients of activations to gradients of rows.

Formulas, over the ids i of one example with weights w_i (1 if none are given). An example without ids gives zeros:
    sum: Σ w_i row_i      mean: Σ w_i row_i / Σ w_i      sqrtn: Σ w_i row_i / sqrt(Σ w_i²)
Source: `tf.nn.embedding_lookup_sparse`.

An id outside its table follows its feature's out_of_vocabulary. "zeros": row_i is zeros, and w_i counts in the
denominator. A row number: row_i is that row. "error": the lookup fails before any row is read, and names the id
(`outside_shift`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tpuembed.errors import ConfigError

__all__ = [
    "DROPPED",
    "NOT_FOR_XLA",
    "NOWHERE",
    "OUTSIDE",
    "LookupIds",
    "PaddedIds",
    "Span",
    "flatten_ids",
    "gather_grouped",
    "merged_shape",
    "not_inlined",
    "outside_shift",
    "outside_texts",
    "pad_ids",
]

Tensor = Any

DROPPED = -1
"""The id of an entry that contributes nothing: padding, or a negative id that validation removed."""

NOWHERE: Final = 1 << 62
"""A row past the end of every table."""

OUTSIDE: Final = "tpuembed_id_outside"
"""The name of the operation that fails for an id outside its table. A server recognizes the message by it."""

NOT_FOR_XLA: Final = "traced_before_jit_compile__decorate_the_inner_function_with_jit_compile_too"
"""The name of an operation without an XLA kernel. It makes XLA fail on a function that was traced before, which is not
traced again."""

_NEGATIVE_ONE: Final = -(2**63)
"""Replaces an id of -1 that is looked up, if there are also DROPPED entries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupIds:
    """One feature's ids, flattened to a vector of n.

    Attributes:
        ids: int64 [n], with `DROPPED` entries only if `droppable`.
        shape: int64 [r], the activation's shape without its last dimension.
        static_shape: the part of `shape` that is known while tracing.
        segments: int64 [n], the activation that each row adds to (negative: none). None if row k is activation k.
        scale: float32 [n], the factor of each row. None for 1.
        droppable: True if `ids` may hold `DROPPED`.
        feature: the feature's name, for messages.
        policy: the policy for an id outside the table: "error", "zeros", or the row to take instead.
        row_shape: int64 [r], the shape of the activations by example. None if it equals `shape`.
    """

    ids: Tensor
    shape: Tensor
    static_shape: tuple[int | None, ...]
    segments: Tensor | None = None
    scale: Tensor | None = None
    droppable: bool = False
    feature: str = ""
    policy: str | int = "error"
    row_shape: Tensor | None = None

    def within(self, start: int, stop: int) -> "LookupIds":
        """Return these ids after applying `policy` to those outside [start, stop). "error" keeps them for
        `outside_shift` to find."""
        if self.policy == "error":
            return self
        outside = (self.ids < start) | (self.ids >= stop)
        if self.droppable:
            outside &= tf.not_equal(self.ids, DROPPED)
        if self.policy != "zeros":
            return dataclasses.replace(self, ids=tf.where(outside, tf.constant(self.policy, tf.int64), self.ids))
        return dataclasses.replace(
            self,
            ids=tf.where(outside, tf.constant(DROPPED, tf.int64), self.ids),
            segments=None
            if self.segments is None
            else tf.where(outside, tf.cast(-1, self.segments.dtype), self.segments),
            droppable=True,
        )

    def row_ids(self) -> Tensor:
        """Return the int64 [n] to gather. Dropped entries read row 0, which `combine` ignores."""
        return tf.maximum(self.ids, 0) if self.droppable else self.ids

    def combine(self, rows: Tensor) -> Tensor:
        """Return the activations [*shape, dim] of gathered `rows` [n, dim]."""
        if self.segments is None and self.droppable:
            rows = tf.where((self.ids >= 0)[:, None], rows, 0.0)
        if self.scale is not None:
            rows *= self.scale[:, None]
        if self.segments is not None:
            rows = tf.math.unsorted_segment_sum(rows, self.segments, tf.reduce_prod(self.shape))
        return self._shaped(rows)

    def spread(self, gradients: Tensor) -> Tensor:
        """Return the row gradients [n, dim] of activation `gradients` [*shape, dim]. Those of dropped entries have no meaning."""
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
    """Ids of a [batch, hot] matrix, combined by one reduction over `hot` (no scatter). Serving uses this form.

    Attributes:
        hot: scalar, the width of the matrix.
        sequence: True keeps the rows separate. The activation is [batch, hot, dim].
    """

    hot: Tensor
    sequence: bool

    def combine(self, rows: Tensor) -> Tensor:
        """Return the activations of `rows` [batch * hot, dim]. A dropped row is replaced, not multiplied, because it
        may hold NaN."""
        rows = tf.where((self.ids >= 0)[:, None], rows, 0.0)
        if self.scale is not None:
            rows *= self.scale[:, None]
        if not self.sequence:
            rows = tf.reduce_sum(tf.reshape(rows, [self._examples(), tf.cast(self.hot, tf.int64), rows.shape[-1]]), 1)
        return self._shaped(rows)

    def spread(self, gradients: Tensor) -> Tensor:
        """Return the row gradients [batch * hot, dim] of activation `gradients`: each example's gradient for each of its ids."""
        if self.sequence:
            return super().spread(gradients)
        dim = gradients.shape[-1]
        examples = tf.reshape(gradients, [self._examples(), 1, dim])
        rows = tf.reshape(tf.repeat(examples, self.hot, 1), [-1, dim])
        return rows if self.scale is None else rows * self.scale[:, None]

    def _examples(self) -> Tensor:
        return self.shape[0] if len(self.static_shape) == 1 else tf.reduce_prod(self.shape)


def pad_ids(ids: Tensor, weights: Tensor | None, combiner: str, max_sequence_length: int = 0) -> PaddedIds:
    """Return the lookup of an int64 [batch, hot] matrix padded with `DROPPED`, with float32 weights of the same shape."""
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
    """Return float32 [batch, hot]: w over its example's denominator."""
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
    label: str = "",
    combiner: str,
    max_sequence_length: int = 0,
    output_shape: tuple[int | None, ...] | None = None,
    input_shape: tuple[int | None, ...] | None = None,
    validate: bool = True,
    policy: str | int = "error",
    densify: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
) -> LookupIds:
    """Return the lookup of one training feature. Dense ids are looked up one by one. Sparse and ragged ids are combined
    over their last axis.

    Args:
        ids: integer Tensor of any rank, SparseTensor of rank 2 or above, or RaggedTensor of rank 2.
        weights: None, or the same kind of tensor with the same ids' positions (sparse and ragged only).
        path: the feature, for messages.
        label: the feature's name in the message of an id outside the table. Empty for `path`.
        combiner: sum, mean or sqrtn.
        max_sequence_length: above 0, the rows are not combined but returned as [batch, max_sequence_length, dim], cut
            and zero-padded.
        output_shape: the activation's leading shape, to check and to complete the shape known while tracing. Ragged
            activations are reshaped to it. They are kept as sequences if it has space for several rows of each example.
        input_shape: the known part of the ids' shape, to check and to complete in the same way.
        validate: drop negative ids, and check that weights and ids have the same positions. With another `policy` than
            "error", ids below -1 count as outside the table and are kept.
        policy: the policy of `within` for ids outside the table.
        densify: returns sparse or ragged ids and their weights as dense tensors [..., hot], padded with `DROPPED`, for
            programs that are compiled for one shape. None keeps them as they are.

    Raises:
        ConfigError: the arguments contradict each other. The message names the feature.
    """
    if densify is not None and isinstance(ids, tf.SparseTensor | tf.RaggedTensor):
        length = max_sequence_length
        if isinstance(ids, tf.RaggedTensor):
            length = length or _ragged_length(ids.shape[0], output_shape, path)
        flat: LookupIds = _flatten_padded(*densify(ids, weights), combiner, length, policy)
    elif isinstance(ids, tf.SparseTensor):
        flat = _flatten_sparse(ids, weights, path, combiner, max_sequence_length, _KeepRule(validate, policy))
    elif isinstance(ids, tf.RaggedTensor):
        length = max_sequence_length or _ragged_length(ids.shape[0], output_shape, path)
        flat = _flatten_ragged(ids, weights, path, combiner, length, _KeepRule(validate, policy))
    else:
        flat = _flatten_dense(ids, weights, path, max_sequence_length)
    flat = dataclasses.replace(flat, feature=label or path, policy=policy)
    if input_shape is not None:
        combined = isinstance(ids, tf.SparseTensor | tf.RaggedTensor)
        leading = _leading(flat, input_shape) if combined else input_shape
        flat = _completed(flat, leading, f"feature {path!r}: build()'s input_shape {input_shape}")
    if output_shape is None:
        return flat
    if isinstance(ids, tf.RaggedTensor):
        flat = _laid_out(flat, output_shape)
    return _completed(flat, output_shape, f"feature {path!r}: output_shape {output_shape}")


def _flatten_padded(ids: Tensor, weights: Tensor | None, combiner: str, length: int, policy: str | int) -> PaddedIds:
    """Return the lookup of dense ids [..., hot] with weights of the same shape, combined over the last axis or as sequences."""
    if policy == "error":
        ids = tf.maximum(ids, DROPPED)
    if ids.shape.rank == 2:  # not reshaped, which would lose the number of examples
        return pad_ids(ids, weights, combiner, length)
    matrices = [None if dense is None else tf.reshape(dense, [-1, _last(dense)]) for dense in (ids, weights)]
    flat = pad_ids(matrices[0], matrices[1], combiner, length)
    return dataclasses.replace(flat, shape=tf.shape(ids, tf.int64)[:-1], static_shape=tuple(ids.shape)[:-1])


def _last(dense: Tensor) -> Tensor:
    return dense.shape[-1] if dense.shape[-1] is not None else tf.shape(dense)[-1]


def _flatten_dense(ids: Tensor, weights: Tensor | None, path: str, max_sequence_length: int) -> LookupIds:
    if weights is not None:
        raise ConfigError(
            f"feature {path!r}: weights were given for dense ids, which are not combined. Drop the weights."
        )
    if max_sequence_length:
        raise ConfigError(
            f"feature {path!r}: max_sequence_length needs sparse or ragged ids. Dense ids keep their shape. Drop it."
        )
    shape = tf.shape(ids, tf.int64)
    return LookupIds(ids=tf.reshape(ids, [-1]), shape=shape, static_shape=tuple(ids.shape))


class _KeepRule(NamedTuple):
    """The rule for which sparse and ragged ids are looked up. See `flatten_ids`."""

    validate: bool
    policy: str | int

    def mask(self, ids: Tensor) -> Tensor | None:
        """Return a bool tensor of the shape of `ids`, True for those to keep. Returns None to keep all."""
        if not self.validate:
            return None
        return ids >= 0 if self.policy == "error" else tf.not_equal(ids, DROPPED)


def _flatten_sparse(
    ids: Any, weights: Any, path: str, combiner: str, max_sequence_length: int, kept: _KeepRule
) -> LookupIds:
    rank = ids.shape.rank
    if rank is None or rank < 2:
        raise ConfigError(f"feature {path!r}: sparse ids must have rank 2 or above, got {rank}.")
    if weights is not None and not isinstance(weights, tf.SparseTensor):
        raise ConfigError(
            f"feature {path!r}: the ids are sparse, the weights are {type(weights).__name__}. Make both sparse."
        )
    if max_sequence_length and rank != 2:
        raise ConfigError(f"feature {path!r}: max_sequence_length needs sparse ids of rank 2, got rank {rank}.")
    shape = tf.cast(ids.dense_shape[:-1], tf.int64)
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    segments = tf.reduce_sum(ids.indices[:, :-1] * strides, 1)
    if weights is not None:
        weights = _same_positions(weights.values, weights.indices, ids.indices, path, kept.validate)
    positions = ids.indices[:, -1]
    entries = _Entries(ids.values, segments, positions, weights, shape, tuple(ids.shape)[:-1])
    return _segmented(entries, path, combiner, max_sequence_length, kept)


def _flatten_ragged(
    ids: Any, weights: Any, path: str, combiner: str, max_sequence_length: int, kept: _KeepRule
) -> LookupIds:
    if ids.shape.rank != 2 or ids.ragged_rank != 1:
        raise ConfigError(f"feature {path!r}: ragged ids must have rank 2, got rank {ids.shape.rank}.")
    if weights is not None and not isinstance(weights, tf.RaggedTensor):
        raise ConfigError(
            f"feature {path!r}: the ids are ragged, the weights are {type(weights).__name__}. Make both ragged."
        )
    segments = tf.cast(ids.value_rowids(), tf.int64)
    starts = tf.cast(tf.gather(ids.row_starts(), segments), tf.int64)
    positions = tf.range(tf.size(segments, tf.int64)) - starts
    if weights is not None:
        weights = _same_positions(weights.values, weights.row_splits, ids.row_splits, path, kept.validate)
    shape = tf.reshape(tf.cast(ids.nrows(), tf.int64), [1])
    entries = _Entries(ids.values, segments, positions, weights, shape, (ids.shape[0],))
    return _segmented(entries, path, combiner, max_sequence_length, kept)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Sparse or ragged ids: n values, the example of each, its position there, its weight, and the examples' shape."""

    ids: Tensor
    segments: Tensor
    positions: Tensor
    weights: Tensor | None
    shape: Tensor
    static_shape: tuple[int | None, ...]


def _same_positions(weights: Tensor, where: Tensor, ids_where: Tensor, path: str, validate: bool) -> Tensor:
    """Return float32 `weights`, after a check that they have the same positions as the ids."""
    if not validate or where is ids_where:
        return tf.cast(weights, tf.float32)
    message = f"feature {path!r}: the weights and the ids have different positions"
    check = tf.debugging.assert_equal(tf.cast(where, tf.int64), tf.cast(ids_where, tf.int64), message)
    with tf.control_dependencies([check] if check is not None else []):
        return tf.cast(weights, tf.float32)


def _segmented(entries: _Entries, path: str, combiner: str, max_sequence_length: int, kept: _KeepRule) -> LookupIds:
    ids, segments = entries.ids, entries.segments
    droppable = kept.validate or max_sequence_length > 0
    if droppable and not kept.validate:
        ids = tf.where(tf.equal(ids, DROPPED), tf.constant(_NEGATIVE_ONE, tf.int64), ids)
    if max_sequence_length:
        if entries.weights is not None:
            raise ConfigError(
                f"feature {path!r}: weights have no meaning with max_sequence_length or an output_shape of sequences. Drop one."
            )
        keep = entries.positions < max_sequence_length
        segments = tf.where(keep, segments * max_sequence_length + entries.positions, -1)
    else:
        keep = tf.ones_like(ids, tf.bool)
    mask = kept.mask(ids)
    if mask is not None:
        keep &= mask
        segments = tf.where(keep, segments, -1)
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
    """Return float32 [n]: w over its example's denominator."""
    if combiner == "sum":
        return entries.weights
    weights = entries.weights if entries.weights is not None else tf.ones_like(entries.ids, tf.float32)
    squares = weights if combiner == "mean" else weights * weights
    total = tf.math.unsorted_segment_sum(squares, segments, tf.reduce_prod(entries.shape))
    denominator = total if combiner == "mean" else tf.sqrt(total)
    return tf.math.divide_no_nan(weights, tf.gather(denominator, tf.maximum(segments, 0)))


def _ragged_length(batch: int | None, output_shape: tuple[int | None, ...] | None, path: str) -> int:
    """Return how many rows of each ragged example fit into `output_shape`. Returns 0 if it needs one combined row.

    Source: `serving_embedding_lookup`. It reads an output_shape with as many rows as examples as combined rows, and one
    with a multiple of them as sequences.
    """
    if output_shape is None:
        return 0
    size = _product(output_shape)
    if batch is not None and size is not None:
        return size // batch if size > batch > 0 and size % batch == 0 else 0
    if len(output_shape) > 1:
        raise ConfigError(
            f"feature {path!r}: output_shape {output_shape} of {batch or 'an unknown number of'} ragged examples may mean "
            "combined rows or sequences. Make both shapes known (tf.ensure_shape), or set max_sequence_length instead."
        )
    return 0


def _product(shape: tuple[int | None, ...]) -> int | None:
    """Return the size of a shape. Returns None if a dimension is unknown."""
    known = [size for size in shape if size is not None]
    return math.prod(known) if len(known) == len(shape) else None


def _laid_out(flat: LookupIds, output_shape: tuple[int | None, ...]) -> LookupIds:
    """Return ragged activations reshaped to `output_shape`, or unchanged if the sizes differ."""
    if _product(flat.static_shape) is None or _product(flat.static_shape) != _product(output_shape):
        return flat
    return dataclasses.replace(
        flat, shape=tf.constant(output_shape, tf.int64), static_shape=output_shape, row_shape=flat.shape
    )


def _leading(flat: LookupIds, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the leading shape of the activations of combined ids of `input_shape`: without the last axis, or with its length."""
    return (*input_shape[:-1], *flat.static_shape[max(len(input_shape) - 1, 0) :])


def _completed(flat: LookupIds, wanted: tuple[int | None, ...], what: str) -> LookupIds:
    """Return `flat` with its shape completed by `wanted`. The sizes are checked now if known, else when the graph runs."""
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
    """Return the known sizes of two shapes of one activation, merged, without its last dimension.

    Raises:
        ConfigError: they contradict each other. The message starts with `what`.
    """
    if not tf.TensorShape(known).is_compatible_with(wanted):
        raise ConfigError(
            f"{what}: the ids give activations of {known}. A combined feature has its ids' shape without the last "
            "dimension, a dense one its ids' shape. Make them equal."
        )
    return tuple(tf.TensorShape(known).merge_with(wanted))


def gather_grouped(
    features: Sequence[LookupIds], groups: Sequence[str], gather: Callable[[str, Tensor], Tensor]
) -> list[Tensor]:
    """Return the activations of `features`, with one `gather(group, ids [n]) -> rows [n, dim]` per group instead of per feature."""
    activations: list[Tensor] = [None] * len(features)
    for group in dict.fromkeys(groups):
        members = [index for index, name in enumerate(groups) if name == group]
        parts = [features[index].row_ids() for index in members]
        rows = gather(group, parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        split = [rows] if len(parts) == 1 else tf.split(rows, [tf.size(part) for part in parts])
        for index, part in zip(members, split, strict=True):
            activations[index] = features[index].combine(part)
    return activations


# ---- ids outside their tables


class Span(NamedTuple):
    """The valid ids of a table: [start, stop)."""

    table: str
    start: int
    stop: int


_LONGEST: Final = 199
_OF_ROW: Final = " of row "
_DIGITS: Final = len(str(-(2**63))) + len(_OF_ROW) + len(str(2**31))


def outside_texts(feature: str, span: Span) -> tuple[str, str]:
    """Return the message for an id outside `span`, as the texts before the id and after the row: at most 199 characters in all."""
    remedy = "; correct the id or set out_of_vocabulary"
    if len(feature) + len(span.table) > _room_for_names(span, remedy):
        remedy = ""
    room = _room_for_names(span, remedy)
    of_feature = min(len(feature), max(room - len(span.table), room // 2))
    table = _shortened(span.table, min(len(span.table), room - of_feature))
    return _texts(_shortened(feature, of_feature), table, span, remedy)


def _texts(feature: str, table: str, span: Span, remedy: str) -> tuple[str, str]:
    rows = f"which has {span.stop} rows" if not span.start else f"which has rows [{span.start}, {span.stop})"
    return f"feature {feature}: id ", f" is not in table {table}, {rows}{remedy}"


def _room_for_names(span: Span, remedy: str) -> int:
    return _LONGEST - _DIGITS - sum(map(len, _texts("", "", span, remedy)))


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    head = (room - 3) // 2
    return f"{name[:head]}...{name[len(name) - (room - 3 - head) :]}"


def not_inlined(function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    """Return `function` as one node of the graphs that call it, for a branch that no request is expected to take."""
    return tf.function(
        function, input_signature=specs, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()


def outside_shift(features: Sequence[LookupIds], spans: Sequence[Span]) -> Tensor:
    """Return int64 0, which depends on the ids of all `features` being in their spans. Fails for the first id that is
    not.

    If a runtime strips the assertion, the result is NOWHERE. Added to ids, it makes their gather fail.

    Raises:
        InvalidArgumentError: outside of graphs, with the message alone.
    """
    if tf.executing_eagerly():
        _raise_outside(features, spans)
        return tf.constant(0, tf.int64)
    lowest = tf.stack([_lowest(feature, span) for feature, span in zip(features, spans, strict=True)])
    highest = tf.stack([tf.reduce_max(feature.ids) for feature in features])
    starts, stops = np.array([_least(*pair) for pair in zip(features, spans, strict=True)]), [s.stop for s in spans]
    inside = tf.reduce_all((lowest >= starts) & (highest < np.array(stops)))
    arguments = [argument for feature in features for argument in _message_inputs(feature)]

    def succeed(*arguments: Tensor) -> Tensor:  # noqa: ARG001 - the arguments of the other branch
        return tf.constant(0, tf.int64)

    def fail(*arguments: Tensor) -> Tensor:
        message = _outside_message(features, spans, arguments)
        # The raw op, because `tf.debugging.Assert` wraps it in a branch.
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[message], name=OUTSIDE)]):
            return tf.constant(NOWHERE, tf.int64)

    specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments]
    # The raw op, because `tf.cond` costs a step one operation per argument of the branch that is not taken.
    found = tf.raw_ops.If(
        cond=inside,
        input=arguments,
        Tout=[tf.int64],
        then_branch=not_inlined(succeed, *specs),
        else_branch=not_inlined(fail, *specs),
    )
    found[0].set_shape([])
    return found[0]


def _raise_outside(features: Sequence[LookupIds], spans: Sequence[Span]) -> None:
    for feature, span in zip(features, spans, strict=True):
        ids = feature.ids.numpy()
        outside = (ids < span.start) | (ids >= span.stop)
        if outside.any() and (outside & (ids != DROPPED if feature.droppable else True)).any():
            error = tf.errors.InvalidArgumentError(
                None, None, _outside_message([feature], [span], _message_inputs(feature)).numpy().decode()
            )
            error._keras_call_info_injected = True  # Keras adds the arguments of the call to other errors, line by line
            raise error


def _least(feature: LookupIds, span: Span) -> int:
    return span.start or (DROPPED if feature.droppable else 0)


def _lowest(feature: LookupIds, span: Span) -> Tensor:
    ids = feature.ids
    if feature.droppable and span.start:
        ids = tf.where(tf.equal(ids, DROPPED), tf.constant(span.start, tf.int64), ids)
    return tf.reduce_min(ids)


def _message_inputs(feature: LookupIds) -> list[Tensor]:
    """Return the inputs of the message: ids, the activation of each id if it is not its own, and the activations' shape."""
    shape = feature.shape if feature.row_shape is None else feature.row_shape
    return [feature.ids, *([] if feature.segments is None else [tf.cast(feature.segments, tf.int64)]), shape]


def _outside_message(features: Sequence[LookupIds], spans: Sequence[Span], arguments: Sequence[Tensor]) -> Tensor:
    """Return the message for the first id outside its span, a string tensor. `arguments` are those of all features.

    It uses few operations, because TensorFlow optimizes them all at a model's first request.
    """
    given = iter(arguments)
    ids, places, per_row = [], [], []
    for feature in features:
        one = next(given)
        place = tf.range(tf.size(one, tf.int64)) if feature.segments is None else next(given)
        shape = next(given)
        entries = tf.size(one, tf.int64) if feature.segments is None else tf.reduce_prod(shape)
        ids.append(one)
        places.append(place)
        per_row.append(tf.maximum(entries // tf.maximum(tf.reduce_prod(shape[:1]), 1), 1))
    sizes = tf.stack([tf.size(one, tf.int64) for one in ids])
    feature_of = tf.repeat(tf.range(len(features)), sizes)
    joined = tf.concat(ids, 0)
    starts, stops = (np.array(bounds, np.int64) for bounds in zip(*((s.start, s.stop) for s in spans), strict=True))
    outside = (joined < tf.gather(starts, feature_of)) | (joined >= tf.gather(stops, feature_of))
    droppable = np.array([feature.droppable for feature in features])
    outside &= ~(tf.gather(droppable, feature_of) & tf.equal(joined, DROPPED))
    first = tf.where(outside)[0, 0]
    which, found = feature_of[first], joined[first]
    is_escaped = tf.equal(found, _NEGATIVE_ONE) & tf.gather(droppable, which)
    found = tf.where(is_escaped, tf.constant(-1, tf.int64), found)
    row = tf.concat(places, 0)[first] // tf.stack(per_row)[which]
    before, after = zip(*map(outside_texts, (feature.feature for feature in features), spans), strict=True)
    parts = [
        tf.gather(before, which, name=NOT_FOR_XLA),
        tf.strings.as_string(found),
        _OF_ROW,
        tf.strings.as_string(row),
    ]
    return tf.strings.join([*parts, tf.gather(after, which)])
