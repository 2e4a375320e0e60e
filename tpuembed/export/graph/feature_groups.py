"""Features that a graph looks up together: of one stack, one kind and one combiner.

A request costs one check, one gather and one sum per group instead of per feature: with few ids, that is most of its
time. Many rows are gathered feature by feature. One gather for all of them uses memory that is returned to the system and
requested again with every request, and it jumps from table to table. (Measured: see `tpuembed.lookup.pooling`.)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.export.graph.signature import ServedFeature
from tpuembed.export.graph.stacked_tables import StackedTables, span_of
from tpuembed.lookup import check_range, pool
from tpuembed.lookup.branches import choose
from tpuembed.lookup.ids import cut
from tpuembed.lookup.pooling import FullMatrix, SortedSegments
from tpuembed.lookup.ranges import DROPPED, IdRanges, RangedIds, Spread

__all__ = ["FeatureGroup", "group_features", "kind_of"]

Tensor = Any
KINDS = ("id", "list", "sequence")

_FEW_ROWS_BYTES: Final = 4 << 20
"""Up to this many bytes of float32 rows, features are gathered together."""


def kind_of(feature: ServedFeature) -> str:
    """One row per example, a row of a list of ids, or a row per id."""
    if feature.spec.input == "id":
        return "id"
    return "sequence" if feature.spec.max_sequence_length else "list"


def group_features(features: Sequence[ServedFeature], tables: StackedTables) -> list["FeatureGroup"]:
    """`features` in groups: ids, then lists, then sequences, each of these alone.

    Raises:
        ConfigError: an out_of_vocabulary row is not among the exported rows of its table.
    """

    def key(feature: ServedFeature) -> tuple[Any, ...]:
        spec, kind = feature.spec, kind_of(feature)
        alone = feature.name if kind == "sequence" else ""
        policy = feature.policy if isinstance(feature.policy, str) else "row"
        combiner = feature.combiner if kind == "list" else ""
        return KINDS.index(kind), tables.place(feature.table)[0], combiner, spec.weighted, policy, alone

    groups = []
    for _, members in groupby(sorted(features, key=key), key):
        together = tuple(members)
        places = [tables.place(feature.table)[1] for feature in together]
        group = FeatureGroup(
            features=together,
            ranges=IdRanges(
                features=[feature.name for feature in together],
                spans=[span_of(place) for place in places],
                policies=[feature.policy for feature in together],
            ),
            offsets=np.array([place.row_offset for place in places], np.int64),
            table_rows=partial(tables.gather, tables.place(together[0].table)[0]),
        )
        groups.append(group)
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """F features of one stack.

    Attributes:
        features: the features.
        ranges: the ids that they accept.
        offsets: int64 [F], what is added to a feature's ids to get rows of the stack.
        table_rows: returns float32 [*shape, dim] for int64 rows of the stack.
    """

    features: tuple[ServedFeature, ...]
    ranges: IdRanges
    offsets: npt.NDArray[np.int64]
    table_rows: Callable[[Tensor], Tensor]

    @cached_property
    def kind(self) -> str:
        """Return the kind that all features of the group have."""
        return kind_of(self.features[0])

    @cached_property
    def dim(self) -> int:
        """Width of the tables."""
        return self.features[0].dim

    @cached_property
    def is_weighted(self) -> bool:
        """Returns True if every feature has weights, and False if none has."""
        return self.features[0].spec.weighted

    def named(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Feature -> float32 [batch, dim] or [batch, max_sequence_length, dim], of the signature's `inputs`."""
        ids = [inputs[feature.name] for feature in self.features]
        if self.kind == "id":
            found = tf.unstack(self._rows(tf.stack(ids), of_rows=True), len(ids))
        elif self.kind == "sequence":
            found = [self._sequence(ids[0])]
        else:
            weights = [inputs[feature.weights_name] for feature in self.features] if self.is_weighted else None
            found = self._lists(ids, weights)
        return {feature.name: rows for feature, rows in zip(self.features, found, strict=True)}

    def packed(self, ids: Tensor) -> Tensor:
        """float32 [batch, width] of int64 `ids` [batch, F], or [batch, F, hot] where they are lists: features side by side."""
        if self.kind == "id":
            found = self._rows(ids)
        else:
            found = self._sequence(ids[:, 0]) if self.kind == "sequence" else self._packed_lists(ids)
        width = sum(feature.dim * (feature.spec.max_sequence_length or 1) for feature in self.features)
        return tf.reshape(found, [-1, width])

    # ---- rows of the stack

    def _stack_rows(self, ids: Tensor, spread: Spread, *, padded: bool, batch_axis: int = 0) -> Tensor:
        """Return the rows of the stack for int64 `ids`, DROPPED for rows of zeros. An id outside of its table fails, unless a
        policy handles it.

        The row of a DROPPED id has no meaning.

        Args:
            ids: ids of several features, in the layout that `spread` broadcasts over.
            spread: see `RangedIds`.
            padded: whether an id may be DROPPED.
            batch_axis: the axis of `ids` that counts examples.
        """

        def row_of() -> Tensor:
            return tf.where(tf.ones_like(ids, tf.bool))[:, batch_axis]

        ranged = RangedIds(ids=ids, ranges=self.ranges, spread=spread, droppable=padded, row_of=row_of)
        kept, zeroed = ranged.within()
        rows = kept + (spread(self.offsets) + check_range([ranged]))
        return rows if zeroed is None else tf.where(zeroed, tf.constant(DROPPED, tf.int64), rows)

    # ---- one id per example

    def _rows(self, ids: Tensor, *, of_rows: bool = False) -> Tensor:
        """float32 [*shape, dim] of ids [batch, F], or [F, batch] with the features as rows."""
        spread = _rows_of if of_rows else _columns_of
        found = self._stack_rows(ids, spread, padded=False, batch_axis=int(of_rows))
        return self._gather(found)

    def _gather(self, ids: Tensor) -> Tensor:
        """Rows of the stack, of any shape; rows of zeros for those DROPPED."""
        if self.ranges.policy != "zeros" and self.kind != "sequence":
            return self.table_rows(ids)
        flat = tf.reshape(ids, [-1])
        zeroed = flat == DROPPED
        rows = self.table_rows(tf.where(zeroed, tf.constant(0, tf.int64), flat))
        # The operation of TensorFlow 1, which takes whole rows: a broadcast condition is several times slower.
        rows = tf.raw_ops.Select(condition=zeroed, x=tf.zeros_like(rows), y=rows)
        return tf.reshape(rows, tf.concat([tf.shape(ids), [self.dim]], 0))

    def _sequence(self, ids: Tensor) -> Tensor:
        """float32 [batch, max_sequence_length, dim] of ids [batch, hot]."""
        ids = cut(ids, self.features[0].spec.max_sequence_length)
        rows = self._stack_rows(ids, _columns_of, padded=True)
        return self._gather(tf.where(ids == DROPPED, ids, rows))

    # ---- lists of ids

    def _lists(self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None) -> list[Tensor]:
        """float32 [batch, dim] of each of the [batch, hot] matrices, which may be of different widths."""
        shapes = tf.stack(tf.shape_n(ids, tf.int64))
        if weights is not None:
            ids = _same_shapes(ids, shapes, weights, [feature.name for feature in self.features])
        arguments = [tf.concat(ids, 1), shapes[:, 1], *([] if weights is None else [tf.concat(weights, 1)])]
        return choose(self._are_few(arguments[0]), self._lists_at_once, self._lists_one_by_one, *arguments)

    def _lists_at_once(self, ids: Tensor, widths: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        """float32 [batch, dim] of each feature's columns of `ids` [batch, sum of widths]."""
        batch, total = tf.unstack(tf.shape(ids, tf.int64))
        feature_of = _feature_of_columns(widths, total)
        rows = self._stack_rows(ids, lambda numbers: tf.gather(numbers, feature_of), padded=True)
        count = len(self.features)
        segments = tf.reshape(tf.range(batch) * count, [-1, 1]) + feature_of
        pooled = self._pool_present(rows, ids != DROPPED, weights, segments, batch * count)
        return tf.unstack(tf.reshape(pooled, [-1, count, self.dim]), axis=1)

    def _lists_one_by_one(self, ids: Tensor, widths: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        count = len(self.features)
        parts = [tf.split(tensor, widths, 1, num=count) for tensor in (ids, weights) if tensor is not None]
        return self._one_by_one(zip(*parts, strict=True))

    def _packed_lists(self, ids: Tensor) -> Tensor:
        """float32 [batch, F, dim] of ids [batch, F, hot]."""
        if self.ranges.policy != "error":
            return self._checked_lists(ids)
        full = tf.reduce_all(RangedIds(ids=ids, ranges=self.ranges, spread=_rows_of).inside())
        return tf.cond(
            full & self._are_few(ids),
            lambda: self._pool_full(ids + self.offsets[:, None], None),
            lambda: self._checked_lists(ids),
        )

    def _checked_lists(self, ids: Tensor) -> Tensor:
        """`_packed_lists` of any ids."""
        count = len(self.features)

        def at_once(ids: Tensor) -> Tensor:
            rows = self._stack_rows(ids, _rows_of, padded=True)
            batch, _, hot = tf.unstack(tf.shape(ids))  # `hot` may be 0, and -1 beside it has no meaning
            rows, present = (tf.reshape(tensor, [batch * count, hot]) for tensor in (rows, ids != DROPPED))
            return tf.reshape(self._pool_matrix(rows, present, None), [-1, count, self.dim])

        def apart(ids: Tensor) -> Tensor:
            return tf.stack(self._one_by_one((ids[:, index],) for index in range(count)), 1)

        return choose(self._are_few(ids), at_once, apart, ids)[0]

    def _one_by_one(self, features: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
        """float32 [batch, dim] of each feature's ids, and weights. Of one after the other: so the rows of one are in memory."""
        specs = [tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([], tf.int64)]
        pool = tf.function(
            self._one,
            input_signature=[*specs, *([tf.TensorSpec([None, None], tf.float32)] if self.is_weighted else [])],
            autograph=False,
        )
        done: list[Tensor] = []
        for index, (ids, *weights) in enumerate(features):
            with tf.control_dependencies(done[-1:]):
                done.append(pool(tf.identity(ids), tf.constant(index, tf.int64), *weights))
        return done

    def _one(self, ids: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
        rows = self._stack_rows(ids, lambda numbers: tf.gather(numbers, index), padded=True)
        return self._pool_matrix(rows, ids != DROPPED, weights)

    # ---- pooling

    def _pool_matrix(self, rows: Tensor, present: Tensor, weights: Tensor | None) -> Tensor:
        """Return float32 [n, dim] for `rows` [n, hot] of the stack. `present` and `weights` have the same shape."""

        def pool_present() -> Tensor:
            shape = tf.shape(rows, tf.int64)
            segments = tf.broadcast_to(tf.range(shape[0])[:, None], shape)
            return self._pool_present(rows, present, weights, segments, shape[0])

        return tf.cond(tf.reduce_all(present), lambda: self._pool_full(rows, weights), pool_present)

    def _pool_full(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Pool `rows` [..., hot] that are all present into float32 [..., dim]."""
        return pool(self._gather(rows), weights, FullMatrix(rows), self._combiner)

    def _pool_present(
        self, rows: Tensor, present: Tensor, weights: Tensor | None, segments: Tensor, count: Tensor
    ) -> Tensor:
        """Pool the `rows` that are `present` into float32 [count, dim]. `segments` has the example of each.

        All have one shape. In row-major order, the segments never fall.
        """
        entries = tf.reshape(tf.where(tf.reshape(present, [-1])), [-1])

        def present_of(tensor: Tensor, last: Tensor) -> Tensor:
            return tf.concat([tf.gather(tf.reshape(tensor, [-1]), entries), tf.reshape(last, [1])], 0)

        strategy = SortedSegments(present_of(segments, count), count)
        values = self._gather(present_of(rows, tf.constant(0, tf.int64)))
        weights = None if weights is None else present_of(weights, tf.constant(0.0))
        return pool(values, weights, strategy, self._combiner)

    def _are_few(self, ids: Tensor) -> Tensor:
        return tf.size(ids, tf.int64) <= max(_FEW_ROWS_BYTES // (4 * self.dim), 1)

    @property
    def _combiner(self) -> str:
        return self.features[0].combiner


def _rows_of(numbers: Any) -> Any:
    return numbers[:, None]


def _columns_of(numbers: Any) -> Any:
    return numbers


def _feature_of_columns(widths: Tensor, total: Tensor) -> Tensor:
    """int64 [total]: the index of the matrix that each column of the concatenated ones is from."""
    ends = tf.cumsum(widths)
    columns = tf.reshape(tf.range(total), [1, -1])
    found = tf.raw_ops.UpperBound(sorted_inputs=tf.reshape(ends, [1, -1]), values=columns, out_type=tf.int64)
    return tf.reshape(found, [-1])


def _same_shapes(
    ids: Sequence[Tensor], shapes: Tensor, weights: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor]:
    """`ids`, once every feature's weights are known to be of the shape of its ids."""
    theirs = tf.stack(tf.shape_n(weights, tf.int64))
    message = f"the weights must have the shape of the ids; features {', '.join(names)}: ids and weights are"
    check = tf.raw_ops.Assert(condition=tf.reduce_all(shapes == theirs), data=[message, shapes, theirs], summarize=99)
    with tf.control_dependencies([check]):
        return [tf.identity(matrix) for matrix in ids]
