"""Rules of slices, and of operations that repeat, pad or number elements."""

from collections.abc import Iterable, Sequence
from typing import Any

from tpuembed_serving.batching.row_proof.elementwise import is_one_width
from tpuembed_serving.batching.row_proof.rules import (
    DEPENDS_ON_WIDTH,
    MOST_KNOWN_NUMBERS,
    USES_BATCH_SIZE,
    NodeCall,
    as_rows,
    is_all_same,
    is_width,
    known_shape,
    numbers_value,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed_serving.batching.row_proof.shapes import inserted_axis, moved_axis, one_column
from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, broadcast, same


@rule("Slice")
def _slice(call: NodeCall) -> list[Value]:
    value, begin, size = call.inputs
    if is_all_same(call):
        shape = None if value.shape is None else [call.unknown() for _ in value.shape]
        starts, lengths = begin.numbers(), size.numbers()
        if value.sizes is not None and value.rank == 1 and starts and lengths:
            stop = None if lengths[0] == -1 else starts[0] + lengths[0]
            found = value.sizes[starts[0] : stop]
            return [numbers_value((Size.of(len(found)),), found)]
        if shape is not None and lengths is not None:
            shape = [Size.of(n) if n >= 0 else s for n, s in zip(lengths, shape, strict=True)]
        return [same(shape)]
    if value.kind is Kind.SIZE and value.sizes is not None and value.rank == 1:
        (start,), (length,) = call.numbers(1), call.numbers(2)
        found = value.sizes[start : None if length == -1 else start + length]
        return [numbers_value((Size.of(len(found)),), found)]
    shape = list(known_shape(value.shape))
    if begin.sizes is None or size.sizes is None:
        raise MixedError("which part is taken is not known before it runs")
    if value.kind is Kind.INDICES:
        first, at = (bound.number for bound in begin.sizes)
        if first == 0 and at is not None and [bound.number for bound in size.sizes] == [-1, 1]:
            column = one_column(value, at)
            return [moved_axis(column, [*known_shape(column.shape), Size.of(1)], 0)]
    as_rows(value)
    refuse_width(value)
    if begin.sizes[value.axis].number != 0 or not (
        size.sizes[value.axis].number == -1 or size.sizes[value.axis] == shape[value.axis]
    ):
        raise MixedError("it takes rows by their numbers")
    for axis, taken in enumerate(size.sizes):
        if axis != value.axis:
            if not taken.is_same or not begin.sizes[axis].is_same:
                raise MixedError(USES_BATCH_SIZE)
            rest = shape[axis] - begin.sizes[axis]
            if taken.number != -1:
                rest = taken if taken.at_least(Size.of(0)) else call.unknown()  # it may be -1 when it runs
            shape[axis] = rest
    return [rows_value(shape, value.axis)]


@rule("StridedSlice")
def _strided_slice(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    spec = _slice_spec(call)
    if value.kind in (Kind.SAME, Kind.SIZE) and value.rank == 1 and value.sizes is not None:
        found = _sliced_sizes(value.sizes, spec)
        if found is not None:
            return [found]
    if value.kind is Kind.SAME and any(part.kind is not Kind.SAME for part in call.inputs[1:]):
        raise MixedError(USES_BATCH_SIZE)
    if value.kind is Kind.SAME and (value.shape is None or spec is None):
        return [same()]
    if value.kind is Kind.SPLITS and spec is not None and len(spec) == 1 and spec[0][0] == "part" and spec[0][3] == 1:
        start, stop = (None if bound is None else bound.number for bound in spec[0][1:3])
        rows = (known_shape(value.shape)[0] - Size.of(1),)
        if start == 1 and spec[0][2] is None:
            return [Value(Kind.ENDS, rows, target=value.target)]
        if (spec[0][1] is None or start == 0) and stop == -1:
            return [Value(Kind.STARTS, rows, target=value.target)]
    if value.kind not in (Kind.SAME, Kind.ROWS, Kind.POINTER, Kind.INDICES):
        as_rows(value)
    if spec is None:
        raise MixedError("which part is taken is not known before it runs")
    shape = known_shape(value.shape)
    found_shape: list[Size] = []
    axis, new_axis, columns = 0, None, None
    skipped = len(shape) - sum(entry[0] not in ("new", "...") for entry in spec)
    whole: _Entry = ("part", None, None, 1)
    entries: list[_Entry] = []
    for entry in spec:
        entries += [whole] * skipped if entry[0] == "..." else [entry]
    if not any(entry[0] == "..." for entry in spec):
        entries += [whole] * skipped
    for what, begin, end, step in entries:
        if what == "new":
            if value.kind is Kind.INDICES:
                raise MixedError("an axis is added to the entries' indices")
            found_shape.append(Size.of(1))
            continue
        if axis >= len(shape):
            raise MixedError("it takes more axes than there are")
        is_whole = (
            what == "part"
            and step == 1
            and (begin is None or begin.number == 0)
            and (end is None or end == shape[axis])
        )
        if value.kind is not Kind.SAME and axis == value.axis and value.kind is not Kind.INDICES:
            if not is_whole:
                raise MixedError("it takes rows by their numbers")
            new_axis = len(found_shape)
            found_shape.append(shape[axis])
        elif value.kind is Kind.INDICES:
            if axis == 0 and not is_whole:
                raise MixedError("it takes entries by their numbers")
            if axis == 1:
                if step != 1:
                    raise MixedError("it takes several columns of the entries' indices")
                columns = what, begin, end, is_whole
        elif is_whole:
            found_shape.append(shape[axis])
        else:
            if shape[axis].is_padded:
                raise MixedError(DEPENDS_ON_WIDTH)
            if any(size is not None and not size.is_same for size in (begin, end)):
                raise MixedError(USES_BATCH_SIZE)
            if what == "part":
                found_shape.append(_length(call, shape[axis], begin, end, step))
        axis += 1
    if value.kind is Kind.INDICES:
        return [_columns(value, columns)]
    if value.kind is Kind.SAME:
        return [same(found_shape)]
    return [
        moved_axis(
            Value(value.kind, None, 0, target=value.target, holes=value.holes, fill=value.fill),
            found_shape,
            new_axis or 0,
        )
    ]


def _columns(value: Value, columns: Any) -> Value:
    what, begin, end, is_whole = columns or ("part", None, None, True)
    if is_whole:
        return value
    width = known_shape(value.shape)[1].number or 0
    start = 0 if begin is None else begin.number
    if start is None:
        raise MixedError("which part is taken is not known before it runs")
    if what == "shrink":
        return one_column(value, start % width)
    stop = width if end is None else end.number
    if stop is None or len(range(*slice(start, stop).indices(width))) != 1:
        raise MixedError("it takes several columns of the entries' indices")
    column = one_column(value, range(*slice(start, stop).indices(width))[0])
    return moved_axis(column, [*known_shape(column.shape), Size.of(1)], 0)


def _length(call: NodeCall, size: Size, begin: Size | None, end: Size | None, step: int) -> Size:
    numbers = [None if bound is None else bound.number for bound in (begin, end)]
    is_known = all(bound is None or number is not None for bound, number in zip((begin, end), numbers, strict=True))
    if size.number is not None and is_known and step:
        return Size.of(len(range(*slice(numbers[0], numbers[1], step).indices(size.number))))
    return call.unknown()


_Entry = tuple[str, Size | None, Size | None, int]


def _slice_spec(call: NodeCall) -> list[_Entry] | None:
    """(what, begin, end, step) of each entry of a slice: new, ..., shrink or part."""
    _, begin, end, strides = call.inputs
    for bound in (begin, end, strides):
        if bound.kind not in (Kind.SAME, Kind.SIZE):
            raise MixedError("which part is taken depends on rows")
    count = next((known.shape[0].number for known in (begin, end, strides) if known.shape), None)
    steps = strides.numbers()
    if count is None or steps is None:
        return None
    found: list[_Entry] = []
    for index in range(count):
        bit = 1 << index
        starts = begin.sizes[index] if begin.sizes is not None else call.unknown()
        stops = end.sizes[index] if end.sizes is not None else call.unknown()
        if call.integer("ellipsis_mask") & bit:
            found.append(("...", None, None, 1))
        elif call.integer("new_axis_mask") & bit:
            found.append(("new", None, None, 1))
        elif call.integer("shrink_axis_mask") & bit:
            found.append(("shrink", starts, None, 1))
        else:
            first = None if call.integer("begin_mask") & bit else starts
            last = None if call.integer("end_mask") & bit else stops
            found.append(("part", first, last, steps[index]))
    return found


def _sliced_sizes(sizes: Sequence[Size], spec: list[_Entry] | None) -> Value | None:
    if spec is None or len(spec) != 1 or spec[0][0] not in ("part", "shrink"):
        return None
    what, begin, end, step = spec[0]
    start, stop = (None if bound is None else bound.number for bound in (begin, end))
    if (begin is not None and start is None) or (end is not None and stop is None):
        return None
    if what == "shrink":
        if start is None or not -len(sizes) <= start < len(sizes):
            return None
        return numbers_value((), [sizes[start]])
    found = sizes[slice(start, stop, step)]
    return numbers_value((Size.of(len(found)),), found)


@rule("Fill")
def _fill_with(call: NodeCall) -> list[Value]:
    dims, value = call.inputs
    if value.kind is not Kind.SAME:
        raise MixedError(USES_BATCH_SIZE if value.kind is Kind.SIZE else "rows meet here")
    return [_spread(dims)]


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
def _broadcast_to(call: NodeCall) -> list[Value]:
    value, dims = call.inputs
    as_rows(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if value.kind is Kind.SAME and dims.kind is Kind.SAME:
        return [same(dims.sizes)]
    if dims.sizes is not None and value.shape == dims.sizes:
        return [value]
    target = _spread(dims)
    if target.shape is None:
        raise MixedError("its shape is not known before it runs")
    refuse_width(value, target)
    if value.kind is Kind.SAME:
        broadcast([value, target], call.unknown)
        return [target]
    _, axis = broadcast([value, target], call.unknown)
    if target.kind is Kind.SAME or target.axis != axis:
        raise MixedError("a fixed number of rows is asked for")
    return [_repeated(value, target.shape, axis or 0)]


@rule("Tile")
def _tile(call: NodeCall) -> list[Value]:
    value, times = call.inputs
    refuse_width(value)
    as_rows(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if is_all_same(call):
        if value.shape is None or times.sizes is None:
            return [same()]
        return [same([size * by for size, by in zip(value.shape, times.sizes, strict=True)])]
    if times.sizes is None:
        raise MixedError("how often is not known before it runs")
    shape = [size * by for size, by in zip(known_shape(value.shape), times.sizes, strict=True)]
    axes = [axis for axis, size in enumerate(shape) if not is_width(size)]
    wide = [axis for axis, by in enumerate(times.sizes) if by.is_padded]
    if any(known_shape(value.shape)[axis].number != 1 for axis in wide) or (wide and value.kind is Kind.SAME):
        raise MixedError(DEPENDS_ON_WIDTH)
    if value.kind is Kind.SAME:
        if len(axes) != 1:
            raise MixedError("two axes depend on the batch size")
        if known_shape(value.shape)[axes[0]].number != 1:
            raise MixedError("what is repeated for each row has rows of its own")
        return [rows_value(shape, axes[0])]
    if axes != [value.axis] or times.sizes[value.axis].number != 1:
        raise MixedError("rows are repeated behind each other")
    return [_repeated(value, shape, value.axis)]


def _repeated(value: Value, shape: Iterable[Size], axis: int) -> Value:
    """The same rows, with elements that stand several times in each."""
    return Value(value.kind, tuple(shape), axis, target=value.target, holes=value.holes)


@rule("Range")
def _range(call: NodeCall) -> list[Value]:
    start, limit, step = call.inputs
    if any(value.kind not in (Kind.SAME, Kind.SIZE) for value in call.inputs):
        raise MixedError("its bounds depend on rows")
    if is_all_same(call):
        numbers = [value.numbers() for value in call.inputs]
        if all(number is not None and len(number) == 1 for number in numbers):
            first, last, by = (number[0] for number in numbers if number)
            if by and len(range(first, last, by)) <= MOST_KNOWN_NUMBERS:
                found = list(range(first, last, by))
                return [same([Size.of(len(found))], [Size.of(number) for number in found])]
        size = call.unknown()
        if limit.sizes is not None and start.numbers() == [0] and step.numbers() == [1]:
            size = limit.sizes[0] if limit.sizes[0].at_least(Size.of(0)) else size  # of a negative limit it is empty
        return [same([size])]
    is_plain = start.numbers() == [0] and step.numbers() == [1] and limit.sizes is not None
    if is_plain and limit.sizes and is_one_width(limit.sizes[0]):
        return [Value(Kind.COLUMNS, limit.sizes)]
    if not is_plain or limit.sizes is None or not limit.sizes[0].is_count:
        raise MixedError(USES_BATCH_SIZE)
    if limit.sizes[0].is_padded or limit.sizes[0].is_distinct:
        raise MixedError(DEPENDS_ON_WIDTH)
    return [Value(Kind.POINTER, limit.sizes, target=limit.sizes[0])]


@rule("Pad", "PadV2", "MirrorPad")
def _pad(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if is_all_same(call):
        return [same(None if value.shape is None else [call.unknown() for _ in value.shape])]
    if len(call.inputs) > 2:
        as_rows(call.inputs[2], Kind.SAME)
    shape = list(known_shape(as_rows(value).shape))
    refuse_width(value)
    more = call.numbers(1)
    for axis, (before, behind) in enumerate(zip(more[::2], more[1::2], strict=True)):
        if axis == value.axis and (before or behind):
            raise MixedError("rows are added")
        shape[axis] += Size.of(before + behind)
    return [rows_value(shape, value.axis)]


@rule("ReverseV2")
def _reverse(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if is_all_same(call):
        return [same(value.shape)]
    axes = call.numbers(1)
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if value.axis in [axis % len(shape) for axis in axes]:
        raise MixedError("rows change their places")
    return [rows_value(shape, value.axis)]


@rule("LowerBound", "UpperBound")
def _search(call: NodeCall) -> list[Value]:
    ordered, values = call.inputs
    if is_all_same(call):
        return [same(values.shape)]
    as_rows(ordered, Kind.SAME)
    shape = known_shape(as_rows(values).shape)
    refuse_width(values)
    if values.axis != 1 or len(shape) != 2:
        raise MixedError("rows are looked for among others")
    return [rows_value(shape, 1)]


@rule("OneHot")
def _one_hot(call: NodeCall) -> list[Value]:
    value, depth = call.inputs[:2]
    for other in call.inputs[1:]:
        as_rows(other, Kind.SAME)
    size = depth.sizes[0] if depth.sizes else call.unknown()
    if value.kind is Kind.SAME:
        return [same(None if value.shape is None else inserted_axis(value.shape, call.integer("axis", -1), size))]
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    axis = call.integer("axis", -1)
    axis += len(shape) + 1 if axis < 0 else 0
    return [rows_value(inserted_axis(shape, axis, size), value.axis + (axis <= value.axis))]
