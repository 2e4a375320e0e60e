"""Features that a graph looks up together: of one stack, one kind and one combiner.

A request costs one check, one gather and one sum per group instead of per feature: with few ids, that is most of its time.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.export.graph.conditional import choose
from tpuembed.export.graph.id_ranges import ZEROED, TableRanges, all_inside, check_policy
from tpuembed.export.graph.pooling import FEW_ROWS_BYTES, Gather, pool_entries, pool_full, pool_matrix
from tpuembed.export.graph.signature import ServedFeature
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.lookup import DROPPED

__all__ = ["FeatureGroup", "group_features", "kind_of"]

Tensor = Any
KINDS = ("id", "list", "sequence")


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

    return [_group(tuple(members), tables) for _, members in groupby(sorted(features, key=key), key)]


def _group(features: tuple[ServedFeature, ...], tables: StackedTables) -> "FeatureGroup":
    places = [tables.place(feature.table)[1] for feature in features]
    for feature, place in zip(features, places, strict=True):
        check_policy(feature.name, feature.policy, place)
    ranges = TableRanges(
        features=[feature.name for feature in features],
        tables=[feature.table for feature in features],
        rows=np.array([place.rows for place in places], np.int64),
        first_row=np.array([place.first_row for place in places], np.int64),
        row_offset=np.array([place.row_offset for place in places], np.int64),
        policies=[feature.policy for feature in features],
    )
    gather = partial(tables.gather, tables.place(features[0].table)[0])
    return FeatureGroup(features=features, ranges=ranges, table_rows=gather)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """F features and where their tables lie; `table_rows` looks up in their stack."""

    features: tuple[ServedFeature, ...]
    ranges: TableRanges
    table_rows: Gather

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
        return tf.reshape(found, [-1, self.packed_width()])

    def packed_width(self) -> int:
        """Columns of `packed`."""
        return sum(feature.dim * (feature.spec.max_sequence_length or 1) for feature in self.features)

    # ---- one id per example

    def _rows(self, ids: Tensor, *, of_rows: bool = False) -> Tensor:
        """float32 [*shape, dim] of ids [batch, F], or [F, batch] with the features as rows."""
        spread = _rows_of if of_rows else _columns_of
        found = self.ranges.stack_ids(ids, spread, padded=False, batch_axis=int(of_rows))
        return self._gather(found)

    def _gather(self, ids: Tensor) -> Tensor:
        """Rows of ids of any shape; rows of zeros for those ZEROED."""
        if not self.ranges.has_zeros and self.kind != "sequence":
            return self.table_rows(ids)
        flat = tf.reshape(ids, [-1])
        zeroed = flat == ZEROED
        rows = self.table_rows(tf.where(zeroed, tf.constant(0, tf.int64), flat))
        # The operation of TensorFlow 1, which takes whole rows: a broadcast condition is several times slower.
        rows = tf.raw_ops.Select(condition=zeroed, x=tf.zeros_like(rows), y=rows)
        return tf.reshape(rows, tf.concat([tf.shape(ids), [self.dim]], 0))

    def _sequence(self, ids: Tensor) -> Tensor:
        """float32 [batch, max_sequence_length, dim] of ids [batch, hot]."""
        length = self.features[0].spec.max_sequence_length
        padding = tf.fill([tf.shape(ids)[0], length], tf.constant(DROPPED, tf.int64))
        ids = tf.ensure_shape(tf.concat([ids, padding], 1)[:, :length], [None, length])
        rows = self.ranges.stack_ids(ids, _columns_of, padded=True)
        return self._gather(tf.where(ids == DROPPED, tf.constant(ZEROED, tf.int64), rows))

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
        rows = self.ranges.stack_ids(ids, lambda numbers: tf.gather(numbers, feature_of), padded=True)
        count = len(self.features)
        segments = tf.reshape(tf.range(batch) * count, [-1, 1]) + feature_of
        pooled = pool_entries(rows, ids != DROPPED, weights, segments, batch * count, self._combiner, self._gather)
        return tf.unstack(tf.reshape(pooled, [-1, count, self.dim]), axis=1)

    def _lists_one_by_one(self, ids: Tensor, widths: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        count = len(self.features)
        parts = [tf.split(tensor, widths, 1, num=count) for tensor in (ids, weights) if tensor is not None]
        return self._one_by_one(zip(*parts, strict=True))

    def _packed_lists(self, ids: Tensor) -> Tensor:
        """float32 [batch, F, dim] of ids [batch, F, hot]."""
        if not self.ranges.are_plain:
            return self._checked_lists(ids)
        full = all_inside(ids, self.ranges.rows[:, None])
        return tf.cond(
            full & self._are_few(ids),
            lambda: pool_full(ids + self.ranges.row_offset[:, None], None, self._combiner, self._gather),
            lambda: self._checked_lists(ids),
        )

    def _checked_lists(self, ids: Tensor) -> Tensor:
        """`_packed_lists` of any ids."""
        count = len(self.features)

        def at_once(ids: Tensor) -> Tensor:
            rows = self.ranges.stack_ids(ids, _rows_of, padded=True)
            rows, present = (tf.reshape(tensor, [-1, tf.shape(ids)[2]]) for tensor in (rows, ids != DROPPED))
            return tf.reshape(pool_matrix(rows, present, None, self._combiner, self._gather), [-1, count, self.dim])

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
        rows = self.ranges.stack_ids(ids, lambda numbers: tf.gather(numbers, index), padded=True)
        return pool_matrix(rows, ids != DROPPED, weights, self._combiner, self._gather)

    def _are_few(self, ids: Tensor) -> Tensor:
        return tf.size(ids, tf.int64) <= max(FEW_ROWS_BYTES // (4 * self.dim), 1)

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
