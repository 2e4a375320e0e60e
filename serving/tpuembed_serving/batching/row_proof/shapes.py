"""Rules of operations that give tensors another shape, or put them together."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tpuembed_serving.batching.row_proof.rules import (
    COUNT_KINDS,
    DEPENDS_ON_WIDTH,
    USES_BATCH_SIZE,
    USES_POSITION,
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
from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, same

__all__ = ["inserted_axis", "moved_axis", "one_column"]


@rule("Shape", "ShapeN")
def _shape(call: NodeCall) -> list[Value]:
    found = []
    for value in call.inputs:
        if value.kind is Kind.SAME and value.shape is None:
            found.append(same((call.unknown(),)))
        else:
            shape = known_shape(value.shape)
            found.append(numbers_value((Size.of(len(shape)),), shape))
    return found


@rule("Size")
def _size(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME and value.shape is None:
        return [same(())]
    return [numbers_value((), [functools.reduce(operator.mul, known_shape(value.shape), Size.of(1))])]


@rule("Rank")
def _rank(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME and value.shape is None:
        return [same(())]
    return [numbers_value((), [Size.of(len(known_shape(value.shape)))])]


def _product(sizes: Iterable[Size]) -> Size:
    return functools.reduce(operator.mul, sizes, Size.of(1))


@rule("Reshape")
def _reshape(call: NodeCall) -> list[Value]:
    value, target = call.inputs
    if value.kind in COUNT_KINDS and target.kind is Kind.SAME:
        known = target.numbers()
        is_known = known is not None and min(known, default=0) >= 0
        return [dataclasses.replace(value, shape=target.sizes if is_known else None)]
    if target.kind not in (Kind.SAME, Kind.SIZE) or value.kind in (Kind.INDICES, Kind.HANDLE, Kind.LIST):
        raise MixedError("its new shape depends on rows")
    if target.sizes is None:
        if value.kind is Kind.SAME and target.kind is Kind.SAME:
            return [same(None)]
        raise MixedError("its new shape is not known before it runs")
    if any(size.number is None and not size.at_least(Size.of(0)) for size in target.sizes):  # it may be -1 when it runs
        if value.kind is Kind.SAME and target.kind is Kind.SAME:
            return [same(None)]
        raise MixedError("a size of its new shape may be negative")
    if value.shape is None:
        if value.kind is Kind.SAME and target.kind is Kind.SAME and -1 not in [size.number for size in target.sizes]:
            return [same(target.sizes)]
        if value.kind is Kind.SAME and target.kind is Kind.SAME:
            return [same([call.unknown() if size.number == -1 else size for size in target.sizes])]
        raise MixedError("the number of dimensions of an input is not known")
    shape = _reshaped(call, value, target.sizes)
    if value.kind in (Kind.SAME, Kind.SIZE):
        if not all(size.is_same for size in shape):
            raise MixedError(USES_BATCH_SIZE)
        return [
            Value(value.kind, shape, sizes=value.sizes, array=None if value.array is None else _as(value.array, shape))
        ]
    if value.kind in (Kind.SPLITS, Kind.STARTS, Kind.ENDS):
        if shape != value.shape:
            raise MixedError(USES_POSITION)
        return [value]
    axis = _kept_axis(call, value, shape)
    fill = value.fill if _keeps_padding(value, shape, axis) else None
    return [Value(value.kind, shape, axis, target=value.target, holes=value.holes, counts=value.counts, fill=fill)]


def _keeps_padding(value: Value, shape: Sequence[Size], axis: int) -> bool:
    """Returns True if a reshape leaves padding behind the values of a row, or makes a vector of all.

    A reshape of [rows, 2, width] to [rows, width, 2] would put padding between values, at other places for each width.
    """
    old = known_shape(value.shape)
    wide = [[index for index, size in enumerate(each) if size.is_padded] for each in (old, shape)]
    if not value.is_padded or len(shape) == 1:
        return True
    if len(wide[0]) != 1 or len(wide[1]) != 1:
        return False
    (before,), (after,) = wide
    if after == axis:  # entries of all rows: each has the numbers behind it that it had
        return _product(old[before + 1 :]) == _product(shape[after + 1 :])
    return before != value.axis and _product(old[:before]) == _product(shape[:after])


def _as(array: Any, shape: Sequence[Size]) -> Any:
    numbers = [size.number for size in shape]
    known = [number for number in numbers if number is not None]
    return array.reshape(known) if len(known) == len(numbers) else None


def _reshaped(call: NodeCall, value: Value, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape after a reshape, with its -1 worked out."""
    total = _product(known_shape(value.shape))
    shape = list(sizes)
    if [size.number for size in shape].count(-1) != 1:
        return tuple(shape)
    at = [size.number for size in shape].index(-1)
    rest = _product([size for index, size in enumerate(shape) if index != at])
    found = total.divided(rest) if rest.terms else None
    if found is None:
        if not total.is_same or not rest.is_same:
            raise MixedError("rows do not stay apart")
        found = call.unknown()
    if any(name[0] in "nuw" and name != "n0" for name in rest.symbols):  # without entries -1 stands for nothing known
        raise MixedError("it fails without entries")
    shape[at] = found
    return tuple(shape)


def _kept_axis(call: NodeCall, value: Value, shape: Sequence[Size]) -> int:
    """Return the axis of rows after a reshape that keeps all axes before it."""
    before = [size for size in known_shape(value.shape)[: value.axis] if size.number != 1]
    axes = [index for index, size in enumerate(shape) if any(name[0] in "nu" for name in size.symbols)]
    if len(axes) != 1 or [size for size in shape[: axes[0]] if size.number != 1] != before:
        raise MixedError("rows do not stay apart")
    if not shape[axes[0]].is_count or any(not size.is_same for size in shape[axes[0] + 1 :] if not is_width(size)):
        raise MixedError("rows do not stay apart")
    if _product(shape) != _product(known_shape(value.shape)):
        # Other symbols for the same number: it is equal wherever the reshape succeeds, but for what a row is.
        mine = [n for n in _product(shape).symbols if n[0] in "nuw"]
        theirs = [n for n in _product(known_shape(value.shape)).symbols if n[0] in "nuw"]
        if sorted(mine) != sorted(theirs) or any(name[0] == "w" for name in mine) or call.op != "Reshape":
            raise MixedError("rows do not stay apart")
    return axes[0]


@rule("ExpandDims")
def _expand(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if value.kind is Kind.SAME and value.shape is None:
        return [same()]
    shape = list(known_shape(value.shape))
    (axis,) = call.numbers(1)
    axis += len(shape) + 1 if axis < 0 else 0
    if value.kind in COUNT_KINDS:
        return [dataclasses.replace(value, shape=tuple(inserted_axis(shape, axis, Size.of(1))))]
    if value.kind in (Kind.SAME, Kind.SIZE):
        shape.insert(axis, Size.of(1))
        return [Value(value.kind, tuple(shape), sizes=value.sizes)]
    as_rows(value, Kind.ROWS, Kind.POINTER)
    shape.insert(axis, Size.of(1))
    return [moved_axis(value, shape, value.axis + (axis <= value.axis))]


def moved_axis(value: Value, shape: Iterable[Size], axis: int) -> Value:
    """The same rows in another shape."""
    return Value(
        value.kind,
        tuple(shape),
        axis,
        target=value.target,
        holes=value.holes,
        covers=value.covers,
        counts=value.counts,
        width=value.width,
        fill=value.fill,
    )


@rule("Squeeze")
def _squeeze(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    axes = call.integers("squeeze_dims")
    if value.kind in COUNT_KINDS:
        return [value if value.shape == () else dataclasses.replace(value, shape=None)]
    if value.kind is Kind.SAME and (value.shape is None or not axes):
        known = value.shape if value.shape and all(size.number is not None for size in value.shape) else None
        return [same(None if known is None else [size for size in known if size.number != 1], value.sizes)]
    shape = known_shape(value.shape)
    if not axes:
        raise MixedError("a batch of one row would lose its axis")
    gone = {axis % len(shape) for axis in axes}
    left = [size for axis, size in enumerate(shape) if axis not in gone]
    if value.kind in (Kind.SAME, Kind.SIZE):
        return [Value(value.kind, tuple(left), sizes=value.sizes)]
    as_rows(value, Kind.ROWS, Kind.POINTER)
    if value.axis in gone or any(shape[axis].is_padded for axis in gone):
        raise MixedError("a batch of one row would lose its axis")
    return [moved_axis(value, left, value.axis - sum(axis < value.axis for axis in gone))]


@rule("Transpose")
def _transpose(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if value.kind is Kind.SAME and (value.shape is None or call.inputs[1].numbers() is None):
        return [same()]
    shape, order = known_shape(value.shape), call.numbers(1)
    if value.kind is Kind.SAME:
        return [same([shape[axis] for axis in order])]
    as_rows(value)
    refuse_width(value)
    return [rows_value([shape[axis] for axis in order], order.index(value.axis))]


@rule("Pack")
def _pack(call: NodeCall) -> list[Value]:
    axis = call.integer("axis")
    if all(value.sizes is not None and value.shape == () for value in call.inputs):
        sizes = [size for value in call.inputs for size in value.sizes or ()]
        return [numbers_value((Size.of(len(sizes)),), sizes)]
    if is_all_same(call):
        shape = call.inputs[0].shape
        return [same() if shape is None else same(inserted_axis(shape, axis, Size.of(len(call.inputs))))]
    first = as_rows(call.inputs[0])
    shape = known_shape(first.shape)
    for value in call.inputs:
        as_rows(value)
        refuse_width(value)
        if (
            known_shape(value.shape)[first.axis : first.axis + 1] != shape[first.axis : first.axis + 1]
            or value.axis != first.axis
        ):
            raise MixedError("rows of one input stand beside others of another")
    axis += len(shape) + 1 if axis < 0 else 0
    shape = _merged(call, [known_shape(value.shape) for value in call.inputs])
    return [rows_value(inserted_axis(shape, axis, Size.of(len(call.inputs))), first.axis + (axis <= first.axis))]


def inserted_axis(shape: Sequence[Size], axis: int, size: Size) -> list[Size]:
    """Return `shape` with another dimension of `size` at `axis`."""
    axis += len(shape) + 1 if axis < 0 else 0
    return [*shape[:axis], size, *shape[axis:]]


def _merged(call: NodeCall, shapes: Sequence[tuple[Size, ...]], but: int | None = None) -> tuple[Size, ...]:
    """Return the one shape of tensors that must have equal shapes, except along axis `but`."""
    if len({len(shape) for shape in shapes}) > 1:
        raise MixedError("inputs have different numbers of dimensions")
    found = []
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        if axis == but:
            found.append(functools.reduce(operator.add, sizes))
        elif len(set(sizes)) == 1:
            found.append(sizes[0])
        elif all(size.is_same for size in sizes):
            known = [size for size in sizes if size.number is not None]
            found.append(known[0] if known else call.unknown())
        else:
            raise MixedError("an input of another number of rows is put beside rows")
    return tuple(found)


@rule("Unpack")
def _unpack(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    axis, count = call.integer("axis"), call.integer("num")
    if value.sizes is not None and value.rank == 1:
        return [numbers_value((), [size]) for size in value.sizes]
    if value.kind is Kind.SAME:
        shape = None if value.shape is None else [*value.shape]
        if shape is not None:
            del shape[axis]
        return [same(shape)] * count
    shape = list(known_shape(value.shape))
    axis %= len(shape)
    if value.kind is Kind.INDICES and axis == 1:
        return [one_column(value, index) for index in range(count)]
    as_rows(value)
    refuse_width(value)
    if axis == value.axis:
        raise MixedError("it takes rows by their numbers")
    del shape[axis]
    return [rows_value(shape, value.axis - (axis < value.axis))] * count


@rule("ConcatV2", "Concat")
def _concat(call: NodeCall) -> list[Value]:
    at = len(call.inputs) - 1 if call.op == "ConcatV2" else 0
    parts = [value for index, value in enumerate(call.inputs) if index != at]
    (axis,) = call.numbers(at)
    if len(parts) == 1:
        return parts
    if all(value.sizes is not None and value.rank == 1 for value in parts):
        sizes = [size for value in parts for size in value.sizes or ()]
        return [numbers_value((Size.of(len(sizes)),), sizes)]
    if all(value.kind is Kind.SAME for value in parts):
        if any(value.shape is None for value in parts):
            return [same()]
        shapes = [known_shape(value.shape) for value in parts]
        return [same(_merged(call, shapes, axis % len(shapes[0])))]
    is_splits = parts[-1].kind is Kind.ENDS and len(parts) == 2 and parts[0].numbers() == [0]
    if is_splits and axis in (0, -1) and parts[0].rank == parts[1].rank == 1:
        return [Value(Kind.SPLITS, (known_shape(parts[1].shape)[0] + Size.of(1),), target=parts[1].target)]
    for value in parts:
        if value.kind is Kind.SAME:
            raise MixedError("a constant number of rows is put beside rows")
        as_rows(value)
    shapes = [known_shape(value.shape) for value in parts]
    axis %= len(shapes[0])
    if {value.axis for value in parts} != {parts[0].axis} or axis == parts[0].axis:
        raise MixedError("rows of different inputs stand behind each other")
    if any(value.is_padded for value in parts) and any(shape[axis].is_padded for shape in shapes):
        raise MixedError(DEPENDS_ON_WIDTH)
    refuse_width(*parts)
    return [rows_value(_merged(call, shapes, axis), parts[0].axis)]


@rule("Split", "SplitV")
def _split(call: NodeCall) -> list[Value]:
    value, axis_at = (call.inputs[1], 0) if call.op == "Split" else (call.inputs[0], 2)
    count = call.integer("num_split")
    if is_all_same(call):
        axis = call.inputs[axis_at].numbers()
        if value.shape is None or axis is None:
            return [same()] * count
        return [
            same([call.unknown() if at == axis[0] % len(value.shape) else size for at, size in enumerate(value.shape)])
            for _ in range(count)
        ]
    (axis_number,) = call.numbers(axis_at)
    shape = list(known_shape(as_rows(value).shape))
    refuse_width(value)
    axis_number %= len(shape)
    if axis_number == value.axis:
        raise MixedError("it takes rows by their numbers")
    known = call.inputs[1].sizes if call.op == "SplitV" else None
    even = shape[axis_number].divided(Size.of(count)) if call.op == "Split" else None
    found = []
    for index in range(count):
        size = even or (known[index] if known is not None else call.unknown())
        size = call.unknown() if not size.is_same or not size.at_least(Size.of(0)) else size
        found.append(rows_value([*shape[:axis_number], size, *shape[axis_number + 1 :]], value.axis))
    if call.op == "SplitV" and call.inputs[1].kind is not Kind.SAME:
        raise MixedError(USES_BATCH_SIZE)
    return found


def one_column(value: Value, index: int) -> Value:
    """A column of the indices of entries."""
    shape = known_shape(value.shape)[:1]
    if index % (known_shape(value.shape)[1].number or 1) == value.axis:
        return Value(Kind.POINTER, shape, target=value.target, covers=value.covers)
    return rows_value(shape, 0)
