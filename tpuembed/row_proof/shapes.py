"""Rules of operations that give tensors another shape, take parts of them, or put them together."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

from tpuembed.row_proof.values import ONE, Kind, MixedError, NodeCall, Size, Value, Why, rule, same


@rule("Shape ShapeN Size Rank")
def _shape(call: NodeCall) -> list[Value]:
    found, is_shape = [], call.op.startswith("Shape")
    for value in call.inputs:
        if value.kind is Kind.SAME and value.shape is None:
            found.append(same((call.unknown(),) if is_shape else ()))
            continue
        shape = value.known_shape
        number = Size.product(shape) if call.op == "Size" else Size.of(len(shape))
        found.append(Value.integers(shape) if is_shape else Value.integers([number], ()))
    return found


@rule("Reshape")
def _reshape(call: NodeCall) -> Value:
    value, target = call.inputs
    if value.is_of_all and target.kind is Kind.SAME:
        known = target.numbers()
        is_known = known is not None and min(known, default=0) >= 0
        return dataclasses.replace(value, shape=target.sizes if is_known else None)
    if target.kind not in (Kind.SAME, Kind.SIZE) or value.kind in (Kind.INDICES, Kind.HANDLE):
        raise MixedError("its new shape depends on rows")
    if target.sizes is None or any(size.number is None and not size.at_least(Size.of(0)) for size in target.sizes):
        raise MixedError("its new shape is not known before it runs")  # a size may be -1 then
    if value.shape is None and call.is_same:
        return same([call.unknown() if size.number == -1 else size for size in target.sizes])
    old, given = value.known_shape, [size.number for size in target.sizes]
    shape, total = target.sizes, Size.product(old)
    if given.count(-1) == 1:  # work it out
        at = given.index(-1)
        rest = Size.product([*shape[:at], *shape[at + 1 :]])
        found = total.divided(rest) if rest.terms else None
        if found is None and not (total.is_same and rest.is_same):
            raise MixedError(Why.STAY_APART)
        # Without entries -1 stands for nothing known.
        if any(name[0] in "nuw" and name != "n0" for name in rest.symbols):
            raise MixedError("it fails without entries")
        shape = (*shape[:at], found or call.unknown(), *shape[at + 1 :])
    if value.kind in (Kind.SAME, Kind.SIZE):
        if not all(size.is_same for size in shape):
            raise MixedError(Why.USES_BATCH_SIZE)
        numbers = [size.number for size in shape]
        array = None if value.array is None or None in numbers else value.array.reshape(numbers)
        return Value(value.kind, shape, sizes=value.sizes, array=array)
    if value.kind in (Kind.SPLITS, Kind.STARTS, Kind.ENDS):
        if shape != old:
            raise MixedError(Why.USES_POSITION)
        return value
    axes = [index for index, size in enumerate(shape) if size.has("nu")]
    before = [[size for size in each if size.number != 1] for each in (old[: value.axis], shape[: (axes or [0])[0]])]
    if len(axes) != 1 or before[0] != before[1] or not shape[axes[0]].is_count:
        raise MixedError(Why.STAY_APART)
    if Size.product(shape) != total:
        # Other symbols for the same number: it is equal wherever the reshape succeeds, but for what a row is.
        mine, theirs = ([n for n in each.symbols if n[0] in "nuw"] for each in (Size.product(shape), total))
        if sorted(mine) != sorted(theirs) or any(name[0] == "w" for name in mine):
            raise MixedError(Why.STAY_APART)
    # Padding stays behind the values if axes are added at the end, or all become a vector. Else it may move between values.
    keeps_padding = not value.is_padded or len(shape) == 1 or shape[: len(old)] == old
    fill = value.fill if keeps_padding else None
    return Value(value.kind, shape, axes[0], target=value.target, counts=value.counts, fill=fill)


@rule("ExpandDims Squeeze")
def _other_rank(call: NodeCall) -> Value:
    """Adds or removes dimensions of size 1. All other things stay: positions, padding, how far the numbers go."""
    value = call.inputs[0]
    is_new = call.op == "ExpandDims"
    axes = call.numbers(1) if is_new else list(call.attr("squeeze_dims").list.i)
    shape = value.known_shape
    if not is_new and not axes:
        if value.kind is not Kind.SAME or any(size.number is None for size in shape):
            raise MixedError("a batch of one row would lose its axis")
        axes = [axis for axis, size in enumerate(shape) if size.number == 1]
    gone = [] if is_new else [axis % len(shape) for axis in axes]
    kept: list[int | Size] = [axis for axis in range(len(shape)) if axis not in gone]
    if is_new:
        kept.insert(axes[0] % (len(shape) + 1), ONE)
    found = tuple(shape[axis] if isinstance(axis, int) else axis for axis in kept)
    if value.kind in (Kind.SAME, Kind.SIZE) or value.is_of_all:
        return dataclasses.replace(value, shape=found, array=None)
    value.of(Kind.ROWS, Kind.POINTER)
    if value.axis in gone or any(shape[axis].has("w") for axis in gone):
        raise MixedError("a batch of one row would lose its axis")
    return dataclasses.replace(value, shape=found, axis=kept.index(value.axis), sizes=None, array=None)


@rule("Pack")
def _pack(call: NodeCall) -> Value:
    if all(value.sizes is not None and value.shape == () for value in call.inputs):
        return Value.integers([size for value in call.inputs for size in value.sizes or ()])
    return _merged(call, call.inputs).expanded(call.attr("axis").i, Size.of(len(call.inputs)))


def _merged(call: NodeCall, parts: Sequence[Value], but: int | None = None) -> Value:
    """Return constants, or rows, of the one shape of `parts`. It must be equal, except along axis `but`, where it is the sum."""
    for value in parts:
        value.unpadded()
    if len({(value.kind, value.rank, value.axis) for value in parts}) > 1:
        raise MixedError("constants, or rows of another axis, are put beside rows")
    shape = [
        functools.reduce(operator.add, sizes) if axis == but else call.equal_size(sizes)
        for axis, sizes in enumerate(zip(*(value.known_shape for value in parts), strict=True))
    ]
    return same(shape) if parts[0].kind is Kind.SAME else Value.rows(shape, parts[0].of(Kind.ROWS).axis)


@rule("ConcatV2")
def _concat(call: NodeCall) -> Value:
    *parts, _ = call.inputs
    (axis,) = call.numbers(len(parts))
    if len(parts) == 1:
        return parts[0]
    if all(value.sizes is not None and value.rank == 1 for value in parts):
        return Value.integers([size for value in parts for size in value.sizes or ()])
    is_splits = parts[-1].kind is Kind.ENDS and len(parts) == 2 and parts[0].numbers() == [0]
    if is_splits and axis in (0, -1) and parts[0].rank == parts[1].rank == 1:
        return Value(Kind.SPLITS, (parts[1].known_shape[0] + ONE,), target=parts[1].target)
    axis %= len(parts[0].known_shape)
    if any(value.kind is Kind.ROWS and value.axis == axis for value in parts):
        raise MixedError("rows of different inputs stand behind each other")
    return _merged(call, parts, axis)


@rule("Unpack")
def _unpack(call: NodeCall) -> list[Value] | Value:
    (value,) = call.inputs
    if value.sizes is not None and value.rank == 1:
        return [Value.integers([size], ()) for size in value.sizes]
    if value.kind is Kind.INDICES and call.attr("axis").i in (1, -1):
        return [one_column(value, index) for index in range(call.attr("num").i)]
    rank = len(call.along_axes()[1])
    others = [own for own in range(rank) if own != call.attr("axis").i % rank]
    return value.arranged(others, Why.TAKES_ROWS)


@rule("Split SplitV")
def _split(call: NodeCall) -> list[Value] | Value:
    value, axis_at = (call.inputs[1], 0) if call.op == "Split" else (call.inputs[0], 2)
    shape = value.of(Kind.ROWS, Kind.SAME).unpadded().known_shape
    (axis,), count = call.numbers(axis_at), call.attr("num_split").i
    axis %= len(shape)
    sizes = [shape[axis].divided(Size.of(count))] * count
    if call.op == "SplitV":
        known = call.inputs[1].of(Kind.SAME).sizes
        sizes = [size if size.at_least(Size.of(0)) else None for size in known] if known else [None] * count
    others = range(axis), range(axis + 1, len(shape))
    return [value.arranged([*others[0], size or call.unknown(), *others[1]], Why.TAKES_ROWS) for size in sizes]


def one_column(value: Value, index: int, *, keep: bool = False) -> Value:
    """A column of the indices of entries: a vector, or [entries, 1] to `keep` the axis."""
    shape = (*value.known_shape[:1], *([ONE] if keep else []))
    if index % (value.known_shape[1].number or 1) == value.axis:
        return Value(Kind.POINTER, shape, target=value.target, covers=value.covers)
    return Value.rows(shape, 0)


# ---- parts


@rule("Slice")
def _slice(call: NodeCall) -> Value:
    value, begin, size = call.inputs
    first, most = begin.numbers(), size.numbers()
    if value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and value.rank == 1 and first and most:
        return Value.integers(value.sizes[first[0] : None if most[0] == -1 else first[0] + most[0]])
    starts, lengths = begin.sizes, size.sizes
    if call.is_same and value.shape is not None and (starts is None or lengths is None):
        return same([call.unknown() for _ in value.shape])
    shape = value.known_shape
    if starts is None or lengths is None:
        raise MixedError(Why.UNKNOWN_PART)
    if value.kind is Kind.INDICES and [one.number for one in (starts[0], *lengths)] == [0, -1, 1]:
        return one_column(value, call.numbers(1)[1], keep=True)
    value.of(Kind.ROWS, Kind.SAME).unpadded()
    axes: list[int | Size] = []
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start.number == 0 and (length.number == -1 or length == shape[axis]):
            axes.append(axis)
        elif not length.is_same or not start.is_same:
            raise MixedError(Why.USES_BATCH_SIZE)
        elif length.number == -1:
            axes.append(shape[axis] - start)
        else:
            axes.append(length if length.at_least(Size.of(0)) else call.unknown())  # it may be -1 when it runs
    return value.arranged(axes, Why.TAKES_ROWS)


_Entry = Size | slice | EllipsisType | None
"""What a slice takes, as Python writes it: the element of an axis, a part of one, all of several, or a new axis."""


def _is_whole(entry: _Entry, size: Size) -> bool:
    """Returns True if it takes a whole axis of this size."""
    if not isinstance(entry, slice) or entry.step != 1:
        return False
    return entry.start in (None, Size.of(0)) and entry.stop in (None, size)


def _in_numbers(entry: Size | slice) -> Any:
    """Returns an element or a part in numbers. None if one is not known."""
    if isinstance(entry, Size):
        return entry.number
    start, stop = (None if bound is None else bound.number for bound in (entry.start, entry.stop))
    is_known = (start is None, stop is None) == (entry.start is None, entry.stop is None)
    return slice(start, stop, entry.step) if is_known else None


@rule("StridedSlice")
def _strided_slice(call: NodeCall) -> Value:
    value, *bounds = call.inputs
    for bound in bounds:
        bound.of(Kind.SAME, Kind.SIZE)
    spec = _slice_spec(call)
    part = spec[0] if spec is not None and len(spec) == 1 and isinstance(spec[0], Size | slice) else None
    if part is not None and value.kind in (Kind.SAME, Kind.SIZE) and value.rank == 1 and value.sizes is not None:
        taken, sizes = _in_numbers(part), value.sizes
        if isinstance(taken, slice):
            return Value.integers(sizes[taken])
        if taken is not None and -len(sizes) <= taken < len(sizes):
            return Value.integers([sizes[taken]], ())
    if value.kind is Kind.SAME and any(bound.kind is not Kind.SAME for bound in bounds):
        raise MixedError(Why.USES_BATCH_SIZE)
    if value.kind is Kind.SPLITS and isinstance(part, slice) and part.step == 1:
        rows = (value.known_shape[0] - ONE,)
        if part == slice(ONE, None, 1):
            return Value(Kind.ENDS, rows, target=value.target)
        if part.start in (None, Size.of(0)) and part.stop == Size.of(-1):
            return Value(Kind.STARTS, rows, target=value.target)
    value.of(Kind.SAME, Kind.ROWS, Kind.POINTER, Kind.INDICES)
    if spec is None:
        raise MixedError(Why.UNKNOWN_PART)
    shape = value.known_shape
    more = [slice(None, None, 1)] * (len(shape) - sum(isinstance(entry, Size | slice) for entry in spec))
    at = spec.index(...) if ... in spec else len(spec)
    entries = [*spec[:at], *more, *spec[at + 1 :]]
    if value.kind is Kind.INDICES:  # all columns, or one
        of_entries, column = entries
        if not isinstance(column, Size | slice) or not _is_whole(of_entries, shape[0]):
            raise MixedError("it takes entries by their numbers")
        if _is_whole(column, shape[1]):
            return value
        known, width = _in_numbers(column), shape[1].number
        if known is None or width is None or (isinstance(column, slice) and column.step != 1):
            raise MixedError(Why.UNKNOWN_PART)
        columns = [known] if isinstance(column, Size) else range(*known.indices(width))
        if len(columns) != 1:
            raise MixedError("it takes several columns of the entries' indices")
        return one_column(value, columns[0], keep=isinstance(column, slice))
    axes: list[int | Size] = []
    axis = 0
    for entry in entries:
        if not isinstance(entry, Size | slice):
            axes.append(ONE)
            continue
        size, ends = shape[axis], [entry] if isinstance(entry, Size) else [entry.start, entry.stop]
        if _is_whole(entry, size):
            axes.append(axis)
        elif value.kind is not Kind.SAME and axis == value.axis:
            raise MixedError(Why.TAKES_ROWS)
        elif size.has("w"):
            raise MixedError(Why.DEPENDS_ON_WIDTH)
        elif any(end is not None and not end.is_same for end in ends):
            raise MixedError(Why.USES_BATCH_SIZE)
        elif isinstance(entry, slice):
            taken, count = _in_numbers(entry), size.number
            is_open = taken is None or count is None
            axes.append(call.unknown() if is_open else Size.of(len(range(*taken.indices(count)))))
        axis += 1
    found_shape = tuple(shape[axis] if isinstance(axis, int) else axis for axis in axes)
    if value.kind is Kind.SAME:
        return same(found_shape)
    return Value(value.kind, found_shape, axes.index(value.axis), target=value.target, fill=value.fill)


def _slice_spec(call: NodeCall) -> list[_Entry] | None:
    """Return what a slice takes, in the order of the axes. None if it is not known."""
    _, begin, end, strides = call.inputs
    count = next((known.shape[0].number for known in (begin, end, strides) if known.shape), None)
    steps = strides.numbers()
    if count is None or steps is None:
        return None
    found: list[_Entry] = []
    for index in range(count):
        ellipsis, new, shrinks, from_first, to_last = (
            bool(call.attr(f"{name}_mask").i >> index & 1)
            for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
        )
        first = begin.sizes[index] if begin.sizes is not None else call.unknown()
        last = end.sizes[index] if end.sizes is not None else call.unknown()
        if ellipsis or new:
            found.append(... if ellipsis else None)
        elif shrinks:
            found.append(first)
        else:
            found.append(slice(None if from_first else first, None if to_last else last, steps[index]))
    return found


# ---- repeated and numbered


@rule("Fill")
def _fill_with(call: NodeCall) -> Value:
    dims, value = call.inputs
    value.of(Kind.SAME)
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
    if len(axes) > 1 or dims.sizes[axes[0]].has("w"):
        raise MixedError(Why.TWO_AXES)
    return Value.rows(dims.sizes, axes[0])


@rule("BroadcastTo")
def _broadcast_to(call: NodeCall) -> Value:
    value, dims = call.inputs
    value.of(Kind.ROWS, Kind.SAME, Kind.POINTER)
    if dims.sizes is not None and value.shape == dims.sizes:
        return value
    target = _spread(dims)
    if target.kind is Kind.SAME and value.kind is Kind.SAME:
        return target
    if target.shape is None:
        raise MixedError("its shape is not known before it runs")
    value.unpadded()
    target.unpadded()
    _, axis = call.broadcast([value, target])
    if target.kind is Kind.SAME or target.axis != axis:
        raise MixedError(Why.FIXED_ROWS)
    return target if value.kind is Kind.SAME else Value(value.kind, target.shape, target.axis, target=value.target)


@rule("Tile")
def _tile(call: NodeCall) -> Value:
    value, times = call.inputs
    own = value.of(Kind.ROWS, Kind.SAME, Kind.POINTER).unpadded().known_shape
    if times.sizes is None:
        raise MixedError("how often is not known before it runs")
    shape = tuple(size * by for size, by in zip(own, times.sizes, strict=True))
    if call.is_same:
        return same(shape)
    axes = [axis for axis, size in enumerate(shape) if size.has("nu")]
    wide = [axis for axis, by in enumerate(times.sizes) if by.has("w")]
    if any(own[axis].number != 1 for axis in wide) or (wide and value.kind is Kind.SAME):
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    if value.kind is Kind.SAME:
        if len(axes) != 1 or own[axes[0]].number != 1:
            raise MixedError("what is repeated for each row has rows of its own")
        return Value.rows(shape, axes[0])
    if axes != [value.axis] or times.sizes[value.axis].number != 1:
        raise MixedError("rows are repeated behind each other")
    return Value(value.kind, shape, value.axis, target=value.target)


@rule("Range")
def _range(call: NodeCall) -> Value:
    start, limit, step = (value.of(Kind.SAME, Kind.SIZE) for value in call.inputs)
    is_plain = start.numbers() == [0] and step.numbers() == [1] and limit.sizes is not None
    size = limit.sizes[0] if is_plain and limit.sizes else call.unknown()
    if call.is_same:
        numbers: list[Any] = [value.numbers() for value in call.inputs]
        if None not in numbers and all(map(len, numbers)) and numbers[2] != [0]:
            found = range(*(number[0] for number in numbers))
            if len(found) <= Value.LIMIT:
                return Value.integers([Size.of(number) for number in found])
        return same([size if size.at_least(Size.of(0)) else call.unknown()])  # of a negative limit it is empty
    if is_plain and size.is_one_width:
        return Value(Kind.COLUMNS, (size,))
    if not is_plain or not size.is_count:
        raise MixedError(Why.USES_BATCH_SIZE)
    if size.has("uw"):
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    return Value(Kind.POINTER, (size,), target=size)
