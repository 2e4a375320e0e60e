"""Rules of gathers, and of operations over the entries of rows: segments, sparse and ragged tensors, examples."""

from typing import Any

import tensorflow as tf

from tpuembed.row_proof.rules import (
    DEPENDS_ON_WIDTH,
    OUTPUTS,
    TAKES_ROWS,
    NodeCall,
    as_rows,
    named_outputs,
    numbers_value,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed.row_proof.values import ROWS, Kind, MixedError, Size, Value, same


@rule("GatherV2", "ResourceGather")
def _gather(call: NodeCall) -> Value:
    params, indices = _looked_up_in(call), call.inputs[1]
    batch_dims = call.attr("batch_dims").i
    (axis,) = call.numbers(2) if call.op == "GatherV2" else (batch_dims,)
    if params.kind in (Kind.SAME, Kind.SIZE) and indices.kind is Kind.SAME:
        if batch_dims and params.kind is Kind.SAME:
            return same()
        return _gathered_constant(params, indices, axis, batch_dims)
    if params.kind is Kind.SAME and params.shape is None and not batch_dims:
        is_of_rows = as_rows(indices).shape is None or indices.known_shape[:1] == (ROWS,)
        if axis or indices.axis or indices.is_padded or not is_of_rows:
            raise MixedError("the number of dimensions of an input is not known")
        return Value(Kind.ROWS, None, indices.axis)
    shape, inner = params.known_shape, indices.known_shape
    axis %= len(shape)
    found = (*shape[:axis], *inner[batch_dims:], *shape[axis + 1 :])
    if batch_dims:  # each row looks up in the same row
        refuse_width(as_rows(params), as_rows(indices))
        is_beside = params.axis == indices.axis < (batch_dims if batch_dims > 0 else batch_dims + len(inner))
        if not is_beside or shape[params.axis] != inner[params.axis]:
            raise MixedError(TAKES_ROWS)
        return rows_value(found, params.axis)
    if params.kind is Kind.SAME:
        return rows_value(found, axis + as_rows(indices).axis)
    as_rows(params, Kind.ROWS, Kind.POINTER, Kind.INDICES)
    if axis != params.axis:
        as_rows(params)
        as_rows(indices, Kind.SAME)
        refuse_width(params)
        return rows_value(found, params.axis if params.axis < axis else params.axis + len(inner) - 1)
    if indices.target != shape[axis]:
        raise MixedError(TAKES_ROWS)
    if indices.kind is Kind.PLACES and params.kind is Kind.ROWS:
        return rows_value(found, axis + indices.axis)
    if indices.kind is not Kind.POINTER or (params.kind is Kind.INDICES and len(inner) != 1):
        raise MixedError(TAKES_ROWS)
    sizes = params.sizes if params.kind is Kind.INDICES else None
    return Value(params.kind, found, axis + indices.axis, sizes=sizes, target=params.target)


def _looked_up_in(call: NodeCall) -> Value:
    params = call.inputs[0]
    if not call.op.startswith("Resource"):
        return params
    if params.kind is not Kind.HANDLE or params.element is None:
        raise MixedError("it is not known what is looked up")
    return params.element


def _gathered_constant(params: Value, indices: Value, axis: int, batch_dims: int) -> Value:
    """Return elements of a constant, or numbers of a shape, by constant numbers."""
    numbers, sizes = indices.numbers(), params.sizes
    is_vector = sizes is not None and params.rank == 1 and axis in (0, -1) and not batch_dims
    if is_vector and numbers is not None and all(0 <= number < len(sizes or ()) for number in numbers):
        return numbers_value(indices.known_shape, [(sizes or ())[number] for number in numbers])
    as_rows(params, Kind.SAME)
    if params.shape is None or indices.shape is None:
        return same()
    axis %= len(params.shape)
    return same([*params.shape[:axis], *indices.shape, *params.shape[axis + 1 :]])


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(call: NodeCall) -> Value:
    params, indices = _looked_up_in(call), call.inputs[1]
    if params.kind is Kind.SAME and indices.kind is Kind.SAME:
        return same()
    if call.attr("batch_dims").i:
        raise MixedError("it looks up within each row")
    inner, shape = indices.known_shape, params.known_shape
    depth = inner[-1].number
    if depth is None:
        raise MixedError("how it looks up is not known before it runs")
    if params.kind is Kind.SAME:
        if as_rows(indices).axis == len(inner) - 1:
            raise MixedError("rows are axes of what is looked up")
        return rows_value([*inner[:-1], *shape[depth:]], indices.axis)
    as_rows(params)
    is_by_row = indices.kind is Kind.POINTER and len(inner) == 2 and depth == 1 and params.axis == 0
    is_by_entry = indices.kind is Kind.INDICES and indices.axis == params.axis and indices.sizes == shape[:depth]
    if not is_by_entry and not (is_by_row and indices.target == shape[0]):
        raise MixedError(TAKES_ROWS)
    return rows_value([inner[0], *shape[depth:]], 0)


@rule("Where")
def _where(call: NodeCall) -> Value:
    (value,) = call.inputs
    if value.kind is Kind.SAME:
        return same()
    shape = as_rows(value).known_shape
    if value.is_padded and (value.fill is None or value.fill):
        raise MixedError(DEPENDS_ON_WIDTH)
    entries = value.counts if value.counts is not None and call.dtype() in (None, tf.bool) else call.symbol("n")
    if shape[value.axis].is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    if len(shape) == 1:
        return Value(Kind.POINTER, (entries, Size.of(1)), target=shape[0])
    if value.axis != 0:
        raise MixedError("entries of different rows stand beside each other")
    return Value(Kind.INDICES, (entries, Size.of(len(shape))), 0, sizes=shape, target=shape[0])


# ---- entries of rows


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _unsorted_segment(call: NodeCall) -> Value:
    data, segments, count = call.inputs
    if call.is_same:
        return same()
    as_rows(segments, Kind.POINTER)
    as_rows(data)
    refuse_width(data, segments)
    shape, inner = data.known_shape, segments.known_shape
    if data.axis != 0 or shape[: len(inner)] != inner or segments.axis != 0:
        raise MixedError("its segments are not those of the entries")
    if count.sizes is None or segments.target != count.sizes[0]:
        raise MixedError("its segments are not the rows")
    return rows_value([count.sizes[0], *shape[len(inner) :]], 0)


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
def _segment(call: NodeCall) -> Value:
    data, segments = call.inputs[:2]
    if call.is_same:
        return same()
    return _segments(as_rows(data), segments)


def _segments(data: Value, segments: Value) -> Value:
    """One row for each segment; there is none for rows behind the last entry, so that each row must have one."""
    shape, inner = data.known_shape, as_rows(segments, Kind.POINTER).known_shape
    if data.axis != 0 or len(inner) != 1 or shape[0] != inner[0] or segments.target is None:
        raise MixedError("its segments are not those of the entries")
    if not segments.covers:
        raise MixedError("the last rows may have no entries, and be left out")
    refuse_width(data, segments)
    return rows_value([segments.target, *shape[1:]], 0)


@rule("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
def _sparse_segment(call: NodeCall) -> Value:
    data, places, segments = call.inputs[:3]
    if call.is_same:
        return same()
    refuse_width(data, places, segments)
    if data.kind is Kind.SAME:
        shape = data.known_shape
        entries = as_rows(places).known_shape
    else:
        shape = as_rows(data).known_shape
        entries = as_rows(places, Kind.PLACES, Kind.POINTER).known_shape
        if data.axis != 0 or places.target != shape[0]:
            raise MixedError("it takes rows by numbers")
    if len(entries) != 1 or places.axis != 0:
        raise MixedError("its entries are no vector")
    return _segments(rows_value([entries[0], *shape[1:]], 0), segments)


@rule("Unique", "UniqueV2")
def _unique(call: NodeCall) -> list[Value] | Value:
    value = call.inputs[0]
    if call.is_same:
        return same()
    shape = as_rows(value).known_shape
    refuse_width(value)
    if len(shape) != 1:
        raise MixedError("what differs is no vector")
    if not call.dtype().is_integer and call.dtype() not in (tf.bool, tf.string):
        raise MixedError("numbers that are equal may differ, as 0.0 and -0.0 do")
    distinct = call.symbol("u")
    return [rows_value([distinct], 0), Value(Kind.PLACES, shape, target=distinct)]


named_outputs("Unique", "y", "idx")
named_outputs("UniqueV2", "y", "idx")


@rule("SparseReshape")
def _sparse_reshape(call: NodeCall) -> list[Value]:
    indices, dims, wanted = call.inputs
    if indices.kind is not Kind.INDICES or dims.sizes is None or dims.sizes != wanted.sizes:
        raise MixedError("entries change their rows")
    return [indices, dims]


named_outputs("SparseReshape", "output_indices", "output_shape")


@rule("SparseFillEmptyRows")
def _fill_rows(call: NodeCall) -> list[Value]:
    indices, values, dims, default = call.inputs
    as_rows(default, Kind.SAME)
    as_rows(values)
    if indices.kind is not Kind.INDICES or indices.axis != 0 or dims.sizes is None or indices.target is None:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or values.known_shape != indices.known_shape[:1]:
        raise MixedError("its entries are not those of the rows")
    entries = call.symbol("n")
    more = (entries, indices.known_shape[1])
    filled = Value(Kind.INDICES, more, 0, sizes=(), target=indices.target, covers=True)
    back = Value(Kind.MIXED, reason="where entries were is a position in the batch")
    return [filled, rows_value([entries], 0), rows_value([indices.target], 0), back]


named_outputs("SparseFillEmptyRows", "output_indices", "output_values", "empty_row_indicator", "reverse_index_map")


@rule("DenseBincount")
def _bincount(call: NodeCall) -> Value:
    value, size, weights = call.inputs
    if call.is_same:
        return same()
    as_rows(weights, Kind.SAME)
    if weights.shape != (Size.of(0),):
        raise MixedError("it has weights")
    shape = as_rows(value, Kind.ROWS, Kind.POINTER).known_shape
    refuse_width(value)
    if value.kind is Kind.POINTER:
        if len(shape) != 1 or size.sizes != (value.target,) or call.attr("binary_output").b:
            raise MixedError("it does not count the entries of rows")
        return rows_value(size.sizes, 0, counts=shape[0], width=call.symbol("w"))
    if len(shape) != 2 or value.axis != 0 or size.kind is not Kind.SAME:
        raise MixedError("it counts over rows")
    return rows_value([shape[0], size.sizes[0] if size.sizes else call.unknown()], 0)


@rule("SparseToDense")
def _sparse_to_dense(call: NodeCall) -> Value:
    indices, dims, values, default = call.inputs
    if call.is_same:
        return same(dims.sizes)
    as_rows(default, Kind.SAME)
    as_rows(values)
    if indices.kind is not Kind.INDICES or dims.sizes is None or indices.axis != 0:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or values.known_shape != indices.known_shape[:1]:
        raise MixedError("its entries are not those of the rows")
    if any(size.is_padded for size in dims.sizes) and indices.sizes != dims.sizes:
        raise MixedError(DEPENDS_ON_WIDTH)
    return rows_value(dims.sizes, 0, fill=default.array if default.shape == () else None)


@rule("RaggedTensorToTensor")
def _ragged_to_tensor(call: NodeCall) -> Value:
    dims, values, default, *parts = call.inputs
    types = [kind.decode() for kind in call.attr("row_partition_types").list.s]
    as_rows(default, Kind.SAME)
    as_rows(values)
    wanted = [size.number for size in dims.sizes] if dims.sizes is not None and dims.kind is Kind.SAME else None
    shape = values.known_shape
    if values.axis != 0:
        raise MixedError("its entries are not those of the rows")
    if types == ["ROW_SPLITS"]:
        splits = parts[0]
        fits = splits.kind is Kind.SPLITS and splits.target == shape[0]
        rows = splits.known_shape[0] - Size.of(1) if fits else None
    elif types == ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        ids = parts[1]
        fits = ids.kind is Kind.POINTER and ids.shape == shape[:1]
        rows = ids.target if fits and parts[0].sizes == (ids.target,) else None
    else:
        rows = None
    if rows is None:
        raise MixedError("which rows its entries are of is not known")
    if wanted is None or (wanted and wanted[0] != -1):
        raise MixedError("a fixed number of rows is asked for")
    width = Size.of(wanted[1]) if wanted[1:] and wanted[1] not in (-1, None) else call.symbol("w")
    fill = default.array if default.shape == () else None
    return rows_value([rows, width, *shape[1:]], 0, fill=fill)


def _sparse_of(call: NodeCall, rows: Size) -> tuple[Value, Value, Value]:
    """Return the indices, values and shape of sparse lists that are read from strings."""
    entries, dims = call.symbol("n"), (rows, call.symbol("w"))
    indices = Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=rows)
    return indices, rows_value([entries], 0), Value(Kind.SIZE, (Size.of(2),), sizes=dims)


@rule("ParseExampleV2")
def _parse(call: NodeCall) -> list[Value]:
    serialized, names, *others = call.inputs
    if as_rows(serialized).known_shape != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    if names.shape != (Size.of(0),):
        raise MixedError("its examples have names, of a fixed number")
    for other in (names, *others):
        as_rows(other, Kind.SAME)
    sparse = [_sparse_of(call, ROWS) for _ in range(call.attr("num_sparse").i)]
    dense = []
    for shape in call.attr("dense_shapes").list.shape:
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            raise MixedError(DEPENDS_ON_WIDTH)
        dense.append(rows_value([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0))
    entries = [call.symbol("n") for _ in call.attr("ragged_value_types").list.type]
    ragged = [rows_value([count], 0) for count in entries]
    splits = [Value(Kind.SPLITS, (ROWS + Size.of(1),), target=count) for count in entries]
    return [one[part] for part in range(3) for one in sparse] + dense + ragged + splits


def _parse_outputs(node: Any) -> list[tuple[str, int]]:
    sparse, dense = node.attr["num_sparse"].i, len(node.attr["Tdense"].list.type)
    ragged = len(node.attr["ragged_value_types"].list.type)
    names = [("sparse_indices", sparse), ("sparse_values", sparse), ("sparse_shapes", sparse), ("dense_values", dense)]
    return [*names, ("ragged_values", ragged), ("ragged_row_splits", ragged)]


OUTPUTS["ParseExampleV2"] = _parse_outputs


@rule("StringSplitV2")
def _string_split(call: NodeCall) -> list[Value]:
    words, separator = call.inputs
    as_rows(separator, Kind.SAME)
    shape = as_rows(words).known_shape
    if len(shape) != 1:
        raise MixedError("what it splits is no vector")
    if shape[0].is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    return [*_sparse_of(call, shape[0])]


named_outputs("StringSplitV2", "indices", "values", "shape")
