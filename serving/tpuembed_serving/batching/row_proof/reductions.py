"""Rules of operations along an axis: reductions, sums, products of matrices."""

import dataclasses
import functools
import operator

import numpy as np

from tpuembed_serving.batching.row_proof.elementwise import is_one_width
from tpuembed_serving.batching.row_proof.rules import (
    DEPENDS_ON_WIDTH,
    INTEGERS,
    USES_POSITION,
    NodeCall,
    as_rows,
    computed_value,
    is_all_same,
    known_shape,
    named_outputs,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, broadcast, same


@rule("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def _reduce(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    keep = call.flag("keep_dims")
    axes = call.inputs[1].numbers() if call.inputs[1].kind is Kind.SAME else None
    is_vector = value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and value.rank == 1
    if is_vector and axes and call.op in ("Prod", "Sum"):
        by = operator.mul if call.op == "Prod" else operator.add
        total = functools.reduce(by, value.sizes or (), Size.of(int(call.op == "Prod")))
        return [computed_value(call.dtype(), (Size.of(1),) if keep else (), [total])]
    if (
        value.kind is Kind.SAME
        and call.op in ("All", "Any")
        and value.array is not None
        and value.rank == 1
        and axes == [0]
    ):
        outcome = getattr(np, call.op.lower())(value.array, keepdims=keep)
        return [same([Size.of(1)] if keep else (), array=np.array(outcome))]
    if value.kind is Kind.SAME and (axes is None or value.shape is None):
        return [same(() if value.shape == () else None)]
    if axes is None:
        raise MixedError("which axes it adds up is not known before it runs")
    again = {Kind.EVERY: "All", Kind.SOME: "Any", Kind.LOWEST: "Min", Kind.HIGHEST: "Max"}
    if value.kind in again and again[value.kind] == call.op and (value.shape is None or value.shape == ()):
        return [value]
    if value.kind in again and axes == []:
        return [value]
    shape = known_shape(value.shape)
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = [Size.of(1) if axis in gone else size for axis, size in enumerate(shape) if keep or axis not in gone]
    if value.kind is Kind.SAME:
        return [same(left)]
    if value.kind is Kind.POINTER and not left:
        return [Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {USES_POSITION}")]
    if value.kind in again and again[value.kind] == call.op:
        return [dataclasses.replace(value, shape=tuple(left))]
    as_rows(value)
    if any(shape[axis].is_padded for axis in gone):
        _check_fill(call, value)
    if value.axis in gone:
        kinds = {"All": Kind.EVERY, "Any": Kind.SOME}
        if call.dtype() in INTEGERS:
            kinds |= {"Min": Kind.LOWEST, "Max": Kind.HIGHEST}
        if call.op == "Max" and call.dtype() in INTEGERS and len(shape) == 1 and not keep:
            return [Value(Kind.HIGHEST, (), width=value.width)]
        if call.op not in kinds or any(size.is_padded for axis, size in enumerate(shape) if axis not in gone):
            raise MixedError("it makes one of several rows")
        return [Value(kinds[call.op], tuple(left))]
    axis = value.axis if keep else value.axis - sum(one < value.axis for one in gone)
    counts = value.counts if call.op == "Sum" else None
    return [rows_value(left, axis, counts=counts, fill=value.fill if call.op in ("All", "Any") else None)]


def _check_fill(call: NodeCall, value: Value) -> None:
    """Raise MixedError where what stands behind a row's values changes the result."""
    neutral = {"Sum": 0, "Any": False, "All": True}
    if value.fill is None or call.op not in neutral or value.fill != neutral[call.op]:
        raise MixedError(DEPENDS_ON_WIDTH)


@rule("ArgMax", "ArgMin")
def _arg(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if is_all_same(call):
        return [same()]
    (axis,) = call.numbers(1)
    shape = list(known_shape(as_rows(value).shape))
    refuse_width(value)
    axis %= len(shape)
    if axis == value.axis:
        raise MixedError("it makes one of several rows")
    del shape[axis]
    return [rows_value(shape, value.axis - (axis < value.axis))]


@rule("Softmax", "LogSoftmax")
def _softmax(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME:
        return [value]
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if value.axis == len(shape) - 1:
        raise MixedError("each row is divided by a sum of several")
    return [rows_value(shape, value.axis)]


@rule("L2Normalize", "SparseSoftmaxCrossEntropyWithLogits")
def _never(_: NodeCall) -> list[Value]:
    raise MixedError("it is not in the table of operations")


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if value.sizes is not None and value.rank == 1 and call.op in ("Cumsum", "Cumprod"):
        return [_cumulative_sizes(call, value)]
    if is_all_same(call):
        return [same(value.shape)]
    (axis,) = call.numbers(1)
    shape = known_shape(as_rows(value).shape)
    is_backward = call.op == "Cumsum" and call.flag("reverse") and call.dtype() in INTEGERS
    if is_backward and len(shape) == 2 and value.axis == 0 and axis in (1, -1) and is_one_width(shape[1]):
        if value.fill is None or value.fill != 0:
            raise MixedError(DEPENDS_ON_WIDTH)
        return [rows_value(shape, 0, fill=value.fill)]  # zeros behind a row's values change no sum that begins there
    refuse_width(value)
    if axis % len(shape) == value.axis:
        is_plain = call.op == "Cumsum" and not call.flag("exclusive") and not call.flag("reverse")
        if is_plain and len(shape) == 1 and value.counts is not None and not shape[0].is_distinct:
            return [Value(Kind.ENDS, shape, target=value.counts)]
        raise MixedError("each row is added to those before it")
    return [rows_value(shape, value.axis)]


def _cumulative_sizes(call: NodeCall, value: Value) -> Value:
    sizes = list(value.sizes or ())
    sizes = sizes[::-1] if call.flag("reverse") else sizes
    by, start = (operator.add, 0) if call.op == "Cumsum" else (operator.mul, 1)
    total, found = Size.of(start), []
    for size in sizes:
        before, total = total, by(total, size)
        found.append(before if call.flag("exclusive") else total)
    return computed_value(call.dtype(), value.shape or (), found[::-1] if call.flag("reverse") else found)


@rule("TopKV2", "TopK")
def _top(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if is_all_same(call):
        return [same(), same()]
    if call.op == "TopK":
        size = Size.of(call.integer("k"))
    else:
        as_rows(call.inputs[1], Kind.SAME)
        size = call.inputs[1].sizes[0] if call.inputs[1].sizes else call.unknown()
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if value.axis == len(shape) - 1:
        raise MixedError("rows are sorted")
    return [rows_value([*shape[:-1], size], value.axis)] * 2


named_outputs("TopKV2", "values", "indices")
named_outputs("TopK", "values", "indices")


@rule("MatrixBandPart", "MatrixTranspose", "MatrixDiagPartV3", "MatrixDiagV3")
def _band(call: NodeCall) -> list[Value]:
    if call.op != "MatrixBandPart":
        raise MixedError("it is not in the table of operations")
    value = call.inputs[0]
    if is_all_same(call):
        return [same(value.shape)]
    for bound in call.inputs[1:]:
        as_rows(bound, Kind.SAME)
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if value.axis >= len(shape) - 2:
        raise MixedError("rows are places of a matrix")
    return [rows_value(shape, value.axis)]


# ---- products


@rule("MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(call: NodeCall) -> list[Value]:
    one, other, *more = call.inputs
    if is_all_same(call):
        is_known = one.shape is not None and one.rank == other.rank
        return [same([call.unknown() for _ in known_shape(one.shape)] if is_known else None)]
    for value in (one, other):
        as_rows(value, Kind.ROWS, Kind.SAME)
    for value in more:
        as_rows(value, Kind.SAME)
    refuse_width(one, other)
    names = ("transpose_a", "transpose_b") if "MatMul" in call.op and "Batch" not in call.op else ("adj_x", "adj_y")
    first, first_axis = _matrix(one, call.flag(names[0]))
    second, second_axis = _matrix(other, call.flag(names[1]))
    if first_axis == len(first) - 1 or second_axis == len(second) - 2:
        raise MixedError("it adds up over rows")
    batches = [
        Value(Kind.ROWS, shape[:-2], axis) if axis is not None and axis < len(shape) - 2 else same(shape[:-2])
        for shape, axis in ((first, first_axis), (second, second_axis))
    ]
    in_matrix = [
        axis is not None and axis >= len(shape) - 2 for shape, axis in ((first, first_axis), (second, second_axis))
    ]
    if in_matrix[1] and more:
        raise MixedError("a bias for each row is added")
    if sum(in_matrix) + any(value.kind is Kind.ROWS for value in batches) > 1:
        raise MixedError("every row is multiplied by every other")
    shape, axis = broadcast(batches, call.unknown)
    found = [*known_shape(shape), first[-2], second[-1]]
    if in_matrix[0]:
        axis = len(found) - 2
    elif in_matrix[1]:
        axis = len(found) - 1
    return [rows_value(found, axis or 0)]


def _matrix(value: Value, turned: bool) -> tuple[tuple[Size, ...], int | None]:
    """The shape and the axis of rows of a matrix, or of several, with its last two axes as they are multiplied."""
    shape = known_shape(value.shape)
    axis = value.axis if value.kind is Kind.ROWS else None
    if turned:
        shape = (*shape[:-2], shape[-1], shape[-2])
        last = len(shape) - 1
        axis = {last: last - 1, last - 1: last}.get(axis, axis) if axis is not None else None
    return shape, axis


@rule("Einsum")
def _einsum(call: NodeCall) -> list[Value]:
    terms, _, out = call.text("equation").replace(" ", "").partition("->")
    if is_all_same(call):
        return [same()]
    if "." in terms or len(set(out)) < len(out):
        raise MixedError("its equation leaves axes open")
    sizes: dict[str, Size] = {}
    letters = set()
    for term, value in zip(terms.split(","), call.inputs, strict=True):
        as_rows(value, Kind.ROWS, Kind.SAME)
        refuse_width(value)
        shape = known_shape(value.shape)
        if len(shape) != len(term) or len(set(term)) < len(term):
            raise MixedError("its equation is of another number of dimensions")
        if value.kind is Kind.ROWS:
            letters.add(term[value.axis])
        for letter, size in zip(term, shape, strict=True):
            before = sizes.setdefault(letter, size)
            if before != size and not (before.is_same and size.is_same):
                raise MixedError("an input of another number of rows is combined with rows")
            if size.number is not None:
                sizes[letter] = size
    if len(letters) != 1 or not letters <= set(out):
        raise MixedError("it adds up over rows")
    return [rows_value([sizes[letter] for letter in out], out.index(letters.pop()))]


@rule("Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _image(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    normalizes = call.op.startswith("FusedBatchNorm")
    if normalizes and (call.flag("is_training") or "is_training" not in call.node.attr):
        raise MixedError("it normalizes by the mean of all rows")
    if is_all_same(call):
        return [same()] * (6 if normalizes else 1)
    for other in call.inputs[1:]:
        as_rows(other, Kind.SAME)
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if value.axis != 0 or len(shape) != 4:
        raise MixedError("its first axis is not that of the rows")
    if call.op in ("MaxPool", "AvgPool") and call.integers("ksize")[:1] != [1]:
        raise MixedError("it adds up over rows")
    if normalizes:
        return [rows_value(shape, 0), *[same()] * 5]
    return [rows_value([shape[0], *(call.unknown() for _ in shape[1:])], 0)]


for _name in ("FusedBatchNorm", "FusedBatchNormV2"):
    named_outputs(_name, "y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2")
named_outputs(
    "FusedBatchNormV3", "y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"
)
