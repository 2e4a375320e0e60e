"""What a proof knows of a tensor: how its value in a run of several requests follows from those in runs of each alone.

Symbols of sizes, by their first letter: `n0` is the number of rows of the inputs, and other `n` are numbers of entries that
rows have; both add up over the requests of a run. `u` is a number of values that differ, each of which stands for itself. `s` is a
number that is the same in every run. `w` is the width of the widest row.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

__all__ = ["ONE", "ROWS", "Kind", "MixedError", "Size", "Value", "broadcast", "equal_size", "mixed", "same"]


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

    @property
    def is_same(self) -> bool:
        """Returns True if the size is the same in every run."""
        return all(name[0] == "s" for name in self.symbols)

    @property
    def is_width(self) -> bool:
        """Returns True if the size is made of widths and of numbers that are the same in every run."""
        return all(name[0] in "sw" for name in self.symbols)

    @property
    def is_count(self) -> bool:
        """Returns True if the size counts rows or entries, times a number that is the same in every run."""
        if len(self.terms) != 1 or self.terms[0][1] < 1:
            return False
        return sum(name[0] in "nu" for name in self.terms[0][0]) == 1

    @property
    def is_distinct(self) -> bool:
        """Returns True if the size counts distinct values."""
        return any(name[0] == "u" for name in self.symbols)

    @property
    def is_padded(self) -> bool:
        """Returns True if the size depends on the widest row of a run."""
        return any(name[0] == "w" for name in self.symbols)

    def __add__(self, other: "Size") -> "Size":
        """The sum."""
        found = dict(self.terms)
        for names, number in other.terms:
            found[names] = found.get(names, 0) + number
        return Size(tuple(sorted((names, number) for names, number in found.items() if number)))

    def __mul__(self, other: "Size") -> "Size":
        """The product."""
        total = Size(())
        for names, number in self.terms:
            parts = [(tuple(sorted(names + more)), number * times) for more, times in other.terms]
            for part in parts:
                total += Size((part,))
        return total

    def __sub__(self, other: "Size") -> "Size":
        """The difference."""
        return self + other * Size.of(-1)

    def divided(self, other: "Size") -> "Size | None":
        """The quotient, where it is known to be exact; `other` is one product."""
        if len(other.terms) != 1:
            return None
        divisor, by = other.terms[0]
        found = []
        for names, number in self.terms:
            left = list(names)
            for name in divisor:
                if name not in left:
                    return None
                left.remove(name)
            if number % by:
                return None
            found.append((tuple(left), number // by))
        return Size(tuple(sorted(found)))

    def at_least(self, other: "Size", more: int = 0) -> bool:
        """Returns True if the size is at least `other` plus `more`. A run has a row, and no size is negative."""
        gap = self - other - Size.of(more)
        one_row = Size.symbol("n0") + Size.of(1)
        total = Size(())
        for names, number in gap.terms:
            part = Size.of(number)
            for name in names:
                part *= one_row if name == "n0" else Size.symbol(name)
            total += part
        return all(number >= 0 for _, number in total.terms)


ROWS: Final = Size.symbol("n0")
ONE: Final = Size.of(1)


class Kind(enum.Enum):
    """How the value in a run follows from the values of the requests alone."""

    SAME = "constant"
    """It is equal in every run."""
    ROWS = "row by row"
    """Those of the requests behind each other, along `axis`."""
    POINTER = "positions"
    """As ROWS, with numbers that count rows or entries of the run, `target` many. None is outside."""
    INDICES = "indices"
    """[entries, rank], of which column `axis` is a POINTER, and the others are as ROWS."""
    SPLITS = "row splits"
    """One number more than rows: where their entries start, of `target` many."""
    STARTS = "row starts"
    """Row splits without the last."""
    ENDS = "row ends"
    """Row splits without the first."""
    PLACES = "places of values that differ"
    """Laid out as ROWS, where each element stands among the `target` values that differ."""
    COLUMNS = "columns"
    """Numbers from 0 up to a width."""
    SIZE = "made from the batch size"
    """Its numbers are `sizes`."""
    EVERY = "holds for every row"
    """True where it is so of every request."""
    SOME = "holds for some row"
    """True where it is so of any request."""
    LOWEST = "the lowest of all rows"
    HIGHEST = "the highest of all rows"
    HANDLE = "a variable or table"
    LIST = "a list of tensors"
    """Of which `element` is each. It is as long in every run."""
    MIXED = "mixed"
    """Anything."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor.

    Attributes:
        kind: how its values of runs belong together.
        shape: its sizes; None is an unknown rank.
        axis: of ROWS, which of its axes has the rows.
        sizes: its numbers in row-major order, of a small tensor of integers.
        array: its value, where that is a known constant.
        target: of POINTER, INDICES and SPLITS, how many rows or entries there are.
        covers: of POINTER and INDICES, whether each row has an entry, and the entries stand in the order of the rows.
        counts: of ROWS, how many entries its numbers add up to; of booleans, how many are true.
        width: of ROWS of integers, their largest, or 0.
        fill: what stands behind the values of a row in an axis of a padded size.
        reason: of MIXED, why.
        element: of HANDLE and LIST, what is in it.
        declared: of LIST, the shape that its tensors are said to have. A negative number leaves an axis open, None all of it.
    """

    kind: Kind
    shape: tuple[Size, ...] | None = None
    axis: int = 0
    sizes: tuple[Size, ...] | None = None
    array: Any = dataclasses.field(default=None, compare=False)
    target: Size | None = None
    covers: bool = False
    counts: Size | None = None
    width: Size | None = None
    fill: Any = dataclasses.field(default=None, compare=False)
    reason: str = ""
    element: "Value | None" = None
    declared: tuple[Size, ...] | None = None

    @property
    def is_padded(self) -> bool:
        """Returns True if the width of the value is that of the widest row."""
        return self.shape is not None and any(size.is_padded for size in self.shape)

    @property
    def known_shape(self) -> tuple[Size, ...]:
        """Its shape. Raises MixedError if the number of axes is not known."""
        if self.shape is None:
            raise MixedError("the number of dimensions of an input is not known")
        return self.shape

    @property
    def rank(self) -> int | None:
        """The number of axes, where it is known."""
        return None if self.shape is None else len(self.shape)

    def numbers(self) -> list[int] | None:
        """Its numbers, where all are known."""
        if self.sizes is None:
            return None
        found = [size.number for size in self.sizes]
        return None if None in found else [number for number in found if number is not None]


class MixedError(Exception):
    """An operation's result is mixed; the text says why."""


def mixed(reason: str) -> Value:
    """Returns a value that may be anything."""
    return Value(Kind.MIXED, reason=reason)


def same(shape: Iterable[Size] | None = None, sizes: Sequence[Size] | None = None, array: Any = None) -> Value:
    """Returns a value that is equal in every run."""
    known = None if shape is None else tuple(shape)
    return Value(Kind.SAME, known, sizes=None if sizes is None else tuple(sizes), array=array)


def broadcast(values: Sequence[Value], unknown: Callable[[], Size]) -> tuple[tuple[Size, ...] | None, int | None]:
    """The shape of an elementwise operation's result, and its axis of rows; None where no value has one.

    Args:
        values: ROWS, or such as are laid out like them, and SAME.
        unknown: makes a new symbol.

    Raises:
        MixedError: rows of one may stand beside rows of others.
    """
    laid_out = [value for value in values if value.kind is not Kind.SAME]
    if not laid_out:
        if any(value.shape is None for value in values):
            return None, None
        return _dims(values, unknown), None
    others = [value for value in values if value.kind is Kind.SAME and value.shape != ()]
    if not others and len(laid_out) == 1:
        return laid_out[0].shape, laid_out[0].axis
    if any(value.shape is None for value in (*laid_out, *others)):
        raise MixedError("the number of dimensions of an input is not known")
    values = [*laid_out, *others]
    rank = max(len(value.shape or ()) for value in values)
    axes = {value.axis + rank - len(value.shape or ()) for value in laid_out}
    if len(axes) > 1:
        raise MixedError("rows of one input stand beside columns of another")
    return _dims(values, unknown), axes.pop()


def equal_size(sizes: Iterable[Size], unknown: Callable[[], Size]) -> Size:
    """Return the one size that all `sizes` are, where an operation that needs equal ones succeeds. A size of 1 may be repeated.

    Raises:
        MixedError: rows of one may stand beside rows of others.
    """
    wide = {size for size in sizes if size.number != 1}
    if len(wide) < 2:
        return wide.pop() if wide else ONE
    if not all(size.is_same for size in wide):
        raise MixedError("an input of another number of rows is combined with rows")
    known = [size for size in wide if size.number is not None]
    return known[0] if len(known) == 1 else unknown()


def _dims(values: Sequence[Value], unknown: Callable[[], Size]) -> tuple[Size, ...]:
    backward = (reversed(value.shape or ()) for value in values)
    sizes = [equal_size(each, unknown) for each in itertools.zip_longest(*backward, fillvalue=ONE)]
    return tuple(reversed(sizes))
