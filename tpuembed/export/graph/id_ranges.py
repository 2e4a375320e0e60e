"""The ids that tables accept, in a graph: checks that lookups stay inside their table, and shifts ids into the stack.

The check costs three small operations for any number of features: as unsigned numbers, negative ids are large, so one
comparison checks both ends. A separate function makes the error message and is called only if the check fails. Inside
the graph, its operations would take longer than the check even if not taken (measured).
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
"""Takes one number per feature, and returns them in a shape that broadcasts over a tensor of several features' ids."""

ZEROED: Final = 1 << 61
"""The row number, outside of every stack, that is looked up as zeros."""


def check_policy(feature: str, policy: str | int, place: Placement) -> None:
    """Raise ConfigError if the `policy` of `feature` is a row that is not exported."""
    start, stop = place.first_row, place.first_row + place.rows
    if not isinstance(policy, str) and not start <= policy < stop:
        raise ConfigError(
            f"feature {feature!r}: out_of_vocabulary row {policy} is not among the exported rows [{start}, "
            f"{stop}) of table {place.table!r}. Choose one of them, or zeros."
        )


def all_inside(ids: Tensor, rows: Tensor) -> Tensor:
    """Return a bool tensor, True if all of `ids` are in [0, rows), both int64."""
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
        policies: for each feature, the handling of an id outside: "error", "zeros", or the id to take instead.
    """

    features: Sequence[str]
    tables: Sequence[str]
    rows: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    row_offset: npt.NDArray[np.int64]
    policies: Sequence[str | int]

    @cached_property
    def are_plain(self) -> bool:
        """Returns True if every id outside [0, rows) is an error."""
        return not self.first_row.any() and all(policy == "error" for policy in self.policies)

    @cached_property
    def has_zeros(self) -> bool:
        """Returns True if `stack_ids` may return ZEROED."""
        return "zeros" in self.policies

    def stack_ids(self, ids: Tensor, spread: Spread, *, padded: bool, batch_axis: int = 0) -> Tensor:
        """Return the rows of the stack for int64 `ids`. An id outside of its table fails, unless a policy handles it.

        The row of a DROPPED id has no meaning.

        Args:
            ids: ids of several features, in the layout that `spread` broadcasts over.
            padded: whether an id may be DROPPED.
            batch_axis: the axis of `ids` that counts examples.
        """
        ids, zeroed = self._with_policies(self._relative(ids, spread), spread, padded)
        ids = self._checked(ids, spread, padded, batch_axis)
        shifted = ids + spread(self.row_offset)
        return shifted if zeroed is None else tf.where(zeroed, tf.constant(ZEROED, tf.int64), shifted)

    def _relative(self, ids: Tensor, spread: Spread) -> Tensor:
        """Return ids counted from `first_row`. DROPPED ids stay unchanged, and ids before `first_row` are shifted by
        one more.
        """
        if not self.first_row.any():
            return ids
        first = spread(self.first_row)
        return tf.where(ids == DROPPED, ids, tf.where(ids >= first, ids - first, tf.minimum(ids - first, -1) - 1))

    def _absolute(self, relative: Tensor, spread: Spread) -> Tensor:
        """Return the original ids: the inverse of `_relative`."""
        if not self.first_row.any():
            return relative
        first = spread(self.first_row)
        return tf.where(relative == DROPPED, relative, relative + first + tf.cast(relative < 0, tf.int64))

    def _with_policies(self, ids: Tensor, spread: Spread, padded: bool) -> tuple[Tensor, Tensor | None]:
        """Replace ids outside whose policy is a row. Return the ids, and a mask of those that must become zeros."""
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
        """Return int64 [F]: the row of each policy that is a row, counted from `first_row`; -1 for other policies."""
        pairs = zip(self.policies, self.first_row.tolist(), strict=True)
        return np.array([-1 if isinstance(policy, str) else policy - first for policy, first in pairs], np.int64)

    def _checked(self, ids: Tensor, spread: Spread, padded: bool, batch_axis: int) -> Tensor:
        """Return ids counted from `first_row`. Fails with feature, table, id and row of the batch if one is outside."""
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
        """Fail for the first id that is outside. `feature` has the feature index of each id.

        Few operations: TensorFlow optimizes them all at a model's first request, although they are rarely run.
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
            return tf.where(outside, NOWHERE, ids)  # if a runtime strips the assertion, the gather fails

    def _spans(self) -> list[Span]:
        stops = (self.first_row + self.rows).tolist()
        return [Span(*span) for span in zip(self.tables, self.first_row.tolist(), stops, strict=True)]
