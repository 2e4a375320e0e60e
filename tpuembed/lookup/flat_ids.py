"""One feature's ids as a flat vector: gathered with other features' ids, pooled into activations, and trained."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors.ids import Span
from tpuembed.lookup.pooling import EachRow, pool
from tpuembed.lookup.ranges import IdRanges, RangedIds

__all__ = ["FlatIds", "gather_grouped"]

Tensor = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatIds:
    """One feature's ids, flattened to a vector of n.

    Attributes:
        ids: int64 [n], with `DROPPED` entries only if `droppable`.
        shape: int64 [r], the activation's shape without its last dimension.
        static_shape: the part of `shape` that is known while tracing.
        strategy: arranges the rows of the ids for `pool`.
        shares: float32 [n], the factor of each row. None for 1.
        droppable: True if `ids` may hold `DROPPED`.
        feature: the feature's name, for messages.
        policy: the policy for an id outside the table: "error", "zeros", or the row to take instead.
        row_shape: int64 [r], the shape of the activations by example. None if it equals `shape`.
        has_names: True if the ids were made of names.
    """

    ids: Tensor
    shape: Tensor
    static_shape: tuple[int | None, ...]
    strategy: EachRow
    shares: Tensor | None = None
    droppable: bool = False
    feature: str = ""
    policy: str | int = "error"
    row_shape: Tensor | None = None
    has_names: bool = False

    def ranged(self, span: Span) -> RangedIds:
        """Return the ids with the range [start, stop) of their table, to check."""

        def batch_rows() -> Tensor:
            places, count = self.strategy.places()
            shape = self.shape if self.row_shape is None else self.row_shape
            return places // tf.maximum(count // tf.maximum(tf.reduce_prod(shape[:1]), 1), 1)

        return RangedIds(
            ids=self.ids,
            ranges=IdRanges(features=[self.feature], spans=[span], policies=[self.policy]),
            droppable=self.droppable,
            row_of=batch_rows,
            is_escaped=self.droppable,
            has_names=self.has_names,
        )

    def within(self, span: Span) -> "FlatIds":
        """Return these ids after applying `policy` to those outside `span`. "error" keeps them for `check_range` to find."""
        ids, dropped = self.ranged(span).within()
        if dropped is None:
            return self if ids is self.ids else dataclasses.replace(self, ids=ids)
        return dataclasses.replace(self, ids=ids, strategy=self.strategy.omitting(dropped), droppable=True)

    def row_ids(self) -> Tensor:
        """Return the int64 [n] to gather. Dropped entries read row 0, which `combine` ignores."""
        return tf.maximum(self.ids, 0) if self.droppable else self.ids

    def combine(self, rows: Tensor) -> Tensor:
        """Return the activations [*shape, dim] of gathered `rows` [n, dim].

        A dropped row is replaced, not multiplied, because it may hold NaN.
        """
        if self.droppable and not self.strategy.omits:
            rows = tf.where((self.ids >= 0)[:, None], rows, 0.0)
        activations, dim = pool(rows, self.shares, self.strategy), rows.shape[-1]
        if len(self.static_shape) != 1:
            activations = tf.reshape(activations, tf.concat([self.shape, [dim]], 0))
        activations.set_shape((*self.static_shape, dim))
        return activations

    def spread(self, gradients: Tensor) -> Tensor:
        """Return the row gradients [n, dim] of activation `gradients` [*shape, dim]. Those of dropped entries have no meaning."""
        rows = self.strategy.spread(tf.reshape(gradients, [-1, gradients.shape[-1]]))
        return rows if self.shares is None else rows * self.shares[:, None]


def gather_grouped(
    features: Sequence[FlatIds], groups: Sequence[str], gather: Callable[[str, Tensor], Tensor]
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
