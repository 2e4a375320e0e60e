"""What a rule is called with, and what rules have in common.

A rule is called with a `NodeCall`, none of whose inputs is mixed. It returns the outputs of the operation, or raises `MixedError`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, same

__all__ = [
    "BOOL",
    "CONSTANT_DTYPES",
    "COUNT_KINDS",
    "DEPENDS_ON_WIDTH",
    "ELEMENT_BYTES",
    "INT64",
    "INTEGERS",
    "MOST_KNOWN_NUMBERS",
    "OUTPUTS",
    "RULES",
    "STRING",
    "USES_BATCH_SIZE",
    "USES_POSITION",
    "VALUE_FIELDS",
    "NodeCall",
    "as_rows",
    "computed_value",
    "in_range",
    "is_all_same",
    "is_width",
    "known_shape",
    "named_outputs",
    "numbers_value",
    "refuse_width",
    "rows_value",
    "rule",
]

MOST_KNOWN_NUMBERS: Final = 4096
USES_POSITION: Final = "a position in the batch is used as a number"
USES_BATCH_SIZE: Final = "a number made from the batch size is used otherwise than to shape rows"
DEPENDS_ON_WIDTH: Final = "it depends on the width of the widest row"
CONSTANT_DTYPES: Final = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 10: np.bool_}
VALUE_FIELDS: Final = {1: "float_val", 2: "double_val", 3: "int_val", 9: "int64_val", 10: "bool_val"}
INTEGERS: Final = frozenset({3, 4, 5, 6, 9, 17, 22, 23})
BOOL: Final = 10
COUNT_KINDS: Final = (Kind.EVERY, Kind.SOME, Kind.LOWEST, Kind.HIGHEST)
INT64: Final = 9
STRING: Final = 7
ELEMENT_BYTES: Final = {1: 4, 3: 4, 22: 4, 2: 8, 9: 8, 23: 8, 19: 2, 14: 2, 5: 2, 17: 2, 4: 1, 6: 1}


class NodeCall:
    """A node and what is known of its inputs."""

    def __init__(self, node: Any, inputs: Sequence[Value], symbol: Callable[[str], Size]) -> None:
        self.node, self.inputs, self._symbol = node, inputs, symbol

    @property
    def op(self) -> str:
        """The operation's name."""
        return str(self.node.op)

    def unknown(self) -> Size:
        """A number that is the same in every run."""
        return self._symbol("s")

    def entries(self) -> Size:
        """A number of entries of rows."""
        return self._symbol("n")

    def distinct(self) -> Size:
        """A number of values that differ."""
        return self._symbol("u")

    def width(self) -> Size:
        """The width of the widest row."""
        return self._symbol("w")

    def flag(self, name: str) -> bool:
        """A bool attribute."""
        return bool(self.node.attr[name].b) if name in self.node.attr else False

    def integer(self, name: str, default: int = 0) -> int:
        """An int attribute."""
        return int(self.node.attr[name].i) if name in self.node.attr else default

    def integers(self, name: str) -> list[int]:
        """An attribute that is a list of ints."""
        return list(self.node.attr[name].list.i) if name in self.node.attr else []

    def text(self, name: str) -> str:
        """A string attribute."""
        return self.node.attr[name].s.decode() if name in self.node.attr else ""

    def dtype(self, name: str = "T") -> int:
        """A dtype attribute."""
        return int(self.node.attr[name].type) if name in self.node.attr else 0

    def shape(self, name: str = "shape") -> tuple[Size, ...] | None:
        """A shape attribute, with symbols for what it leaves open."""
        return self.sizes(self.node.attr[name].shape) if name in self.node.attr else None

    def sizes(self, shape: Any) -> tuple[Size, ...] | None:
        """Returns the sizes of a TensorShapeProto."""
        if shape.unknown_rank:
            return None
        return tuple(Size.of(dim.size) if dim.size >= 0 else self.unknown() for dim in shape.dim)

    def numbers(self, index: int) -> list[int]:
        """The numbers of an input that is a known constant."""
        found = self.inputs[index].numbers() if self.inputs[index].kind is Kind.SAME else None
        if found is None:
            raise MixedError("an axis or a size is not known before it runs")
        return found


Rule = Callable[[NodeCall], list[Value]]
RULES: Final[dict[str, Rule]] = {}
OUTPUTS: Final[dict[str, Callable[[Any], list[tuple[str, int]]]]] = {}
"""Of operations with several named outputs: the names, and how many tensors each is."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule for the operations `names` to RULES."""

    def add(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return add


def named_outputs(op: str, *names: str) -> None:
    """Say that `op` has one output of each of `names`."""
    OUTPUTS[op] = lambda _: [(name, 1) for name in names]


def known_shape(shape: tuple[Size, ...] | None) -> tuple[Size, ...]:
    """Return `shape`. Raise MixedError if the number of dimensions is not known."""
    if shape is None:
        raise MixedError("the number of dimensions of an input is not known")
    return shape


def as_rows(value: Value, *kinds: Kind) -> Value:
    """Return `value`. Raise MixedError unless it holds rows, or is of one of `kinds`."""
    if value.kind is Kind.SIZE:
        raise MixedError(USES_BATCH_SIZE)
    if value.kind not in (kinds or (Kind.ROWS,)):
        raise MixedError(
            USES_POSITION if value.kind in (Kind.POINTER, Kind.INDICES, Kind.SPLITS, Kind.ENDS) else "rows meet here"
        )
    return value


def is_all_same(call: NodeCall) -> bool:
    """Returns True if every input is the same in every run."""
    return all(value.kind is Kind.SAME for value in call.inputs)


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
        if any(not size.is_same and not is_width(size) for index, size in enumerate(known) if index != axis):
            raise MixedError("two axes depend on the batch size")
    return Value(Kind.ROWS, known, axis, **more)


def is_width(size: Size) -> bool:
    """Returns True if `size` is made of widths and of numbers that are the same in every run."""
    return all(name[0] in "sw" for name in size.symbols)


def numbers_value(shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """Return the value of a tensor of integers that are known as `sizes`."""
    kind = Kind.SAME if all(size.is_same for size in sizes) else Kind.SIZE
    return Value(kind, shape, sizes=tuple(sizes))


def in_range(sizes: Iterable[Size], dtype: int) -> bool:
    """Returns True if integers of `dtype` hold these numbers in a run of less than 2**14 rows. Other numbers wrap around."""
    largest = 2**63 if dtype == INT64 else 2**31
    for size in sizes:
        for names, number in size.terms:
            if not -largest <= number < largest:
                return False
            if size.symbols and abs(number) > (largest >> 15 if names else largest >> 1):
                return False
    return True


def computed_value(dtype: int, shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """A tensor of integers that arithmetic makes."""
    if in_range(sizes, dtype):
        return numbers_value(shape, sizes)
    if all(size.is_same for size in sizes):
        return same(shape)
    raise MixedError(f"{USES_BATCH_SIZE}, and wraps around")
