"""What a proof knows of a tensor: how its value in a run of several requests follows from those in runs of each alone.

Symbols of sizes, by their first letter: `n0` is the number of rows of the inputs, and other `n` are numbers of entries that
rows have; both add up over the requests of a run. `u` is a number of values that differ, each of which stands for itself. `s` is a
number that is the same in every run. `w` is the width of the widest row.

A rule is called with a `NodeCall`, none of whose inputs is mixed. It returns the outputs of the operation, or raises `MixedError`.
"""

import dataclasses
import enum
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

__all__ = ["ONE", "OUTPUTS", "ROWS", "RULES", "Kind", "MixedError", "NodeCall", "Size", "Value", "Why", "rule", "same"]


class MixedError(Exception):
    """An operation's result is mixed; the text says why."""


class Why:
    """Reasons that several rules give."""

    USES_POSITION: Final = "a position in the batch is used as a number"
    USES_BATCH_SIZE: Final = "a number made from the batch size is used otherwise than to shape rows"
    DEPENDS_ON_WIDTH: Final = "it depends on the width of the widest row"
    TAKES_ROWS: Final = "it takes rows by their numbers"
    STAY_APART: Final = "rows do not stay apart"
    TWO_AXES: Final = "two axes depend on the batch size"
    FIXED_ROWS: Final = "a fixed number of rows is asked for"
    NOT_OF_ROWS: Final = "its entries are not those of the rows"
    SOME_DISTINCT: Final = "which of several equal values is taken depends on all rows"
    UNKNOWN_RANK: Final = "the number of dimensions of an input is not known"
    UNKNOWN_PART: Final = "which part is taken is not known before it runs"


@dataclasses.dataclass(frozen=True)
class Size:
    """A sum of products of symbols: ((symbols, coefficient), ...), sorted."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @classmethod
    def of(cls, number: int) -> "Size":
        """Returns a known number."""
        return cls((((), number),) if number else ())

    @classmethod
    def symbol(cls, name: str) -> "Size":
        """Returns an unknown number."""
        return cls((((name,), 1),))

    @classmethod
    def product(cls, sizes: "Iterable[Size]") -> "Size":
        """Returns the product of `sizes`."""
        return functools.reduce(operator.mul, sizes, cls.of(1))

    @property
    def number(self) -> int | None:
        """The number, where it is known."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def symbols(self) -> set[str]:
        """All its symbols."""
        return {name for names, _ in self.terms for name in names}

    def has(self, letters: str) -> bool:
        """Returns True if one of its symbols begins with one of these letters."""
        return any(name[0] in letters for name in self.symbols)

    @property
    def is_same(self) -> bool:
        """Returns True if the size is the same in every run."""
        return not self.has("nuw")

    @property
    def is_one_width(self) -> bool:
        """Returns True if the size is the width of the widest row and nothing else."""
        return self.has("w") and self == Size.symbol(min(self.symbols))

    @property
    def is_count(self) -> bool:
        """Returns True if the size counts rows or entries, times a number that is the same in every run."""
        if len(self.terms) != 1 or self.terms[0][1] < 1:
            return False
        return sum(name[0] in "nu" for name in self.terms[0][0]) == 1

    def __add__(self, other: "Size") -> "Size":
        found = dict(self.terms)
        for names, number in other.terms:
            found[names] = found.get(names, 0) + number
        return Size(tuple(sorted((names, number) for names, number in found.items() if number)))

    def __mul__(self, other: "Size") -> "Size":
        total = Size(())
        for (names, number), (more, times) in itertools.product(self.terms, other.terms):
            total += Size(((tuple(sorted(names + more)), number * times),))
        return total

    def __sub__(self, other: "Size") -> "Size":
        return self + other * Size.of(-1)

    def divided(self, other: "Size") -> "Size | None":
        """The quotient, where it is known to be exact; `other` is one product."""
        if len(other.terms) != 1:
            return None
        divisor, by = other.terms[0]
        found = []
        for names, number in self.terms:
            left = Counter(names)
            left.subtract(divisor)
            if number % by or min(left.values(), default=0) < 0:
                return None
            found.append((tuple(sorted(left.elements())), number // by))
        return Size(tuple(sorted(found)))

    def at_least(self, other: "Size", more: int = 0) -> bool:
        """Returns True if the size is at least `other` plus `more`. A run has a row, and no size is negative."""
        one_row, total = ROWS + ONE, Size(())
        for names, number in (self - other - Size.of(more)).terms:
            total += Size.product(
                [Size.of(number), *(one_row if name == "n0" else Size.symbol(name) for name in names)]
            )
        return all(number >= 0 for _, number in total.terms)


ROWS: Final = Size.symbol("n0")
ONE: Final = Size.of(1)


class Kind(enum.Enum):
    """How the value in a run follows from the values of the requests alone."""

    SAME = "constant"  # it is equal in every run
    ROWS = "row by row"  # those of the requests behind each other, along `axis`
    POINTER = "positions"  # as ROWS, with numbers that count rows or entries of the run, `target` many. None is outside
    INDICES = "indices"  # [entries, rank], of which column `axis` is a POINTER, and the others are as ROWS
    SPLITS = "row splits"  # one number more than rows: where their entries start, of `target` many
    STARTS = "row starts"  # row splits without the last
    ENDS = "row ends"  # row splits without the first
    PLACES = "places of values that differ"  # laid out as ROWS: where each stands among the `target` values that differ
    COLUMNS = "columns"  # numbers from 0 up to a width
    SIZE = "made from the batch size"  # its numbers are `sizes`
    EVERY = "holds for every row"  # true where it is so of every request
    SOME = "holds for some row"  # true where it is so of any request
    LOWEST = "the lowest of all rows"
    HIGHEST = "the highest of all rows"
    HANDLE = "a variable or table"
    LIST = "a list of tensors"  # of which `element` is each. It is as long in every run
    MIXED = "mixed"  # anything


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor."""

    LIMIT: ClassVar = (
        4096  # as many numbers of a constant are known. A larger one is a table, which says nothing of rows
    )

    kind: Kind
    shape: tuple[Size, ...] | None = None  # None is an unknown rank
    axis: int = 0  # of ROWS, which of its axes has the rows
    sizes: tuple[Size, ...] | None = None  # its numbers in row-major order, of a small tensor of integers
    array: Any = dataclasses.field(default=None, compare=False)  # its value, where that is a known constant
    target: Size | None = None  # of POINTER, INDICES and SPLITS, how many rows or entries there are
    covers: bool = False  # of POINTER and INDICES, whether each row has an entry, all in the order of the rows
    counts: Size | None = None  # of ROWS, how many entries its numbers add up to; of booleans, how many are true
    width: Size | None = None  # of ROWS of integers, their largest, or 0
    fill: Any = dataclasses.field(default=None, compare=False)  # what stands behind a row's values in a padded axis
    reason: str = ""  # of MIXED, why
    element: "Value | None" = None  # of HANDLE and LIST, what is in it
    # Of LIST, the shape that its tensors are said to have. A negative number leaves an axis open, None all of it.
    declared: tuple[Size, ...] | None = None

    @property
    def is_of_all(self) -> bool:
        """Returns True if the value is made of all rows, in a way that it may be reduced in again."""
        return self.kind in (Kind.EVERY, Kind.SOME, Kind.LOWEST, Kind.HIGHEST)

    @property
    def is_padded(self) -> bool:
        """Returns True if the width of the value is that of the widest row."""
        return self.shape is not None and any(size.has("w") for size in self.shape)

    @property
    def known_shape(self) -> tuple[Size, ...]:
        """Its shape. Raises MixedError if the number of axes is not known."""
        if self.shape is None:
            raise MixedError(Why.UNKNOWN_RANK)
        return self.shape

    @property
    def rank(self) -> int | None:
        """The number of axes, where it is known."""
        return None if self.shape is None else len(self.shape)

    @property
    def held(self) -> "Value":
        """What a variable's handle holds. Raises MixedError if that is not known."""
        if self.kind is not Kind.HANDLE or self.element is None:
            raise MixedError("it is not known what is looked up")
        return self.element

    def numbers(self) -> list[int] | None:
        """Its numbers, where all are known."""
        found = [number for size in self.sizes or () if (number := size.number) is not None]
        return found if self.sizes is not None and len(found) == len(self.sizes) else None

    def of(self, *kinds: Kind) -> "Value":
        """Returns the value. Raises MixedError unless it is of one of `kinds`."""
        if self.kind in kinds:
            return self
        if self.kind is Kind.SIZE:
            raise MixedError(Why.USES_BATCH_SIZE)
        is_position = self.kind in (Kind.POINTER, Kind.INDICES, Kind.SPLITS, Kind.ENDS)
        raise MixedError(Why.USES_POSITION if is_position else "rows meet here")

    def unpadded(self) -> "Value":
        """Returns the value. Raises MixedError if its width is that of the widest row."""
        if self.is_padded:
            raise MixedError(Why.DEPENDS_ON_WIDTH)
        return self

    def arranged(self, axes: Sequence[int | Size], reason: str = Why.STAY_APART) -> "Value":
        """Returns a constant, or rows, with other axes: each is the number of one of its own, or a new one of this size.

        Raises MixedError with `reason` if the axis of the rows is not among them.
        """
        own = self.known_shape
        shape = [own[axis] if isinstance(axis, int) else axis for axis in axes]
        if self.kind is Kind.SAME:
            return same(shape)
        if list(axes).count(self.of(Kind.ROWS).axis) != 1:
            raise MixedError(reason)
        return Value.rows(shape, axes.index(self.axis))

    def expanded(self, axis: int, size: Size) -> "Value":
        """Returns a constant, or rows, with another axis of `size` at `axis`."""
        rank = len(self.known_shape)
        axes: list[int | Size] = [*range(rank)]
        axes.insert(axis % (rank + 1), size)
        return self.arranged(axes)

    @classmethod
    def rows(cls, shape: Iterable[Size] | None, axis: int, **more: Any) -> "Value":
        """Returns rows of this shape along `axis`. Raises MixedError if another size depends on the batch."""
        known = None if shape is None else tuple(shape)
        if known is not None and not known[axis].is_count:
            raise MixedError(Why.STAY_APART)
        if known is not None and any(size.has("nu") for index, size in enumerate(known) if index != axis):
            raise MixedError(Why.TWO_AXES)
        return cls(Kind.ROWS, known, axis, **more)

    @staticmethod
    def in_range(sizes: Iterable[Size], dtype: Any) -> bool:
        """Returns True if integers of `dtype` hold these numbers in a run of less than 2**14 rows. Others wrap around."""
        largest = 2**63 if dtype == tf.int64 else 2**31
        for size in sizes:
            for names, number in size.terms:
                if not -largest <= number < largest:
                    return False
                if size.symbols and abs(number) > (largest >> 15 if names else largest >> 1):
                    return False
        return True

    @classmethod
    def integers(cls, sizes: Sequence[Size], shape: tuple[Size, ...] | None = None, dtype: Any = None) -> "Value":
        """Returns integers that are known as `sizes`: a vector, or a tensor of this shape. `dtype` is that of arithmetic."""
        is_same = all(size.is_same for size in sizes)
        if dtype is not None and not cls.in_range(sizes, dtype):
            if is_same:
                return same(shape)
            raise MixedError(f"{Why.USES_BATCH_SIZE}, and wraps around")
        known = (Size.of(len(sizes)),) if shape is None else shape
        return cls(Kind.SAME if is_same else Kind.SIZE, known, sizes=tuple(sizes))


def same(shape: Iterable[Size] | None = None, sizes: Sequence[Size] | None = None, array: Any = None) -> Value:
    """Returns a value that is equal in every run."""
    known = None if shape is None else tuple(shape)
    return Value(Kind.SAME, known, sizes=None if sizes is None else tuple(sizes), array=array)


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
        return self.node.attr.get(name, attr_value_pb2.AttrValue())

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

    def along_axes(self) -> tuple[Value, tuple[Size, ...]]:
        """The first input, a constant or unpadded rows, and its shape. Raises MixedError unless all others are constants."""
        value, *others = self.inputs
        shape = value.of(Kind.ROWS, Kind.SAME).unpadded().known_shape
        for other in others:
            other.of(Kind.SAME)
        return value, shape

    def equal_size(self, sizes: Iterable[Size]) -> Size:
        """Returns the size that all are, where an operation that needs equal ones succeeds. A size of 1 may be repeated."""
        wide = {size for size in sizes if size.number != 1}
        if len(wide) < 2:
            return wide.pop() if wide else ONE
        if not all(size.is_same for size in wide):
            raise MixedError("an input of another number of rows is combined with rows")
        known = [size for size in wide if size.number is not None]
        return known[0] if len(known) == 1 else self.unknown()

    def broadcast(self, values: Sequence[Value]) -> tuple[tuple[Size, ...] | None, int | None]:
        """Returns the shape of an elementwise operation's result, and its axis of rows; None where no value has one."""
        laid_out = [value for value in values if value.kind is not Kind.SAME]
        parts = [*laid_out, *(value for value in values if value.kind is Kind.SAME and value.shape != ())]
        if len(laid_out) == len(parts) == 1:
            return laid_out[0].shape, laid_out[0].axis
        if not laid_out and any(value.shape is None for value in parts):
            return None, None
        shapes = [value.known_shape for value in parts]
        rank = max(map(len, shapes), default=0)
        axes = {value.axis + rank - len(value.known_shape) for value in laid_out}
        if len(axes) > 1:
            raise MixedError("rows of one input stand beside columns of another")
        columns = itertools.zip_longest(*map(reversed, shapes), fillvalue=ONE)
        return tuple(map(self.equal_size, columns))[::-1], next(iter(axes), None)


Rule = Callable[[NodeCall], list[Value] | Value]
"""Returns the outputs, or the one value that every output has."""
RULES: Final[dict[str, Rule]] = {}
OUTPUTS: Final[dict[str, Callable[[Any], list[tuple[str, int]]]]] = {}
"""Of operations with several named outputs: the names, and how many tensors each is."""


def rule(ops: str, outputs: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to RULES. `outputs` names the outputs if they are several, of one tensor each."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops.split(), rule))
        if outputs:
            OUTPUTS.update(dict.fromkeys(ops.split(), lambda _: [(name, 1) for name in outputs]))
        return rule

    return add
