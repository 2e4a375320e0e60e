"""Rules of operations that give tensors another shape, take parts of them, or put them together."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tpuembed.row_proof.elementwise import is_one_width
from tpuembed.row_proof.rules import (
    COUNT_KINDS,
    DEPENDS_ON_WIDTH,
    MOST_KNOWN_NUMBERS,
    TAKES_ROWS,
    USES_BATCH_SIZE,
    USES_POSITION,
    NodeCall,
    arranged,
    as_rows,
    inserted,
    numbers_value,
    product,
    refuse_width,
    rows_value,
    rule,
    rule_of_axes,
    vector_of,
)
from tpuembed.row_proof.values import ONE, Kind, MixedError, Size, Value, broadcast, equal_size, same


@rule("Shape", "ShapeN", "Size", "Rank")
def _shape(call: NodeCall) -> list[Value]:
    found = []
    for value in call.inputs:
        if value.kind is Kind.SAME and value.shape is None:
            found.append(same((call.unknown(),) if call.op.startswith("Shape") else ()))
            continue
        shape = value.known_shape
        if call.op.startswith("Shape"):
            found.append(vector_of(shape))
        else:
            found.append(numbers_value((), [product(shape) if call.op == "Size" else Size.of(len(shape))]))
    return found


@rule("Reshape")
def _reshape(call: NodeCall) -> Value:
    value, target = call.inputs
    is_same = value.kind is Kind.SAME and target.kind is Kind.SAME
    if value.kind in COUNT_KINDS and target.kind is Kind.SAME:
        known = target.numbers()
        is_known = known is not None and min(known, default=0) >= 0
        return dataclasses.replace(value, shape=target.sizes if is_known else None)
    if target.kind not in (Kind.SAME, Kind.SIZE) or value.kind in (Kind.INDICES, Kind.HANDLE):
        raise MixedError("its new shape depends on rows")
    if target.sizes is None or any(size.number is None and not size.at_least(Size.of(0)) for size in target.sizes):
        if is_same:  # a size may be -1 when it runs
            return same()
        raise MixedError("its new shape is not known before it runs")
    if value.shape is None and is_same:
        return same([call.unknown() if size.number == -1 else size for size in target.sizes])
    shape = _reshaped(call, value, target.sizes)
    if value.kind in (Kind.SAME, Kind.SIZE):
        if not all(size.is_same for size in shape):
            raise MixedError(USES_BATCH_SIZE)
        numbers = [size.number for size in shape]
        array = None if value.array is None or None in numbers else value.array.reshape(numbers)
        return Value(value.kind, shape, sizes=value.sizes, array=array)
    if value.kind in (Kind.SPLITS, Kind.STARTS, Kind.ENDS):
        if shape != value.shape:
            raise MixedError(USES_POSITION)
        return value
    axis = _kept_axis(value, shape)
    fill = value.fill if _keeps_padding(value, shape) else None
    return Value(value.kind, shape, axis, target=value.target, counts=value.counts, fill=fill)


def _keeps_padding(value: Value, shape: Sequence[Size]) -> bool:
    """Returns True if a reshape adds axes at the end, or makes a vector of all. Others may move padding between values."""
    old = value.known_shape
    return not value.is_padded or len(shape) == 1 or tuple(shape[: len(old)]) == old


def _reshaped(call: NodeCall, value: Value, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape after a reshape, with its -1 worked out."""
    total = product(value.known_shape)
    shape = list(sizes)
    if [size.number for size in shape].count(-1) != 1:
        return tuple(shape)
    at = [size.number for size in shape].index(-1)
    rest = product([*shape[:at], *shape[at + 1 :]])
    found = total.divided(rest) if rest.terms else None
    if found is None:
        if not total.is_same or not rest.is_same:
            raise MixedError("rows do not stay apart")
        found = call.unknown()
    if any(name[0] in "nuw" and name != "n0" for name in rest.symbols):  # without entries -1 stands for nothing known
        raise MixedError("it fails without entries")
    shape[at] = found
    return tuple(shape)


def _kept_axis(value: Value, shape: Sequence[Size]) -> int:
    """Return the axis of rows after a reshape that keeps all axes before it."""
    old = value.known_shape
    axes = [index for index, size in enumerate(shape) if any(name[0] in "nu" for name in size.symbols)]
    before = [[size for size in each if size.number != 1] for each in (old[: value.axis], shape[: (axes or [0])[0]])]
    if len(axes) != 1 or before[0] != before[1] or not shape[axes[0]].is_count:
        raise MixedError("rows do not stay apart")
    if any(not size.is_width for size in shape[axes[0] + 1 :]):
        raise MixedError("rows do not stay apart")
    if product(shape) != product(old):
        # Other symbols for the same number: it is equal wherever the reshape succeeds, but for what a row is.
        mine, theirs = ([n for n in product(each).symbols if n[0] in "nuw"] for each in (shape, old))
        if sorted(mine) != sorted(theirs) or any(name[0] == "w" for name in mine):
            raise MixedError("rows do not stay apart")
    return axes[0]


@rule("ExpandDims", "Squeeze")
def _other_rank(call: NodeCall) -> Value:
    """Adds or removes dimensions of size 1. All other things stay: positions, padding, how far the numbers go."""
    value = call.inputs[0]
    is_new = call.op == "ExpandDims"
    axes = call.numbers(1) if is_new else list(call.attr("squeeze_dims").list.i)
    if value.kind is Kind.SAME and value.shape is None:
        return same()
    shape = value.known_shape
    if not is_new and not axes:
        if value.kind is not Kind.SAME:
            raise MixedError("a batch of one row would lose its axis")
        if any(size.number is None for size in shape):
            return same()
        axes = [axis for axis, size in enumerate(shape) if size.number == 1]
    gone = [] if is_new else [axis % len(shape) for axis in axes]
    kept = inserted(shape, axes[0], ONE) if is_new else [axis for axis in range(len(shape)) if axis not in gone]
    found = tuple(shape[axis] if isinstance(axis, int) else axis for axis in kept)
    if value.kind in (Kind.SAME, Kind.SIZE, *COUNT_KINDS):
        return dataclasses.replace(value, shape=found, array=None)
    as_rows(value, Kind.ROWS, Kind.POINTER)
    if value.axis in gone or any(shape[axis].is_padded for axis in gone):
        raise MixedError("a batch of one row would lose its axis")
    return dataclasses.replace(value, shape=found, axis=kept.index(value.axis), sizes=None, array=None)


@rule_of_axes("Transpose")
def _transpose(call: NodeCall, value: Value, _: tuple[Size, ...]) -> Value:
    if value.kind is Kind.SAME and call.inputs[1].numbers() is None:
        return same()
    return arranged(value, call.numbers(1))


@rule("Pack")
def _pack(call: NodeCall) -> Value:
    if all(value.sizes is not None and value.shape == () for value in call.inputs):
        return vector_of([size for value in call.inputs for size in value.sizes or ()])
    merged = _merged(call, call.inputs)
    if merged.shape is None:
        return same()
    return arranged(merged, inserted(merged.shape, call.attr("axis").i, Size.of(len(call.inputs))))


def _merged(call: NodeCall, parts: Sequence[Value], but: int | None = None) -> Value:
    """Return constants, or rows, of the one shape of `parts`. It must be equal, except along axis `but`, where it is the sum."""
    if all(value.kind is Kind.SAME for value in parts) and any(value.shape is None for value in parts):
        return same()
    refuse_width(*parts)
    if len({(value.kind, value.rank, value.axis) for value in parts}) > 1:
        raise MixedError("constants, or rows of another axis, are put beside rows")
    shape: list[Size] = []
    for axis, sizes in enumerate(zip(*(value.known_shape for value in parts), strict=True)):
        is_sum = axis == but
        shape.append(functools.reduce(operator.add, sizes) if is_sum else equal_size(sizes, call.unknown))
    if parts[0].kind is Kind.SAME:
        return same(shape)
    return rows_value(shape, as_rows(parts[0]).axis)


@rule("ConcatV2")
def _concat(call: NodeCall) -> Value:
    *parts, _ = call.inputs
    (axis,) = call.numbers(len(parts))
    if len(parts) == 1:
        return parts[0]
    if all(value.sizes is not None and value.rank == 1 for value in parts):
        return vector_of([size for value in parts for size in value.sizes or ()])
    is_splits = parts[-1].kind is Kind.ENDS and len(parts) == 2 and parts[0].numbers() == [0]
    if is_splits and axis in (0, -1) and parts[0].rank == parts[1].rank == 1:
        return Value(Kind.SPLITS, (parts[1].known_shape[0] + ONE,), target=parts[1].target)
    if all(value.kind is Kind.SAME for value in parts) and any(value.shape is None for value in parts):
        return same()
    axis %= len(parts[0].known_shape)
    if any(value.kind is Kind.ROWS and value.axis == axis for value in parts):
        raise MixedError("rows of different inputs stand behind each other")
    return _merged(call, parts, axis)


@rule_of_axes()
def _unpack_axes(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    axis = call.attr("axis").i % len(shape)
    return arranged(value, [own for own in range(len(shape)) if own != axis], TAKES_ROWS)


@rule("Unpack")
def _unpack(call: NodeCall) -> list[Value] | Value:
    (value,) = call.inputs
    if value.sizes is not None and value.rank == 1:
        return [numbers_value((), [size]) for size in value.sizes]
    if value.kind is Kind.INDICES and call.attr("axis").i in (1, -1):
        return [one_column(value, index) for index in range(call.attr("num").i)]
    return _unpack_axes(call)


@rule("Split", "SplitV")
def _split(call: NodeCall) -> list[Value] | Value:
    value, axis_at = (call.inputs[1], 0) if call.op == "Split" else (call.inputs[0], 2)
    as_rows(value, Kind.ROWS, Kind.SAME)
    refuse_width(value)
    if call.is_same and (value.shape is None or call.inputs[axis_at].numbers() is None):
        return same()
    shape, (axis,), count = value.known_shape, call.numbers(axis_at), call.attr("num_split").i
    axis %= len(shape)
    sizes = [shape[axis].divided(Size.of(count))] * count
    if call.op == "SplitV":
        known = as_rows(call.inputs[1], Kind.SAME).sizes
        sizes = [size if size.at_least(Size.of(0)) else None for size in known] if known else [None] * count
    others = range(axis), range(axis + 1, len(shape))
    return [
        arranged(value, [*others[0], call.unknown() if size is None else size, *others[1]], TAKES_ROWS)
        for size in sizes
    ]


def one_column(value: Value, index: int, *, keep: bool = False) -> Value:
    """A column of the indices of entries: a vector, or [entries, 1] to `keep` the axis."""
    shape = (*value.known_shape[:1], *([ONE] if keep else []))
    if index % (value.known_shape[1].number or 1) == value.axis:
        return Value(Kind.POINTER, shape, target=value.target, covers=value.covers)
    return rows_value(shape, 0)


# ---- parts


@rule("Slice")
def _slice(call: NodeCall) -> Value:
    value, begin, size = call.inputs
    first, most = begin.numbers(), size.numbers()
    if value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and value.rank == 1 and first and most:
        return vector_of(value.sizes[first[0] : None if most[0] == -1 else first[0] + most[0]])
    starts, lengths = begin.sizes, size.sizes
    if call.is_same and (value.shape is None or starts is None or lengths is None):
        return same(None if value.shape is None else [call.unknown() for _ in value.shape])
    shape = value.known_shape
    if starts is None or lengths is None:
        raise MixedError("which part is taken is not known before it runs")
    if value.kind is Kind.INDICES and [one.number for one in (starts[0], *lengths)] == [0, -1, 1]:
        return one_column(value, call.numbers(1)[1], keep=True)
    as_rows(value, Kind.ROWS, Kind.SAME)
    refuse_width(value)
    axes: list[int | Size] = []
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start.number == 0 and (length.number == -1 or length == shape[axis]):
            axes.append(axis)
        elif not length.is_same or not start.is_same:
            raise MixedError(USES_BATCH_SIZE)
        elif length.number == -1:
            axes.append(shape[axis] - start)
        else:
            axes.append(length if length.at_least(Size.of(0)) else call.unknown())  # it may be -1 when it runs
    return arranged(value, axes, TAKES_ROWS)


@rule("StridedSlice")
def _strided_slice(call: NodeCall) -> Value:
    value, *bounds = call.inputs
    for bound in bounds:
        as_rows(bound, Kind.SAME, Kind.SIZE)
    spec = _slice_spec(call)
    part = spec[0] if spec is not None and len(spec) == 1 and isinstance(spec[0], _Part) else None
    if part and value.kind in (Kind.SAME, Kind.SIZE) and value.rank == 1 and value.sizes is not None:
        found = _sliced_sizes(value.sizes, part)
        if found is not None:
            return found
    if value.kind is Kind.SAME and any(bound.kind is not Kind.SAME for bound in bounds):
        raise MixedError(USES_BATCH_SIZE)
    if value.kind is Kind.SAME and (value.shape is None or spec is None):
        return same()
    if value.kind is Kind.SPLITS and part and part.step == 1:
        rows = (value.known_shape[0] - ONE,)
        if part == _Part(ONE, None):
            return Value(Kind.ENDS, rows, target=value.target)
        if part.begin in (None, Size.of(0)) and part.end == Size.of(-1):
            return Value(Kind.STARTS, rows, target=value.target)
    as_rows(value, Kind.SAME, Kind.ROWS, Kind.POINTER, Kind.INDICES)
    if spec is None:
        raise MixedError("which part is taken is not known before it runs")
    shape = value.known_shape
    spread = [entry for entry in spec if entry != "..."]
    more = [_Part()] * (len(shape) - sum(entry != "new" for entry in spread))
    at = spec.index("...") if "..." in spec else len(spec)
    entries = [*spec[:at], *more, *spec[at + 1 :]]
    if value.kind is Kind.INDICES:
        return _columns(value, entries)
    axes: list[int | Size] = []
    axis = 0
    for entry in entries:
        if isinstance(entry, str):
            axes.append(ONE)
            continue
        if entry.is_whole(shape[axis]):
            axes.append(axis)
        elif value.kind is not Kind.SAME and axis == value.axis:
            raise MixedError(TAKES_ROWS)
        elif shape[axis].is_padded:
            raise MixedError(DEPENDS_ON_WIDTH)
        elif any(size is not None and not size.is_same for size in (entry.begin, entry.end)):
            raise MixedError(USES_BATCH_SIZE)
        elif not entry.shrinks:
            axes.append(entry.length(call, shape[axis]))
        axis += 1
    found_shape = tuple(shape[axis] if isinstance(axis, int) else axis for axis in axes)
    if value.kind is Kind.SAME:
        return same(found_shape)
    return Value(value.kind, found_shape, axes.index(value.axis), target=value.target, fill=value.fill)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a slice takes of one axis: an element if it `shrinks`, else from `begin` to `end`. None is the first, or the last."""

    begin: Size | None = None
    end: Size | None = None
    step: int = 1
    shrinks: bool = False

    def is_whole(self, size: Size) -> bool:
        """Returns True if it takes a whole axis of this size."""
        is_forward = self.step == 1 and not self.shrinks
        return is_forward and self.begin in (None, Size.of(0)) and self.end in (None, size)

    def bounds(self) -> tuple[int | None, int | None] | None:
        """Returns the numbers of the bounds. None if one is not known."""
        numbers = [None if bound is None else bound.number for bound in (self.begin, self.end)]
        is_known = all(bound is None or n is not None for bound, n in zip((self.begin, self.end), numbers, strict=True))
        return (numbers[0], numbers[1]) if is_known else None

    def length(self, call: NodeCall, size: Size) -> Size:
        """Returns how many elements it takes of an axis of this size."""
        bounds = self.bounds()
        if size.number is None or bounds is None:
            return call.unknown()
        return Size.of(len(range(*slice(*bounds, self.step).indices(size.number))))


def _slice_spec(call: NodeCall) -> "list[_Part | str] | None":
    """What a slice takes: a _Part of the next axis, "..." or "new". None if it is not known."""
    _, begin, end, strides = call.inputs
    count = next((known.shape[0].number for known in (begin, end, strides) if known.shape), None)
    steps = strides.numbers()
    if count is None or steps is None:
        return None
    found: list[_Part | str] = []
    for index in range(count):
        masks = {name: bool(call.attr(f"{name}_mask").i >> index & 1) for name in _MASKS}
        first = begin.sizes[index] if begin.sizes is not None else call.unknown()
        last = end.sizes[index] if end.sizes is not None else call.unknown()
        if masks["ellipsis"] or masks["new_axis"]:
            found.append("..." if masks["ellipsis"] else "new")
        elif masks["shrink_axis"]:
            found.append(_Part(first, shrinks=True))
        else:
            found.append(_Part(None if masks["begin"] else first, None if masks["end"] else last, steps[index]))
    return found


_MASKS = ("ellipsis", "new_axis", "shrink_axis", "begin", "end")


def _sliced_sizes(sizes: Sequence[Size], part: _Part) -> Value | None:
    bounds = part.bounds()
    if bounds is None:
        return None
    if not part.shrinks:
        return vector_of(sizes[slice(*bounds, part.step)])
    start = bounds[0]
    return numbers_value((), [sizes[start]]) if start is not None and -len(sizes) <= start < len(sizes) else None


def _columns(value: Value, entries: "Sequence[_Part | str]") -> Value:
    """Return all columns of the indices of entries, or one."""
    entries_part, part = entries
    if isinstance(entries_part, str) or isinstance(part, str) or not entries_part.is_whole(value.known_shape[0]):
        raise MixedError("it takes entries by their numbers")
    size = value.known_shape[1]
    if part.is_whole(size):
        return value
    bounds = part.bounds()
    if bounds is None or size.number is None or part.step != 1:
        raise MixedError("which part is taken is not known before it runs")
    if part.shrinks:
        return one_column(value, bounds[0] or 0)
    taken = range(*slice(*bounds).indices(size.number))
    if len(taken) != 1:
        raise MixedError("it takes several columns of the entries' indices")
    return one_column(value, taken[0], keep=True)


# ---- repeated and numbered


@rule("Fill")
def _fill_with(call: NodeCall) -> Value:
    dims, value = call.inputs
    as_rows(value, Kind.SAME)
    return _spread(dims)


def _spread(dims: Value) -> Value:
    """A tensor of this shape that is the same for each row."""
    if dims.sizes is None:
        if dims.kind is not Kind.SAME:
            raise MixedError("its shape depends on rows")
        return same()
    axes = [axis for axis, size in enumerate(dims.sizes) if not size.is_same]
    if not axes:
        return same(dims.sizes)
    if len(axes) > 1 or dims.sizes[axes[0]].is_padded:
        raise MixedError("two axes depend on the batch size")
    return rows_value(dims.sizes, axes[0])


@rule("BroadcastTo")
def _broadcast_to(call: NodeCall) -> Value:
    value, dims = call.inputs
    as_rows(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if dims.sizes is not None and value.shape == dims.sizes:
        return value
    target = _spread(dims)
    if target.kind is Kind.SAME and value.kind is Kind.SAME:
        return target
    if target.shape is None:
        raise MixedError("its shape is not known before it runs")
    refuse_width(value, target)
    _, axis = broadcast([value, target], call.unknown)
    if target.kind is Kind.SAME or target.axis != axis:
        raise MixedError("a fixed number of rows is asked for")
    return target if value.kind is Kind.SAME else _repeated(value, target.shape, target.axis)


@rule("Tile")
def _tile(call: NodeCall) -> Value:
    value, times = call.inputs
    refuse_width(value)
    as_rows(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if call.is_same and (value.shape is None or times.sizes is None):
        return same()
    if times.sizes is None:
        raise MixedError("how often is not known before it runs")
    own = value.known_shape
    shape = [size * by for size, by in zip(own, times.sizes, strict=True)]
    if call.is_same:
        return same(shape)
    axes = [axis for axis, size in enumerate(shape) if not size.is_width]
    wide = [axis for axis, by in enumerate(times.sizes) if by.is_padded]
    if any(own[axis].number != 1 for axis in wide) or (wide and value.kind is Kind.SAME):
        raise MixedError(DEPENDS_ON_WIDTH)
    if value.kind is Kind.SAME:
        if len(axes) != 1 or own[axes[0]].number != 1:
            raise MixedError("what is repeated for each row has rows of its own")
        return rows_value(shape, axes[0])
    if axes != [value.axis] or times.sizes[value.axis].number != 1:
        raise MixedError("rows are repeated behind each other")
    return _repeated(value, shape, value.axis)


def _repeated(value: Value, shape: Iterable[Size], axis: int) -> Value:
    """The same rows, with elements that stand several times in each."""
    return Value(value.kind, tuple(shape), axis, target=value.target)


@rule("Range")
def _range(call: NodeCall) -> Value:
    start, limit, step = (as_rows(value, Kind.SAME, Kind.SIZE) for value in call.inputs)
    is_plain = start.numbers() == [0] and step.numbers() == [1] and limit.sizes is not None
    size = limit.sizes[0] if is_plain and limit.sizes else call.unknown()
    if call.is_same:
        numbers: list[Any] = [value.numbers() for value in call.inputs]
        if None not in numbers and all(map(len, numbers)) and numbers[2] != [0]:
            found = range(*(number[0] for number in numbers))
            if len(found) <= MOST_KNOWN_NUMBERS:
                return vector_of([Size.of(number) for number in found])
        return same([size if size.at_least(Size.of(0)) else call.unknown()])  # of a negative limit it is empty
    if is_plain and is_one_width(size):
        return Value(Kind.COLUMNS, (size,))
    if not is_plain or not size.is_count:
        raise MixedError(USES_BATCH_SIZE)
    if size.is_padded or size.is_distinct:
        raise MixedError(DEPENDS_ON_WIDTH)
    return Value(Kind.POINTER, (size,), target=size)


@rule_of_axes("Pad", "PadV2", "MirrorPad")
def _pad(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    if value.kind is Kind.SAME and call.inputs[1].numbers() is None:
        return same([call.unknown() for _ in shape])
    more = call.numbers(1)
    pairs = enumerate(zip(more[::2], more[1::2], strict=True))
    axes = [shape[axis] + Size.of(sum(pair)) if any(pair) else axis for axis, pair in pairs]
    return arranged(value, axes, "rows are added")


@rule_of_axes("ReverseV2")
def _reverse(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    if value.kind is Kind.ROWS and value.axis in [axis % len(shape) for axis in call.numbers(1)]:
        raise MixedError("rows change their places")
    return arranged(value, range(len(shape)))


@rule_of_axes("OneHot")
def _one_hot(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    depth = call.inputs[1]
    axis = call.attr("axis").i if "axis" in call.node.attr else -1
    return arranged(value, inserted(shape, axis, depth.sizes[0] if depth.sizes else call.unknown()))
