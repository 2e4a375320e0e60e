"""The ids that tables accept: every check that a lookup stays inside its table, and what happens to an id outside.

An id outside its table follows its feature's out_of_vocabulary. "zeros": its row is zeros, and its weight counts in the
denominator. A row number: that row. "error": the lookup fails before any row is read, and names the id.

In a graph, the check of a tensor costs three small operations for any number of features: as unsigned numbers, negative
ids are large, so one comparison checks both ends. A separate function makes the error message and is called only if the
check fails. Inside the graph, its operations would take longer than the check even if not taken (measured).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.errors.ids import NOWHERE, OF_ROW, Span, outside_texts, unknown_texts
from tpuembed.lookup.branches import not_inlined

__all__ = [
    "DROPPED",
    "ESCAPED",
    "NOT_FOR_XLA",
    "NOWHERE",
    "OUTSIDE",
    "IdRanges",
    "RangedIds",
    "Spread",
    "check_range",
    "is_inside",
]

Tensor = Any
Spread = Callable[[npt.NDArray[np.int64]], Any]
"""Takes one number per feature, and returns them in a shape that broadcasts over a tensor of several features' ids."""

DROPPED = -1
"""The id of an entry that contributes nothing: padding, or a negative id that validation removed."""

ESCAPED: Final = -(2**63)
"""Replaces an id of -1 that is looked up, if there are also DROPPED entries."""

OUTSIDE: Final = "tpuembed_id_outside"
"""The name of the operation that fails for an id outside its table. A server recognizes the message by it."""

NOT_FOR_XLA: Final = "traced_before_jit_compile__decorate_the_inner_function_with_jit_compile_too"
"""The name of an operation without an XLA kernel: XLA fails on it in a function that was traced before, and is not again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdRanges:
    """The ids that F features accept.

    Attributes:
        features: name of each.
        spans: the valid ids of each feature's table.
        policies: for each feature "error", "zeros", or the row to take instead. All are of one of these kinds.

    Raises:
        ConfigError: a policy is a row that its table does not have.
    """

    features: Sequence[str]
    spans: Sequence[Span]
    policies: Sequence[str | int]

    def __post_init__(self) -> None:
        for feature, span, policy in zip(self.features, self.spans, self.policies, strict=True):
            if not isinstance(policy, str) and not 0 <= policy < span.rows:
                raise ConfigError(
                    f"feature {feature!r}: out_of_vocabulary row {policy} is not among the exported rows [0, "
                    f"{span.rows}) of table {span.table!r}. Choose one of them, or zeros."
                )

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """Return the number of valid ids of each feature."""
        return np.array([span.rows for span in self.spans], np.int64)

    @property
    def policy(self) -> str:
        """Return "error", "zeros" or "row"."""
        return self.policies[0] if isinstance(self.policies[0], str) else "row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RangedIds:
    """Ids of one or several features in one tensor, and the ids that these features accept.

    Attributes:
        ids: int64, of any shape.
        ranges: the features.
        spread: spreads one number per feature over `ids`. The default is for one feature.
        droppable: True if an id may be DROPPED.
        row_of: returns the batch row of each id, int64 [n]. It is called where a message is made.
        is_escaped: True if ESCAPED stands for -1.
        has_names: True if the ids were made of names, so that NOWHERE stands for an unknown one.
    """

    ids: Tensor
    ranges: IdRanges
    spread: Spread = itemgetter(0)
    droppable: bool = False
    row_of: Callable[[], Tensor] = lambda: tf.constant([], tf.int64)
    is_escaped: bool = False
    has_names: bool = False

    def inside(self) -> Tensor:
        """Return a bool tensor, True for ids of their table, and for DROPPED ones."""
        more = int(self.droppable)  # DROPPED is just before the first row
        return is_inside(self.ids + more if more else self.ids, self.spread(self.ranges.rows + more))

    def within(self) -> tuple[Tensor, Tensor | None]:
        """Return the ids after applying the policy to those outside, and which of them are DROPPED now (None: no more than before).

        "error" keeps ids outside for `check_range` to find.
        """
        policy = self.ranges.policy
        if policy == "error":
            return self.ids, None
        outside = ~self.inside()
        if policy == "zeros":
            return tf.where(outside, tf.constant(DROPPED, tf.int64), self.ids), outside
        instead = self.spread(np.array(self.ranges.policies, np.int64))
        return tf.where(outside, tf.convert_to_tensor(instead, tf.int64), self.ids), None


def is_inside(ids: Tensor, rows: Any) -> Tensor:
    """Return a bool tensor, True for int64 `ids` in [0, rows)."""
    return tf.raw_ops.Less(x=tf.bitcast(ids, tf.uint64), y=tf.bitcast(tf.convert_to_tensor(rows, tf.int64), tf.uint64))


def check_range(groups: Sequence[RangedIds]) -> Any:
    """Return 0, or an int64 0 that depends on all ids being inside. Fails for the first id outside whose policy is "error".

    If a runtime strips the assertion, the result is NOWHERE. Added to ids, it makes their gather fail.

    Raises:
        InvalidArgumentError: outside of graphs, with the message alone.
    """
    groups = [group for group in groups if group.ranges.policy == "error"]
    if not groups:
        return 0
    inside = [tf.reduce_all(group.inside()) for group in groups]
    are_inside = inside[0] if len(inside) == 1 else tf.reduce_all(tf.stack(inside))
    if tf.executing_eagerly():
        if not are_inside:
            error = tf.errors.InvalidArgumentError(None, None, _outside_message(groups).numpy().decode())
            error._keras_call_info_injected = True  # Keras adds the arguments of the call to other errors, line by line
            raise error
        return 0

    def fail() -> Tensor:
        # The raw op, because `tf.debugging.Assert` wraps it in a branch.
        with tf.control_dependencies(
            [tf.raw_ops.Assert(condition=False, data=[_outside_message(groups)], name=OUTSIDE)]
        ):
            return tf.constant(NOWHERE, tf.int64)

    failing = not_inlined(fail)
    if len(groups) == 1:
        found = tf.cond(are_inside, lambda: tf.constant(0, tf.int64), failing)
        found.set_shape([])
        return found
    arguments = failing.captured_inputs
    specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments]
    # `tf.cond` costs a step one operation per argument of the branch that is not taken. The raw op costs more if they are few.
    (found,) = tf.raw_ops.If(
        cond=are_inside,
        input=arguments,
        Tout=[tf.int64],
        # TensorFlow logs a warning for a parameter whose name begins with an underscore.
        then_branch=not_inlined(lambda *unused: tf.constant(0, tf.int64), *specs),  # noqa: ARG005
        else_branch=failing,
    )
    found.set_shape([])
    return found


# ---- messages


def _outside_message(groups: Sequence[RangedIds]) -> Tensor:
    """Return the message for the first id outside, a string tensor.

    It uses few operations, because TensorFlow optimizes them all at a model's first request.
    """
    first_feature = np.cumsum([0, *(len(group.ranges.features) for group in groups)])
    outside, ids, features, rows, named = [], [], [], [], []
    for group, start in zip(groups, first_feature.tolist(), strict=False):
        numbers = group.spread(np.arange(start, start + len(group.ranges.features), dtype=np.int64))
        outside.append(tf.reshape(~group.inside(), [-1]))
        shown = tf.where(tf.equal(group.ids, ESCAPED), tf.constant(-1, tf.int64), group.ids)
        ids.append(tf.reshape(shown if group.is_escaped else group.ids, [-1]))
        features.append(tf.reshape(tf.broadcast_to(numbers, tf.shape(group.ids)), [-1]))
        rows.append(group.row_of())
        named.append(tf.fill([tf.size(group.ids)], group.has_names))
    first = tf.where(tf.concat(outside, 0))[0, 0]
    which, found, row, is_name = (tf.gather(tf.concat(parts, 0), first) for parts in (features, ids, rows, named))
    of_features = [pair for group in groups for pair in zip(group.ranges.features, group.ranges.spans, strict=True)]
    texts = [outside_texts(feature, span) for feature, span in of_features]
    texts += [unknown_texts(feature, span.table) for feature, span in of_features]
    before, after = zip(*texts, strict=True)
    is_unknown = is_name & tf.equal(found, NOWHERE)
    which += tf.where(is_unknown, tf.constant(len(of_features), tf.int64), 0)
    parts = [
        tf.gather(before, which, name=NOT_FOR_XLA),
        tf.where(is_unknown, "", tf.strings.as_string(found)),
        OF_ROW,
        tf.strings.as_string(row),
    ]
    return tf.strings.join([*parts, tf.gather(after, which)])
