"""The ids that tables accept, in a graph: the check that no lookup reads another table's row, and the shift into the stack.

The check costs three small operations, whatever the number of features: negative ids are large as unsigned numbers, so one
comparison has both ends. What makes the message is a function that is called where the check fails: inside of the graph, its
operations would take longer, not taken, than the check (measured).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.export.plan.plan import Placement
from tpuembed.lookup import DROPPED, NOWHERE, OUTSIDE, Span, not_inlined, outside_texts

__all__ = ["ZEROED", "Spread", "TableRanges", "all_inside", "check_policy"]

Tensor = Any
Spread = Callable[[npt.NDArray[np.int64]], Tensor]
"""One number per feature to numbers that broadcast over a tensor of several features' ids."""

ZEROED: Final = 1 << 61
"""The row of a stack that is none, and is looked up as zeros."""


def check_policy(feature: str, policy: str | int, place: Placement) -> None:
    """Raise ConfigError where the `policy` of `feature` is a row that is not among the exported ones of its table."""
    start, stop = place.first_row, place.first_row + place.rows
    if not isinstance(policy, str) and not start <= policy < stop:
        raise ConfigError(
            f"feature {feature!r}: out_of_vocabulary row {policy} is not among the exported rows [{start}, {stop}) of table "
            f"{place.table!r}; choose one of them, or zeros"
        )


def all_inside(ids: Tensor, rows: Tensor) -> Tensor:
    """Whether all of `ids` are in [0, rows), both int64."""
    return tf.reduce_all(_inside(ids, rows))


def _inside(ids: Tensor, rows: Tensor) -> Tensor:
    return tf.raw_ops.Less(x=tf.bitcast(ids, tf.uint64), y=tf.bitcast(tf.convert_to_tensor(rows, tf.int64), tf.uint64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRanges:
    """The tables of F features, side by side; a table's ids are [first_row, first_row + rows).

    Attributes:
        features: name of each.
        tables: name of each feature's table.
        rows, first_row, row_offset: int64 [F], as in `tpuembed.export.plan.plan.Placement`.
        policies: of each feature, what an id outside does: "error", "zeros", or the id to take instead.
    """

    features: Sequence[str]
    tables: Sequence[str]
    rows: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    row_offset: npt.NDArray[np.int64]
    policies: Sequence[str | int]

    @cached_property
    def are_plain(self) -> bool:
        """Whether an id is either a row of its table, counted from 0, or an error."""
        return not self.first_row.any() and all(policy == "error" for policy in self.policies)

    @cached_property
    def has_zeros(self) -> bool:
        """Whether `stack_ids` may give ZEROED."""
        return "zeros" in self.policies

    def stack_ids(self, ids: Tensor, spread: Spread, *, padded: bool, batch_axis: int = 0) -> Tensor:
        """Rows of the stack of int64 `ids`. An id that no policy takes fails; the row of a DROPPED one means nothing.

        Args:
            ids: of several features, in the layout that `spread` broadcasts over.
            padded: whether an id may be DROPPED.
            batch_axis: the axis of `ids` that counts examples.
        """
        ids, zeroed = self._with_policies(self._relative(ids, spread), spread, padded)
        ids = self._checked(ids, spread, padded, batch_axis)
        shifted = ids + spread(self.row_offset)
        return shifted if zeroed is None else tf.where(zeroed, tf.constant(ZEROED, tf.int64), shifted)

    def _relative(self, ids: Tensor, spread: Spread) -> Tensor:
        """Ids counted from `first_row`. Those before it are one less than that, for DROPPED ones stay what they are."""
        if not self.first_row.any():
            return ids
        first = spread(self.first_row)
        return tf.where(ids == DROPPED, ids, tf.where(ids >= first, ids - first, tf.minimum(ids - first, -1) - 1))

    def _absolute(self, relative: Tensor, spread: Spread) -> Tensor:
        """The transpose of `_relative`."""
        if not self.first_row.any():
            return relative
        first = spread(self.first_row)
        return tf.where(relative == DROPPED, relative, relative + first + tf.cast(relative < 0, tf.int64))

    def _with_policies(self, ids: Tensor, spread: Spread, padded: bool) -> tuple[Tensor, Tensor | None]:
        """Ids with those outside replaced, where their feature's policy is a row; and which of them shall be zeros."""
        if all(policy == "error" for policy in self.policies):
            return ids, None
        outside = ~_inside(ids, spread(self.rows))
        if padded:
            outside &= ids != DROPPED
        instead = self._instead()
        ids = tf.where(outside & (spread(instead) >= 0), spread(instead), ids)
        if not self.has_zeros:
            return ids, None
        zeros = np.array([policy == "zeros" for policy in self.policies], np.int64)
        zeroed = outside & (spread(zeros) > 0)
        return tf.where(zeroed, tf.constant(0, tf.int64), ids), zeroed

    def _instead(self) -> npt.NDArray[np.int64]:
        """int64 [F]: the row of a policy that is one, counted from `first_row`; -1 for others."""
        pairs = zip(self.policies, self.first_row.tolist(), strict=True)
        return np.array([-1 if isinstance(policy, str) else policy - first for policy, first in pairs], np.int64)

    def _checked(self, ids: Tensor, spread: Spread, padded: bool, batch_axis: int) -> Tensor:
        """Ids counted from `first_row`; fails, naming feature, table, id and row, where one is outside."""
        inside = all_inside(ids + 1, spread(self.rows + 1)) if padded else all_inside(ids, spread(self.rows))
        fail = not_inlined(
            lambda ids, feature: self._fail(ids, feature, padded, batch_axis),
            tf.TensorSpec(ids.shape, tf.int64),
            tf.TensorSpec(None, tf.int64),
        )
        features = np.arange(len(self.tables), dtype=np.int64)
        checked = tf.cond(inside, lambda: ids, lambda: fail(ids, spread(features)))
        checked.set_shape(ids.shape)
        return checked

    def _fail(self, ids: Tensor, feature: Tensor, padded: bool, batch_axis: int) -> Tensor:
        """Fail for the first id that is outside. `feature` has the index of that of each id.

        Few operations: TensorFlow optimizes them all at a model's first request, though none is expected to be run.
        """
        feature = tf.broadcast_to(feature, tf.shape(ids))
        outside = ~_inside(ids, tf.gather(self.rows, feature))
        if padded:
            outside &= ids != DROPPED
        place = tf.where(outside)[0]
        which = tf.gather_nd(feature, place)
        found = tf.gather_nd(self._absolute(ids, lambda numbers: tf.gather(numbers, feature)), place)
        before, after = zip(*map(outside_texts, self.features, self._spans()), strict=True)
        parts = [
            tf.gather(before, which),
            tf.strings.as_string(found),
            " of row ",
            tf.strings.as_string(place[batch_axis]),
        ]
        message = tf.strings.join([*parts, tf.gather(after, which)])
        # The raw op: `tf.debugging.Assert` wraps it in a branch.
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[message], name=OUTSIDE)]):
            return tf.where(outside, NOWHERE, ids)  # should a runtime strip the assertion, the gather fails

    def _spans(self) -> list[Span]:
        stops = (self.first_row + self.rows).tolist()
        return [Span(*span) for span in zip(self.tables, self.first_row.tolist(), stops, strict=True)]
