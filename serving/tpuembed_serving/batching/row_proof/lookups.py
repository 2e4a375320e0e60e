"""Rules of gathers, and of operations over the entries of rows: segments, sparse and ragged tensors, examples."""

from collections.abc import Sequence
from typing import Any

from tpuembed_serving.batching.row_proof.rules import (
    BOOL,
    DEPENDS_ON_WIDTH,
    INTEGERS,
    OUTPUTS,
    STRING,
    USES_BATCH_SIZE,
    NodeCall,
    as_rows,
    is_all_same,
    known_shape,
    named_outputs,
    numbers_value,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed_serving.batching.row_proof.values import ROWS, Kind, MixedError, Size, Value, same


@rule("GatherV2", "Gather", "ResourceGather")
def _gather(call: NodeCall) -> list[Value]:
    params, indices = call.inputs[:2]
    if call.op == "ResourceGather":
        if params.kind is not Kind.HANDLE or params.element is None:
            raise MixedError("it is not known what is looked up")
        params = params.element
    batch_dims = call.integer("batch_dims")
    (axis,) = call.numbers(2) if call.op == "GatherV2" else (batch_dims,)
    if params.kind is Kind.SAME and indices.kind is Kind.SAME:
        return [same() if batch_dims else _gathered_same(params, indices, axis)]
    if params.kind is Kind.SIZE and indices.kind is Kind.SAME and params.sizes is not None:
        numbers = call.numbers(1)
        if params.rank != 1 or axis not in (0, -1) or batch_dims or not _are_within(numbers, params.sizes):
            raise MixedError(USES_BATCH_SIZE)
        found = [params.sizes[number] for number in numbers]
        return [numbers_value(known_shape(indices.shape), found)]
    if batch_dims:
        return [_gathered_beside(params, indices, axis, batch_dims)]
    if params.kind is Kind.SAME:
        as_rows(indices)
        if params.shape is None:
            is_of_rows = indices.shape is None or indices.shape[:1] == (ROWS,)
            if axis or indices.axis or indices.is_padded or not is_of_rows:
                raise MixedError("the number of dimensions of an input is not known")
            return [Value(Kind.ROWS, None, indices.axis)]
        axis %= len(params.shape)
        found_shape = [*params.shape[:axis], *known_shape(indices.shape), *params.shape[axis + 1 :]]
        return [rows_value(found_shape, axis + indices.axis)]
    as_rows(params, Kind.ROWS, Kind.POINTER, Kind.INDICES)
    shape = known_shape(params.shape)
    axis %= len(shape)
    if (
        indices.kind is Kind.PLACES
        and params.kind is Kind.ROWS
        and axis == params.axis
        and indices.target == shape[axis]
    ):
        return [rows_value([*shape[:axis], *known_shape(indices.shape), *shape[axis + 1 :]], axis + indices.axis)]
    if params.kind is Kind.INDICES:
        if axis or indices.kind is not Kind.POINTER or indices.target != shape[0] or indices.rank != 1:
            raise MixedError("it takes entries by numbers")
        entries = (known_shape(indices.shape)[0], shape[1])
        return [Value(Kind.INDICES, entries, params.axis, sizes=params.sizes, target=params.target)]
    if axis != params.axis:
        as_rows(params)
        as_rows(indices, Kind.SAME)
        refuse_width(params)
        inner = known_shape(indices.shape)
        found_shape = [*shape[:axis], *inner, *shape[axis + 1 :]]
        return [rows_value(found_shape, params.axis if params.axis < axis else params.axis + len(inner) - 1)]
    if indices.kind is not Kind.POINTER or indices.target != shape[axis]:
        raise MixedError("it takes rows by numbers")
    found_shape = [*shape[:axis], *known_shape(indices.shape), *shape[axis + 1 :]]
    return [Value(params.kind, tuple(found_shape), axis + indices.axis, target=params.target, holes=params.holes)]


def _gathered_same(params: Value, indices: Value, axis: int) -> Value:
    if params.shape is None or indices.shape is None:
        return same()
    axis %= len(params.shape)
    numbers = indices.numbers()
    sizes = None
    if params.sizes is not None and len(params.shape) == 1 and numbers is not None:
        sizes = [params.sizes[number] for number in numbers] if _are_within(numbers, params.sizes) else None
    return same([*params.shape[:axis], *indices.shape, *params.shape[axis + 1 :]], sizes)


def _are_within(numbers: Sequence[int], sizes: Sequence[Size]) -> bool:
    return all(0 <= number < len(sizes) for number in numbers)


def _gathered_beside(params: Value, indices: Value, axis: int, batch_dims: int) -> Value:
    """Each row looks up in the same row."""
    as_rows(params)
    as_rows(indices)
    refuse_width(params, indices)
    shape, inner = known_shape(params.shape), known_shape(indices.shape)
    axis, batch_dims = axis % len(shape), batch_dims + (len(inner) if batch_dims < 0 else 0)
    if params.axis != indices.axis or params.axis >= batch_dims or shape[params.axis] != inner[params.axis]:
        raise MixedError("it takes rows by numbers")
    return rows_value([*shape[:axis], *inner[batch_dims:], *shape[axis + 1 :]], params.axis)


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(call: NodeCall) -> list[Value]:
    params, indices = call.inputs
    if call.op == "ResourceGatherNd":
        if params.kind is not Kind.HANDLE or params.element is None:
            raise MixedError("it is not known what is looked up")
        params = params.element
    if params.kind is Kind.SAME and indices.kind is Kind.SAME:
        return [same()]
    if call.integer("batch_dims"):
        raise MixedError("it looks up within each row")
    depth = known_shape(indices.shape)[-1].number
    if depth is None:
        raise MixedError("how it looks up is not known before it runs")
    if params.kind is Kind.SAME:
        as_rows(indices)
        if indices.axis == len(known_shape(indices.shape)) - 1:
            raise MixedError("rows are axes of what is looked up")
        return [rows_value([*known_shape(indices.shape)[:-1], *known_shape(params.shape)[depth:]], indices.axis)]
    shape = known_shape(as_rows(params).shape)
    if (
        indices.kind is Kind.POINTER
        and indices.rank == 2
        and depth == 1
        and params.axis == 0
        and indices.target == shape[0]
    ):
        return [rows_value([known_shape(indices.shape)[0], *shape[1:]], 0)]
    if indices.kind is not Kind.INDICES or indices.axis != params.axis or indices.sizes != shape[:depth]:
        raise MixedError("it takes rows by numbers")
    return [rows_value([known_shape(indices.shape)[0], *shape[depth:]], 0)]


@rule("Where")
def _where(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME:
        return [same()]
    shape = known_shape(as_rows(value).shape)
    if value.is_padded and (value.fill is None or value.fill):
        raise MixedError(DEPENDS_ON_WIDTH)
    entries = value.counts if value.counts is not None and call.dtype() in (0, BOOL) else call.entries()
    if shape[value.axis].is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    if len(shape) == 1:
        return [Value(Kind.POINTER, (entries, Size.of(1)), target=shape[0])]
    if value.axis != 0:
        raise MixedError("entries of different rows stand beside each other")
    return [Value(Kind.INDICES, (entries, Size.of(len(shape))), 0, sizes=shape, target=shape[0])]


# ---- entries of rows


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _unsorted_segment(call: NodeCall) -> list[Value]:
    data, segments, count = call.inputs
    if is_all_same(call):
        return [same()]
    as_rows(segments, Kind.POINTER)
    as_rows(data)
    refuse_width(data, segments)
    shape, inner = known_shape(data.shape), known_shape(segments.shape)
    if data.axis != 0 or shape[: len(inner)] != inner or segments.axis != 0:
        raise MixedError("its segments are not those of the entries")
    if count.sizes is None or segments.target != count.sizes[0]:
        raise MixedError("its segments are not the rows")
    return [rows_value([count.sizes[0], *shape[len(inner) :]], 0)]


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
def _segment(call: NodeCall) -> list[Value]:
    data, segments = call.inputs[:2]
    if is_all_same(call):
        return [same()]
    return [_segments(as_rows(data), segments)]


def _segments(data: Value, segments: Value) -> Value:
    """One row for each segment; there is none for rows behind the last entry, so that each row must have one."""
    shape, inner = known_shape(data.shape), known_shape(as_rows(segments, Kind.POINTER).shape)
    if data.axis != 0 or len(inner) != 1 or shape[0] != inner[0] or segments.target is None:
        raise MixedError("its segments are not those of the entries")
    if not segments.covers or segments.holes:
        raise MixedError("the last rows may have no entries, and be left out")
    refuse_width(data, segments)
    return rows_value([segments.target, *shape[1:]], 0)


@rule("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
def _sparse_segment(call: NodeCall) -> list[Value]:
    data, places, segments = call.inputs[:3]
    if is_all_same(call):
        return [same()]
    refuse_width(data, places, segments)
    if data.kind is Kind.SAME:
        shape = known_shape(data.shape)
        entries = known_shape(as_rows(places).shape)
    else:
        shape = known_shape(as_rows(data).shape)
        entries = known_shape(as_rows(places, Kind.PLACES, Kind.POINTER).shape)
        if data.axis != 0 or places.target != shape[0] or places.holes:
            raise MixedError("it takes rows by numbers")
    if len(entries) != 1 or places.axis != 0:
        raise MixedError("its entries are no vector")
    return [_segments(rows_value([entries[0], *shape[1:]], 0), segments)]


@rule("Unique", "UniqueV2")
def _unique(call: NodeCall) -> list[Value]:
    value = call.inputs[0]
    if is_all_same(call):
        return [same(), same()]
    shape = known_shape(as_rows(value).shape)
    refuse_width(value)
    if len(shape) != 1:
        raise MixedError("what differs is no vector")
    if call.dtype() not in INTEGERS | {BOOL, STRING}:
        raise MixedError("numbers that are equal may differ, as 0.0 and -0.0 do")
    distinct = call.distinct()
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
    if indices.target != dims.sizes[0] or known_shape(values.shape) != known_shape(indices.shape)[:1]:
        raise MixedError("its entries are not those of the rows")
    entries = call.entries()
    more = (entries, known_shape(indices.shape)[1])
    filled = Value(Kind.INDICES, more, 0, sizes=(), target=indices.target, covers=True)
    back = Value(Kind.MIXED, reason="where entries were is a position in the batch")
    return [filled, rows_value([entries], 0), rows_value([indices.target], 0), back]


named_outputs("SparseFillEmptyRows", "output_indices", "output_values", "empty_row_indicator", "reverse_index_map")


@rule("DenseBincount")
def _bincount(call: NodeCall) -> list[Value]:
    value, size, weights = call.inputs
    if is_all_same(call):
        return [same()]
    as_rows(weights, Kind.SAME)
    if weights.shape != (Size.of(0),):
        raise MixedError("it has weights")
    shape = known_shape(as_rows(value, Kind.ROWS, Kind.POINTER).shape)
    refuse_width(value)
    if value.kind is Kind.POINTER:
        if len(shape) != 1 or value.holes or size.sizes != (value.target,) or call.flag("binary_output"):
            raise MixedError("it does not count the entries of rows")
        return [rows_value(size.sizes, 0, counts=shape[0], width=call.width())]
    if len(shape) != 2 or value.axis != 0 or size.kind is not Kind.SAME:
        raise MixedError("it counts over rows")
    return [rows_value([shape[0], size.sizes[0] if size.sizes else call.unknown()], 0)]


@rule("SparseToDense")
def _sparse_to_dense(call: NodeCall) -> list[Value]:
    indices, dims, values, default = call.inputs
    if is_all_same(call):
        return [same(dims.sizes)]
    as_rows(default, Kind.SAME)
    as_rows(values)
    if indices.kind is not Kind.INDICES or dims.sizes is None or indices.axis != 0:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or known_shape(values.shape) != known_shape(indices.shape)[:1]:
        raise MixedError("its entries are not those of the rows")
    if any(size.is_padded for size in dims.sizes) and indices.sizes != dims.sizes:
        raise MixedError(DEPENDS_ON_WIDTH)
    return [rows_value(dims.sizes, 0, fill=default.array if default.shape == () else None)]


@rule("RaggedTensorToTensor")
def _ragged_to_tensor(call: NodeCall) -> list[Value]:
    dims, values, default, *parts = call.inputs
    types = [kind.decode() for kind in call.node.attr["row_partition_types"].list.s]
    as_rows(default, Kind.SAME)
    as_rows(values)
    wanted = [size.number for size in dims.sizes] if dims.sizes is not None and dims.kind is Kind.SAME else None
    shape = known_shape(values.shape)
    if values.axis != 0:
        raise MixedError("its entries are not those of the rows")
    if types == ["ROW_SPLITS"]:
        splits = parts[0]
        fits = splits.kind is Kind.SPLITS and splits.target == shape[0]
        rows = known_shape(splits.shape)[0] - Size.of(1) if fits else None
    elif types == ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        ids = parts[1]
        fits = ids.kind is Kind.POINTER and not ids.holes and ids.shape == shape[:1]
        rows = ids.target if fits and parts[0].sizes == (ids.target,) else None
    else:
        rows = None
    if rows is None:
        raise MixedError("which rows its entries are of is not known")
    if wanted is None or (wanted and wanted[0] != -1):
        raise MixedError("a fixed number of rows is asked for")
    width = Size.of(wanted[1]) if wanted[1:] and wanted[1] not in (-1, None) else call.width()
    fill = default.array if default.shape == () else None
    return [rows_value([rows, width, *shape[1:]], 0, fill=fill)]


def _parsed_sparse(call: NodeCall, count: int) -> tuple[list[Value], list[Value], list[Value]]:
    indices, values, shapes = [], [], []
    for _ in range(count):
        entries, dims = call.entries(), (ROWS, call.width())
        indices.append(Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=ROWS))
        values.append(rows_value([entries], 0))
        shapes.append(Value(Kind.SIZE, (Size.of(2),), sizes=dims))
    return indices, values, shapes


@rule("ParseExampleV2")
def _parse(call: NodeCall) -> list[Value]:
    serialized, *others = call.inputs
    if known_shape(as_rows(serialized).shape) != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    _no_names(others[0])
    for other in others:
        as_rows(other, Kind.SAME)
    attr = call.node.attr
    indices, values, shapes = _parsed_sparse(call, call.integer("num_sparse"))
    dense = []
    for shape in attr["dense_shapes"].list.shape:
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            raise MixedError(DEPENDS_ON_WIDTH)
        dense.append(rows_value([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0))
    ragged, splits = [], []
    for _ in attr["ragged_value_types"].list.type:
        entries = call.entries()
        ragged.append(rows_value([entries], 0))
        splits.append(Value(Kind.SPLITS, (ROWS + Size.of(1),), target=entries))
    return [*indices, *values, *shapes, *dense, *ragged, *splits]


def _parse_outputs(node: Any) -> list[tuple[str, int]]:
    sparse, dense = node.attr["num_sparse"].i, len(node.attr["Tdense"].list.type)
    ragged = len(node.attr["ragged_value_types"].list.type)
    names = [("sparse_indices", sparse), ("sparse_values", sparse), ("sparse_shapes", sparse), ("dense_values", dense)]
    return [*names, ("ragged_values", ragged), ("ragged_row_splits", ragged)]


OUTPUTS["ParseExampleV2"] = _parse_outputs


def _no_names(names: Value) -> None:
    if names.shape != (Size.of(0),):
        raise MixedError("its examples have names, of a fixed number")


@rule("ParseExample")
def _parse_old(call: NodeCall) -> list[Value]:
    if known_shape(as_rows(call.inputs[0]).shape) != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    _no_names(call.inputs[1])
    for other in call.inputs[1:]:
        as_rows(other, Kind.SAME)
    indices, values, shapes = _parsed_sparse(call, call.integer("Nsparse"))
    dense = []
    for shape in call.node.attr["dense_shapes"].list.shape:
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            raise MixedError(DEPENDS_ON_WIDTH)
        dense.append(rows_value([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0))
    return [*indices, *values, *shapes, *dense]


OUTPUTS["ParseExample"] = lambda node: [
    ("sparse_indices", node.attr["Nsparse"].i),
    ("sparse_values", node.attr["Nsparse"].i),
    ("sparse_shapes", node.attr["Nsparse"].i),
    ("dense_values", node.attr["Ndense"].i),
]


@rule("DecodeCSV")
def _decode_csv(call: NodeCall) -> list[Value]:
    records, *defaults = call.inputs
    for default in defaults:
        as_rows(default, Kind.SAME)
    return [rows_value(as_rows(records).shape, records.axis)] * len(defaults)


@rule("StringSplitV2", "StringSplit")
def _string_split(call: NodeCall) -> list[Value]:
    if len(known_shape(as_rows(call.inputs[0]).shape)) != 1:
        raise MixedError("what it splits is no vector")
    as_rows(call.inputs[1], Kind.SAME)
    rows = known_shape(call.inputs[0].shape)[0]
    if rows.is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    entries, dims = call.entries(), (rows, call.width())
    return [
        Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=rows),
        rows_value([entries], 0),
        Value(Kind.SIZE, (Size.of(2),), sizes=dims),
    ]


named_outputs("StringSplitV2", "indices", "values", "shape")
named_outputs("StringSplit", "indices", "values", "shape")
