"""Features that a graph looks up together: of one stack, one kind and one combiner.

A request costs one check, one gather and one sum per group instead of per feature: with few ids, that is most of its time.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.export.pooling import FEW_ROWS_BYTES, Gather, pool_entries, pool_full, pool_matrix
from tpuembed.export.signature import ServedFeature
from tpuembed.export.stacked_tables import StackedTables
from tpuembed.export.table_ranges import ZEROED, TableRanges, all_inside, not_inlined
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
        policy = spec.out_of_vocabulary if isinstance(spec.out_of_vocabulary, str) else "row"
        combiner = feature.combiner if kind == "list" else ""
        return KINDS.index(kind), tables.place(feature.table)[0], combiner, spec.weighted, policy, alone

    return [_group(tuple(members), tables) for _, members in groupby(sorted(features, key=key), key)]


def _group(features: tuple[ServedFeature, ...], tables: StackedTables) -> "FeatureGroup":
    places = [tables.place(feature.table)[1] for feature in features]
    for feature, place in zip(features, places, strict=True):
        _check_policy(feature, place.first_row, place.first_row + place.rows)
    ranges = TableRanges(
        tables=[feature.table for feature in features],
        rows=np.array([place.rows for place in places], np.int64),
        first_row=np.array([place.first_row for place in places], np.int64),
        row_offset=np.array([place.row_offset for place in places], np.int64),
        policies=[feature.spec.out_of_vocabulary for feature in features],
    )
    gather = partial(tables.gather, tables.place(features[0].table)[0])
    return FeatureGroup(features=features, ranges=ranges, table_rows=gather)


def _check_policy(feature: ServedFeature, start: int, stop: int) -> None:
    policy = feature.spec.out_of_vocabulary
    if isinstance(policy, int) and not start <= policy < stop:
        raise ConfigError(
            f"feature {feature.name!r}: out_of_vocabulary row {policy} is not among the exported rows [{start}, {stop}) of table "
            f"{feature.table!r}; choose one of them, or zeros"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """F features and where their tables lie; `table_rows` looks up in their stack."""

    features: tuple[ServedFeature, ...]
    ranges: TableRanges
    table_rows: Gather

    @cached_property
    def kind(self) -> str:
        """Of all its features."""
        return kind_of(self.features[0])

    @cached_property
    def dim(self) -> int:
        """Width of the tables."""
        return self.features[0].dim

    @cached_property
    def is_weighted(self) -> bool:
        """Whether every feature has weights, or none."""
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
        return tf.reshape(found, [tf.shape(ids)[0], self.packed_width()])

    def packed_width(self) -> int:
        """Columns of `packed`."""
        return sum(feature.dim * (feature.spec.max_sequence_length or 1) for feature in self.features)

    # ---- one id per example

    def _rows(self, ids: Tensor, *, of_rows: bool = False) -> Tensor:
        """float32 [*shape, dim] of ids [batch, F], or [F, batch] with the features as rows."""
        found = self.ranges.stack_ids(ids, _rows_of if of_rows else _columns_of, padded=False)
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
        ids = self.ranges.stack_ids(ids, _columns_of, padded=True)
        return self._gather(tf.where(ids < 0, tf.constant(ZEROED, tf.int64), ids))

    # ---- lists of ids

    def _lists(self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None) -> list[Tensor]:
        """float32 [batch, dim] of each of the [batch, hot] matrices, which may be of different widths."""
        shapes = tf.stack(tf.shape_n(ids, tf.int64))
        if weights is not None:
            ids = _same_shapes(ids, shapes, weights, [feature.name for feature in self.features])
        together, all_weights = tf.concat(ids, 1), None if weights is None else tf.concat(weights, 1)
        feature_of = _feature_of_columns(shapes[:, 1], tf.shape(together, tf.int64)[1])
        rows = self.ranges.stack_ids(together, lambda numbers: tf.gather(numbers, feature_of), padded=True)
        if len(ids) == 1:
            return [pool_matrix(rows, all_weights, self._combiner, self._gather)]

        def at_once() -> list[Tensor]:
            batch, count = tf.shape(rows, tf.int64)[0], len(ids)
            segments = tf.range(batch)[:, None] * count + feature_of
            pooled = pool_entries(rows, all_weights, segments, batch * count, self._combiner, self._gather)
            return tf.unstack(tf.reshape(pooled, [-1, count, self.dim]), axis=1)

        arguments = [rows, shapes[:, 1], *([] if all_weights is None else [all_weights])]
        apart = not_inlined(self._split_lists, *(tf.TensorSpec([None] * len(a.shape), a.dtype) for a in arguments))
        found = tf.cond(self._are_few(rows), at_once, lambda: list(apart(*arguments)))
        return [tf.ensure_shape(pooled, [None, self.dim]) for pooled in found]

    def _split_lists(self, rows: Tensor, widths: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        """float32 [batch, dim] of each feature's columns of `rows` [batch, sum of widths]."""
        count = len(self.features)
        parts = [None] * count if weights is None else tf.split(weights, widths, 1, num=count)
        return list(self._one_by_one(zip(tf.split(rows, widths, 1, num=count), parts, strict=True)))

    def _packed_lists(self, ids: Tensor) -> Tensor:
        """float32 [batch, F, dim] of ids [batch, F, hot]."""
        if not self.ranges.are_plain:
            return self._checked_lists(ids)
        full = all_inside(ids, self.ranges.rows[:, None])
        otherwise = not_inlined(self._checked_lists, tf.TensorSpec(ids.shape, tf.int64))
        return tf.cond(
            full & self._are_few(ids),
            lambda: pool_full(ids + self.ranges.row_offset[:, None], None, self._combiner, self._gather),
            lambda: otherwise(ids),
        )

    def _checked_lists(self, ids: Tensor) -> Tensor:
        rows = self.ranges.stack_ids(ids, _rows_of, padded=True)
        count = len(self.features)

        def at_once() -> Tensor:
            pooled = pool_matrix(tf.reshape(rows, [-1, tf.shape(rows)[2]]), None, self._combiner, self._gather)
            return tf.reshape(pooled, [-1, count, self.dim])

        def apart() -> Tensor:
            return tf.stack(list(self._one_by_one((rows[:, index], None) for index in range(count))), 1)

        return tf.cond(self._are_few(rows), at_once, apart)

    def _one_by_one(self, features: Any) -> Iterator[Tensor]:
        """Each after the one before, so that the gathered rows of one are in memory at a time."""
        done: list[Tensor] = []
        for rows, weights in features:
            with tf.control_dependencies(done):
                pooled = pool_matrix(tf.identity(rows), weights, self._combiner, self._gather)
            done = [pooled]
            yield pooled

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
    return tf.raw_ops.UpperBound(sorted_inputs=ends[None, :], values=tf.range(total)[None, :], out_type=tf.int64)[0]


def _same_shapes(
    ids: Sequence[Tensor], shapes: Tensor, weights: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor]:
    """`ids`, once every feature's weights are known to be of the shape of its ids."""
    theirs = tf.stack(tf.shape_n(weights, tf.int64))
    message = f"the weights must have the shape of the ids; features {', '.join(names)}: ids and weights are"
    check = tf.raw_ops.Assert(condition=tf.reduce_all(shapes == theirs), data=[message, shapes, theirs], summarize=99)
    with tf.control_dependencies([check]):
        return [tf.identity(matrix) for matrix in ids]
