"""Rules of gathers, and of operations over the entries of rows: segments, sparse and ragged tensors, examples."""

from typing import Any

import tensorflow as tf

from tpuembed.row_proof.values import ONE, OUTPUTS, ROWS, Kind, MixedError, NodeCall, Size, Value, Why, rule, same


@rule("GatherV2 ResourceGather")
def _gather(call: NodeCall) -> Value:
    params, indices = call.inputs[:2]
    params = params.held if call.op.startswith("Resource") else params
    batch_dims = call.attr("batch_dims").i
    (axis,) = call.numbers(2) if call.op == "GatherV2" else (batch_dims,)
    if params.kind in (Kind.SAME, Kind.SIZE) and indices.kind is Kind.SAME:
        numbers, sizes = indices.numbers(), params.sizes
        is_vector = sizes is not None and params.rank == 1 and axis in (0, -1) and not batch_dims
        if is_vector and numbers is not None and all(0 <= number < len(sizes or ()) for number in numbers):
            return Value.integers([(sizes or ())[number] for number in numbers], indices.known_shape)
        known = params.of(Kind.SAME).shape
        if known is None or indices.shape is None or batch_dims:
            return same()
        axis %= len(known)
        return same([*known[:axis], *indices.shape, *known[axis + 1 :]])
    if params.kind is Kind.SAME and params.shape is None and not batch_dims:
        is_of_rows = indices.of(Kind.ROWS).shape is None or indices.known_shape[:1] == (ROWS,)
        if axis or indices.axis or indices.is_padded or not is_of_rows:
            raise MixedError(Why.UNKNOWN_RANK)
        return Value(Kind.ROWS, None, indices.axis)
    shape, inner = params.known_shape, indices.known_shape
    axis %= len(shape)
    found = (*shape[:axis], *inner[batch_dims:], *shape[axis + 1 :])
    if batch_dims:  # each row looks up in the same row
        params.of(Kind.ROWS).unpadded()
        indices.of(Kind.ROWS).unpadded()
        is_beside = params.axis == indices.axis < (batch_dims if batch_dims > 0 else batch_dims + len(inner))
        if not is_beside or shape[params.axis] != inner[params.axis]:
            raise MixedError(Why.TAKES_ROWS)
        return Value.rows(found, params.axis)
    if params.kind is Kind.SAME:
        return Value.rows(found, axis + indices.of(Kind.ROWS).axis)
    params.of(Kind.ROWS, Kind.POINTER, Kind.INDICES)
    if axis != params.axis:
        params.of(Kind.ROWS).unpadded()
        indices.of(Kind.SAME)
        return Value.rows(found, params.axis if params.axis < axis else params.axis + len(inner) - 1)
    if indices.target != shape[axis]:
        raise MixedError(Why.TAKES_ROWS)
    if indices.kind is Kind.PLACES and params.kind is Kind.ROWS:
        return Value.rows(found, axis + indices.axis)
    if indices.kind is not Kind.POINTER or (params.kind is Kind.INDICES and len(inner) != 1):
        raise MixedError(Why.TAKES_ROWS)
    sizes = params.sizes if params.kind is Kind.INDICES else None
    return Value(params.kind, found, axis + indices.axis, sizes=sizes, target=params.target)


@rule("GatherNd ResourceGatherNd")
def _gather_nd(call: NodeCall) -> Value:
    params, indices = call.inputs[:2]
    params = params.held if call.op.startswith("Resource") else params
    if params.kind is Kind.SAME and indices.kind is Kind.SAME:
        return same()
    if call.attr("batch_dims").i:
        raise MixedError("it looks up within each row")
    inner, shape = indices.known_shape, params.known_shape
    depth = inner[-1].number
    if depth is None:
        raise MixedError("how it looks up is not known before it runs")
    if params.kind is Kind.SAME:
        if indices.of(Kind.ROWS).axis == len(inner) - 1:
            raise MixedError("rows are axes of what is looked up")
        return Value.rows([*inner[:-1], *shape[depth:]], indices.axis)
    params.of(Kind.ROWS)
    is_by_row = indices.kind is Kind.POINTER and len(inner) == 2 and depth == 1 and params.axis == 0
    is_by_entry = indices.kind is Kind.INDICES and indices.axis == params.axis and indices.sizes == shape[:depth]
    if not is_by_entry and not (is_by_row and indices.target == shape[0]):
        raise MixedError(Why.TAKES_ROWS)
    return Value.rows([inner[0], *shape[depth:]], 0)


@rule("Where")
def _where(call: NodeCall) -> Value:
    (value,) = call.inputs
    shape = value.of(Kind.ROWS).known_shape
    if value.is_padded and (value.fill is None or value.fill):
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    entries = value.counts if value.counts is not None and call.dtype() in (None, tf.bool) else call.symbol("n")
    if shape[value.axis].has("u"):
        raise MixedError(Why.SOME_DISTINCT)
    if len(shape) == 1:
        return Value(Kind.POINTER, (entries, ONE), target=shape[0])
    if value.axis != 0:
        raise MixedError("entries of different rows stand beside each other")
    return Value(Kind.INDICES, (entries, Size.of(len(shape))), 0, sizes=shape, target=shape[0])


# ---- entries of rows


@rule("UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd")
def _unsorted_segment(call: NodeCall) -> Value:
    data, segments, count = call.inputs
    inner, shape = segments.of(Kind.POINTER).unpadded().known_shape, data.of(Kind.ROWS).unpadded().known_shape
    if data.axis != 0 or shape[: len(inner)] != inner or segments.axis != 0:
        raise MixedError("its segments are not those of the entries")
    if count.sizes is None or segments.target != count.sizes[0]:
        raise MixedError("its segments are not the rows")
    return Value.rows([count.sizes[0], *shape[len(inner) :]], 0)


@rule("SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN")
def _segments(call: NodeCall) -> Value:
    """One row for each segment; there is none for rows behind the last entry, so that each row must have one."""
    data, *places, segments = (value.unpadded() for value in call.inputs)
    shape = data.of(Kind.SAME, Kind.ROWS).known_shape
    if places:
        kinds = (Kind.ROWS,) if data.kind is Kind.SAME else (Kind.PLACES, Kind.POINTER)
        entries = places[0].of(*kinds).known_shape
        if data.kind is Kind.ROWS and (data.axis != 0 or places[0].target != shape[0]):
            raise MixedError("it takes rows by numbers")
        if len(entries) != 1 or places[0].axis != 0:
            raise MixedError("its entries are no vector")
        shape = (entries[0], *shape[1:])
    else:
        data.of(Kind.ROWS)
    inner = segments.of(Kind.POINTER).known_shape
    if (data.axis != 0 and not places) or len(inner) != 1 or shape[0] != inner[0] or segments.target is None:
        raise MixedError("its segments are not those of the entries")
    if not segments.covers:
        raise MixedError("the last rows may have no entries, and be left out")
    return Value.rows([segments.target, *shape[1:]], 0)


@rule("Unique UniqueV2", outputs=("y", "idx"))
def _unique(call: NodeCall) -> list[Value] | Value:
    value = call.inputs[0]
    shape = value.of(Kind.ROWS).unpadded().known_shape
    if len(shape) != 1:
        raise MixedError("what differs is no vector")
    if not call.dtype().is_integer and call.dtype() not in (tf.bool, tf.string):
        raise MixedError("numbers that are equal may differ, as 0.0 and -0.0 do")
    distinct = call.symbol("u")
    return [Value.rows([distinct], 0), Value(Kind.PLACES, shape, target=distinct)]


@rule("SparseReshape", outputs=("output_indices", "output_shape"))
def _sparse_reshape(call: NodeCall) -> list[Value]:
    indices, dims, wanted = call.inputs
    if indices.kind is not Kind.INDICES or dims.sizes is None or dims.sizes != wanted.sizes:
        raise MixedError("entries change their rows")
    return [indices, dims]


def _sparse_rows(indices: Value, values: Value, dims: Value, default: Value) -> Size:
    """Return how many rows sparse entries are of. Raise MixedError unless each is at the row of its values."""
    default.of(Kind.SAME)
    values.of(Kind.ROWS)
    if indices.kind is not Kind.INDICES or indices.axis != 0 or dims.sizes is None or indices.target is None:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or values.known_shape != indices.known_shape[:1]:
        raise MixedError(Why.NOT_OF_ROWS)
    return indices.target


@rule("SparseFillEmptyRows", outputs=("output_indices", "output_values", "empty_row_indicator", "reverse_index_map"))
def _fill_rows(call: NodeCall) -> list[Value]:
    indices, values, dims, default = call.inputs
    rows, entries = _sparse_rows(indices, values, dims, default), call.symbol("n")
    filled = Value(Kind.INDICES, (entries, indices.known_shape[1]), 0, sizes=(), target=rows, covers=True)
    back = Value(Kind.MIXED, reason="where entries were is a position in the batch")
    return [filled, Value.rows([entries], 0), Value.rows([rows], 0), back]


@rule("DenseBincount")
def _bincount(call: NodeCall) -> Value:
    value, size, weights = call.inputs
    if weights.of(Kind.SAME).shape != (Size.of(0),):
        raise MixedError("it has weights")
    shape = value.of(Kind.ROWS, Kind.POINTER).unpadded().known_shape
    if value.kind is Kind.POINTER:
        if len(shape) != 1 or size.sizes != (value.target,) or call.attr("binary_output").b:
            raise MixedError("it does not count the entries of rows")
        return Value.rows(size.sizes, 0, counts=shape[0], width=call.symbol("w"))
    if len(shape) != 2 or value.axis != 0 or size.kind is not Kind.SAME:
        raise MixedError("it counts over rows")
    return Value.rows([shape[0], size.sizes[0] if size.sizes else call.unknown()], 0)


@rule("SparseToDense")
def _sparse_to_dense(call: NodeCall) -> Value:
    indices, dims, values, default = call.inputs
    if call.is_same:
        return same(dims.sizes)
    _sparse_rows(indices, values, dims, default)
    if any(size.has("w") for size in dims.sizes or ()) and indices.sizes != dims.sizes:
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    return Value.rows(dims.sizes, 0, fill=default.array if default.shape == () else None)


@rule("RaggedTensorToTensor")
def _ragged_to_tensor(call: NodeCall) -> Value:
    dims, values, default, *parts = call.inputs
    types = [kind.decode() for kind in call.attr("row_partition_types").list.s]
    default.of(Kind.SAME)
    wanted = [size.number for size in dims.sizes] if dims.sizes is not None and dims.kind is Kind.SAME else None
    shape, rows = values.of(Kind.ROWS).known_shape, None
    if values.axis != 0:
        raise MixedError(Why.NOT_OF_ROWS)
    if types == ["ROW_SPLITS"] and parts[0].kind is Kind.SPLITS and parts[0].target == shape[0]:
        rows = parts[0].known_shape[0] - ONE
    if types == ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        first, ids = parts
        if ids.kind is Kind.POINTER and ids.shape == shape[:1] and first.sizes == (ids.target,):
            rows = ids.target
    if rows is None:
        raise MixedError("which rows its entries are of is not known")
    if wanted is None or (wanted and wanted[0] != -1):
        raise MixedError(Why.FIXED_ROWS)
    width = Size.of(wanted[1]) if wanted[1:] and wanted[1] not in (-1, None) else call.symbol("w")
    return Value.rows([rows, width, *shape[1:]], 0, fill=default.array if default.shape == () else None)


def _sparse_of(call: NodeCall, rows: Size) -> tuple[Value, Value, Value]:
    """Return the indices, values and shape of sparse lists that are read from strings."""
    entries, dims = call.symbol("n"), (rows, call.symbol("w"))
    indices = Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=rows)
    return indices, Value.rows([entries], 0), Value(Kind.SIZE, (Size.of(2),), sizes=dims)


@rule("ParseExampleV2")
def _parse(call: NodeCall) -> list[Value]:
    serialized, names, *others = call.inputs
    if serialized.of(Kind.ROWS).known_shape != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    if names.shape != (Size.of(0),):
        raise MixedError("its examples have names, of a fixed number")
    for other in (names, *others):
        other.of(Kind.SAME)
    sparse = [_sparse_of(call, ROWS) for _ in range(call.attr("num_sparse").i)]
    shapes = call.attr("dense_shapes").list.shape
    if any(shape.unknown_rank or any(dim.size < 0 for dim in shape.dim) for shape in shapes):
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    dense = [Value.rows([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0) for shape in shapes]
    entries = [call.symbol("n") for _ in call.attr("ragged_value_types").list.type]
    ragged = [Value.rows([count], 0) for count in entries]
    splits = [Value(Kind.SPLITS, (ROWS + ONE,), target=count) for count in entries]
    return [one[part] for part in range(3) for one in sparse] + dense + ragged + splits


def _parse_outputs(node: Any) -> list[tuple[str, int]]:
    sparse, ragged = node.attr["num_sparse"].i, len(node.attr["ragged_value_types"].list.type)
    names = [(f"sparse_{part}", sparse) for part in ("indices", "values", "shapes")]
    names.append(("dense_values", len(node.attr["Tdense"].list.type)))
    return [*names, ("ragged_values", ragged), ("ragged_row_splits", ragged)]


OUTPUTS["ParseExampleV2"] = _parse_outputs


@rule("StringSplitV2", outputs=("indices", "values", "shape"))
def _string_split(call: NodeCall) -> list[Value]:
    words, separator = call.inputs
    separator.of(Kind.SAME)
    shape = words.of(Kind.ROWS).known_shape
    if len(shape) != 1:
        raise MixedError("what it splits is no vector")
    if shape[0].has("u"):
        raise MixedError(Why.SOME_DISTINCT)
    return [*_sparse_of(call, shape[0])]
