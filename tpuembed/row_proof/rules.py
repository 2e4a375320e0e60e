"""What a rule is called with, and what rules have in common.

A rule is called with a `NodeCall`, none of whose inputs is mixed. It returns the outputs of the operation, or raises `MixedError`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tpuembed.row_proof.values import Kind, MixedError, Size, Value, same

__all__ = [
    "COUNT_KINDS",
    "DEPENDS_ON_WIDTH",
    "MOST_KNOWN_NUMBERS",
    "OUTPUTS",
    "RULES",
    "TAKES_ROWS",
    "USES_BATCH_SIZE",
    "USES_POSITION",
    "NodeCall",
    "arranged",
    "as_rows",
    "computed_value",
    "in_range",
    "inserted",
    "named_outputs",
    "numbers_value",
    "product",
    "refuse_width",
    "rows_value",
    "rule",
    "rule_of_axes",
    "vector_of",
]

MOST_KNOWN_NUMBERS: Final = 4096
USES_POSITION: Final = "a position in the batch is used as a number"
USES_BATCH_SIZE: Final = "a number made from the batch size is used otherwise than to shape rows"
DEPENDS_ON_WIDTH: Final = "it depends on the width of the widest row"
TAKES_ROWS: Final = "it takes rows by their numbers"
COUNT_KINDS: Final = (Kind.EVERY, Kind.SOME, Kind.LOWEST, Kind.HIGHEST)
_POSITIONS: Final = (Kind.POINTER, Kind.INDICES, Kind.SPLITS, Kind.ENDS)
_NO_ATTR: Final = attr_value_pb2.AttrValue()


@dataclasses.dataclass(frozen=True)
class NodeCall:
    """A node and what is known of its inputs. `symbol` makes a new number of a kind that `values` names."""

    node: Any
    inputs: Sequence[Value]
    symbol: Callable[[str], Size]

    @property
    def op(self) -> str:
        """The operation's name."""
        return str(self.node.op)

    def attr(self, name: str) -> Any:
        """An AttrValue. It is empty if the node does not have it."""
        return self.node.attr.get(name, _NO_ATTR)

    def dtype(self, name: str = "T") -> Any:
        """A dtype attribute. None if the node does not have it."""
        number = self.attr(name).type
        return tf.dtypes.as_dtype(number) if number else None

    @property
    def is_same(self) -> bool:
        """Returns True if every input is the same in every run."""
        return all(value.kind is Kind.SAME for value in self.inputs)

    def unknown(self) -> Size:
        """A number that is the same in every run."""
        return self.symbol("s")

    def sizes(self, shape: Any) -> tuple[Size, ...] | None:
        """Returns the sizes of a TensorShapeProto, with symbols for what it leaves open."""
        if shape.unknown_rank:
            return None
        return tuple(Size.of(dim.size) if dim.size >= 0 else self.unknown() for dim in shape.dim)

    def numbers(self, index: int) -> list[int]:
        """The numbers of an input that is a known constant."""
        found = self.inputs[index].numbers() if self.inputs[index].kind is Kind.SAME else None
        if found is None:
            raise MixedError("an axis or a size is not known before it runs")
        return found


Rule = Callable[[NodeCall], list[Value] | Value]
"""Returns the outputs, or the one value that every output has."""
RULES: Final[dict[str, Rule]] = {}
OUTPUTS: Final[dict[str, Callable[[Any], list[tuple[str, int]]]]] = {}
"""Of operations with several named outputs: the names, and how many tensors each is."""


_AnyRule = TypeVar("_AnyRule", bound=Rule)


def rule(*names: str) -> Callable[[_AnyRule], _AnyRule]:
    """Return a decorator that adds a rule for the operations `names` to RULES."""

    def add(rule: _AnyRule) -> _AnyRule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


RuleOfAxes = Callable[[NodeCall, Value, tuple[Size, ...]], list[Value] | Value]


def rule_of_axes(*names: str) -> Callable[[RuleOfAxes], Rule]:
    """Return a decorator for the rule of operations that compute along axes of their first input. The other inputs are constants.

    The rule is called with the first input and its shape. It is a constant, or rows that are not padded to the widest row.
    What is made from a constant of unknown rank has an unknown shape.
    """

    def add(rule_of_shape: RuleOfAxes) -> Rule:
        def checked(call: NodeCall) -> list[Value] | Value:
            value, *others = call.inputs
            as_rows(value, Kind.ROWS, Kind.SAME)
            refuse_width(value)
            for other in others:
                as_rows(other, Kind.SAME)
            if value.kind is Kind.SAME and value.shape is None:
                return same()
            return rule_of_shape(call, value, value.known_shape)

        return rule(*names)(checked)

    return add


def named_outputs(op: str, *names: str) -> None:
    """Say that `op` has one output of each of `names`."""
    OUTPUTS[op] = lambda _: [(name, 1) for name in names]


def as_rows(value: Value, *kinds: Kind) -> Value:
    """Return `value`. Raise MixedError unless it holds rows, or is of one of `kinds`."""
    if value.kind in (kinds or (Kind.ROWS,)):
        return value
    if value.kind is Kind.SIZE:
        raise MixedError(USES_BATCH_SIZE)
    raise MixedError(USES_POSITION if value.kind in _POSITIONS else "rows meet here")


def refuse_width(*values: Value) -> None:
    """Raise MixedError if one of `values` is padded to the widest row."""
    if any(value.is_padded for value in values):
        raise MixedError(DEPENDS_ON_WIDTH)


def rows_value(shape: Iterable[Size] | None, axis: int, **more: Any) -> Value:
    """Return rows of this shape along `axis`. Raise MixedError if another size depends on the batch."""
    known = None if shape is None else tuple(shape)
    if known is not None:
        if not known[axis].is_count:
            raise MixedError("rows do not stay apart")
        if any(not size.is_width for index, size in enumerate(known) if index != axis):
            raise MixedError("two axes depend on the batch size")
    return Value(Kind.ROWS, known, axis, **more)


def arranged(value: Value, axes: Sequence[int | Size], reason: str = "rows do not stay apart") -> Value:
    """Return a constant, or rows, with other axes: each is the number of one of its own, or a new one of this size.

    Raise MixedError with `reason` if the axis of the rows is not among them.
    """
    own = value.known_shape
    shape = [own[axis] if isinstance(axis, int) else axis for axis in axes]
    if value.kind is Kind.SAME:
        return same(shape)
    as_rows(value)
    if list(axes).count(value.axis) != 1:
        raise MixedError(reason)
    return rows_value(shape, axes.index(value.axis))


def inserted(shape: Sequence[Size], axis: int, size: Size) -> list[int | Size]:
    """Return the axes of `shape` with another dimension of `size` at `axis`."""
    axis += len(shape) + 1 if axis < 0 else 0
    return [*range(axis), size, *range(axis, len(shape))]


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of `sizes`."""
    return functools.reduce(operator.mul, sizes, Size.of(1))


def numbers_value(shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """Return the value of a tensor of integers that are known as `sizes`."""
    kind = Kind.SAME if all(size.is_same for size in sizes) else Kind.SIZE
    return Value(kind, shape, sizes=tuple(sizes))


def vector_of(sizes: Sequence[Size]) -> Value:
    """Return the value of a vector of integers that are known as `sizes`."""
    return numbers_value((Size.of(len(sizes)),), sizes)


def in_range(sizes: Iterable[Size], dtype: Any) -> bool:
    """Returns True if integers of `dtype` hold these numbers in a run of less than 2**14 rows. Other numbers wrap around."""
    largest = 2**63 if dtype == tf.int64 else 2**31
    for size in sizes:
        for names, number in size.terms:
            if not -largest <= number < largest:
                return False
            if size.symbols and abs(number) > (largest >> 15 if names else largest >> 1):
                return False
    return True


def computed_value(dtype: Any, shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """A tensor of integers that arithmetic makes."""
    if in_range(sizes, dtype):
        return numbers_value(shape, sizes)
    if all(size.is_same for size in sizes):
        return same(shape)
    raise MixedError(f"{USES_BATCH_SIZE}, and wraps around")
