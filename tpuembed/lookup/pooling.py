"""Pooling: the rows of an example's ids become one activation. One formula, with a strategy for each arrangement of rows.

Formulas, over the ids i of one example with weights w_i (1 if none are given). An example without ids gives zeros:
    sum: Σ w_i row_i      mean: Σ w_i row_i / Σ w_i      sqrtn: Σ w_i row_i / sqrt(Σ w_i²)
Source: `tf.nn.embedding_lookup_sparse`.

Measured through the C API, 26 features, 100k x 64 float32 tables, one thread (docs/performance.md has the numbers):

- Without padding, the gather of [n, hot] rows and one sum is fastest (with weights: one batched product): `FullMatrix`.
- With padding, the present entries are selected, gathered, and summed by `SegmentSum`: `SortedSegments`.
- `UnsortedSegmentSum` takes twice as long, and a mask over the gathered rows even longer: `Segments` and `PaddedMatrix`.
  Padding multiplied by 0 turns an infinity into NaN.
"""

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from tpuembed.lookup.branches import choose

__all__ = ["AdjacentSegments", "EachRow", "FullMatrix", "PaddedMatrix", "Segments", "SortedSegments", "pool", "shares"]

Tensor = Any


def pool(rows: Tensor, weights: Tensor | None, strategy: "EachRow", combiner: str = "sum") -> Tensor:
    """Return the activations of examples whose gathered `rows`, with one weight each, are arranged as `strategy` says."""
    total = strategy.add_up(rows, weights)
    if combiner == "sum":
        return total
    denominators = strategy.denominators(weights, combiner)
    return tf.math.divide_no_nan(total, denominators[..., None] if denominators.shape.rank != 0 else denominators)


def shares(weights: Tensor | None, strategy: "EachRow", combiner: str) -> Tensor | None:
    """Return the weights [n] with which a sum of rows is what `combiner` makes of them. None stands for 1."""
    if combiner == "sum":
        return weights
    denominators = strategy.spread(strategy.denominators(weights, combiner))
    return tf.math.divide_no_nan(strategy.ones() if weights is None else weights, denominators)


@dataclasses.dataclass(frozen=True)
class EachRow:
    """A strategy: n rows [n, dim] are the activations of n examples.

    Attributes:
        ids: a vector of n, or another tensor with an element per row.
        omits: whether the strategy omits rows by itself.
    """

    ids: Tensor
    omits: ClassVar[bool] = False

    def add_up(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Return the weighted sum of each example's rows."""
        return self.add(rows if weights is None else rows * weights[:, None])

    def add(self, values: Tensor) -> Tensor:
        """Return the sum of each example's `values`, one or several numbers per row."""
        return values

    def spread(self, values: Tensor) -> Tensor:
        """Return each example's `values` for each of its rows: the transpose of `add`. Those of omitted rows have no meaning."""
        return values

    def denominators(self, weights: Tensor | None, combiner: str) -> Tensor:
        """Return the number that `combiner`, mean or sqrtn, divides each example's sum by, or one number for all examples."""
        weights = self.ones() if weights is None else weights
        return self.add(weights) if combiner == "mean" else tf.sqrt(self.add(weights * weights))

    def ones(self) -> Tensor:
        """Return the weight 1 of every row."""
        return tf.ones_like(self.ids, tf.float32)

    def omitting(self, rows: Tensor) -> "EachRow":
        """Return the strategy that omits some rows, bool [n], if it can (`omits`). Else such rows must be zeros."""
        del rows
        return self

    def of_lists(self) -> "EachRow":
        """Return the strategy that is faster if the rows of an example are usually adjacent, as in lists."""
        return self

    def places(self) -> tuple[Tensor, Tensor]:
        """Return int64 [n], the activation of each row, and how many activations there are. Used by messages."""
        return tf.range(tf.size(self.ids, tf.int64)), tf.size(self.ids, tf.int64)


@dataclasses.dataclass(frozen=True)
class PaddedMatrix(EachRow):
    """A strategy: each example has the same number of rows, and those of padding are zeros. It needs no scatter.

    Attributes:
        examples, hot: scalars, the number of examples and of each one's rows.
    """

    examples: Tensor
    hot: Tensor

    def add(self, values: Tensor) -> Tensor:
        """Sum each example's values."""
        sizes = [self.examples, tf.cast(self.hot, tf.int64), *values.shape[1:]]
        return tf.reduce_sum(tf.reshape(values, sizes), 1)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat each example's values."""
        rest = values.shape[1:]
        return tf.reshape(tf.repeat(tf.reshape(values, [self.examples, 1, *rest]), self.hot, 1), [-1, *rest])


@dataclasses.dataclass(frozen=True)
class FullMatrix(EachRow):
    """A strategy: `ids` are [..., hot] without padding, rows [..., hot, dim] and weights [..., hot]."""

    def add_up(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over each example's rows."""
        return tf.reduce_sum(rows, -2) if weights is None else tf.squeeze(tf.matmul(weights[..., None, :], rows), -2)

    def add(self, values: Tensor) -> Tensor:
        """Sum numbers [..., hot]."""
        return tf.reduce_sum(values, -1)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat numbers of examples."""
        return tf.broadcast_to(values[..., None], tf.shape(self.ids))

    def denominators(self, weights: Tensor | None, combiner: str) -> Tensor:
        """Return one number for all examples if there are no weights."""
        if weights is not None:
            return super().denominators(weights, combiner)
        count = tf.cast(tf.shape(self.ids)[-1], tf.float32)
        return count if combiner == "mean" else tf.sqrt(count)


@dataclasses.dataclass(frozen=True)
class Segments(EachRow):
    """A strategy: rows are in any order. `ids` has the example of each row, and a negative number for a row to omit.

    Attributes:
        count: int64 scalar, the number of examples.
    """

    count: Tensor
    omits = True

    def add(self, values: Tensor) -> Tensor:
        """Sum each segment."""
        return tf.math.unsorted_segment_sum(values, self.ids, self.count)

    def spread(self, values: Tensor) -> Tensor:
        """Gather each row's example."""
        return tf.gather(values, tf.maximum(self.ids, 0))

    def omitting(self, rows: Tensor) -> "Segments":
        """Give some rows a negative segment."""
        return dataclasses.replace(self, ids=tf.where(rows, tf.cast(-1, self.ids.dtype), self.ids))

    def of_lists(self) -> "AdjacentSegments":
        """Return AdjacentSegments."""
        return AdjacentSegments(self.ids, self.count)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the segments, and their number."""
        return tf.cast(self.ids, tf.int64), self.count


@dataclasses.dataclass(frozen=True)
class SortedSegments(Segments):
    """A strategy: segments never fall, and a last row of segment `count` belongs to no example.

    With that row, the sums include trailing examples without ids.
    """

    def add(self, values: Tensor) -> Tensor:
        """Sum each segment, without the last one."""
        return tf.math.segment_sum(values, self.ids)[: self.count]


@dataclasses.dataclass(frozen=True)
class AdjacentSegments(Segments):
    """A strategy: the rows of an example are usually adjacent, as in lists. They are then summed twice as fast.

    An unsorted order, and rows to omit, are detected at run time.
    """

    def add(self, values: Tensor) -> Tensor:
        """Sum each segment."""
        segments = tf.convert_to_tensor(self.ids)
        in_order = tf.reduce_all(segments >= tf.concat([tf.zeros_like(segments[:1]), segments[:-1]], 0))
        branches = _sorted_sum, tf.math.unsorted_segment_sum
        (sums,) = choose(in_order, *branches, values, segments, self.count, shared=True)
        return tf.ensure_shape(sums, [None, *values.shape[1:]])


def _sorted_sum(values: Tensor, segments: Tensor, count: Tensor) -> Tensor:
    """Compute `unsorted_segment_sum` for sorted segments without negative ones."""
    found = tf.math.segment_sum(values, segments)
    rest = tf.zeros(tf.stack([tf.cast(count, tf.int32) - tf.shape(found)[0], *values.shape[1:]]))
    return tf.concat([found, rest], 0)
