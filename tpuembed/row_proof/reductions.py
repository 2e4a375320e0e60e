"""Rules of operations along an axis: reductions, sums, products of matrices."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpuembed.row_proof.elementwise import is_one_width
from tpuembed.row_proof.rules import (
    COUNT_KINDS,
    DEPENDS_ON_WIDTH,
    USES_POSITION,
    NodeCall,
    arranged,
    as_rows,
    computed_value,
    named_outputs,
    refuse_width,
    rows_value,
    rule,
    rule_of_axes,
)
from tpuembed.row_proof.values import ONE, Kind, MixedError, Size, Value, equal_size, same

_OF_ALL: Final = {"All": Kind.EVERY, "Any": Kind.SOME, "Min": Kind.LOWEST, "Max": Kind.HIGHEST}
"""What a reduction over the rows is. It may be reduced in the same way again."""
_NEUTRAL: Final = {"Sum": 0, "Any": False, "All": True}
"""What changes no result, if it stands behind a row's values."""


@rule("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def _reduce(call: NodeCall) -> Value:
    value, keep = call.inputs[0], call.attr("keep_dims").b
    axes = call.inputs[1].numbers() if call.inputs[1].kind is Kind.SAME else None
    if value.kind is Kind.SAME and call.inputs[1].kind is Kind.SAME and (axes is None or value.shape is None):
        return same(() if value.shape == () else None)
    if axes is None:
        raise MixedError("which axes it adds up is not known before it runs")
    if value.kind in COUNT_KINDS and value.shape is None and _OF_ALL.get(call.op) is value.kind:
        return value
    shape = value.known_shape
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = tuple(ONE if axis in gone else size for axis, size in enumerate(shape) if keep or axis not in gone)
    is_vector = value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and len(shape) == 1 == len(gone)
    if is_vector and call.op in ("Prod", "Sum"):
        by, start = (operator.mul, 1) if call.op == "Prod" else (operator.add, 0)
        return computed_value(call.dtype(), left, [functools.reduce(by, value.sizes or (), Size.of(start))])
    if value.kind is Kind.SAME:
        array = None
        if value.array is not None and call.op in ("All", "Any"):
            array = np.array(getattr(np, call.op.lower())(value.array, tuple(gone), keepdims=keep))
        return same(left, array=array)
    if value.kind in COUNT_KINDS and (_OF_ALL.get(call.op) is value.kind or not gone):
        return dataclasses.replace(value, shape=left)
    if value.kind is Kind.POINTER and not left:
        return Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {USES_POSITION}")
    as_rows(value)
    is_neutral = value.fill is not None and call.op in _NEUTRAL and value.fill == _NEUTRAL[call.op]
    if not is_neutral and any(shape[axis].is_padded for axis in gone):
        raise MixedError(DEPENDS_ON_WIDTH)
    if value.axis in gone:
        kind = _OF_ALL.get(call.op)
        is_known = kind in (Kind.EVERY, Kind.SOME) or (kind is not None and call.dtype().is_integer)
        if kind is None or not is_known or any(size.is_padded for size in left):
            raise MixedError("it makes one of several rows")
        return Value(kind, left, width=value.width if call.op == "Max" and not left else None)
    axis = value.axis if keep else value.axis - sum(one < value.axis for one in gone)
    counts = value.counts if call.op == "Sum" else None
    return rows_value(left, axis, counts=counts, fill=value.fill if call.op in ("All", "Any") else None)


@rule_of_axes("ArgMax", "ArgMin")
def _arg(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    if value.kind is Kind.SAME and call.inputs[1].numbers() is None:
        return same()
    axis = call.numbers(1)[0] % len(shape)
    return arranged(value, [own for own in range(len(shape)) if own != axis], "it makes one of several rows")


@rule_of_axes("Softmax", "LogSoftmax", "TopKV2", "MatrixBandPart")
def _last_axes(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    """Compute along the last axis, or the last two: of TopKV2, it has as many elements as the second input says."""
    used = 2 if call.op == "MatrixBandPart" else 1
    if value.kind is Kind.ROWS and value.axis >= len(shape) - used:
        is_sum = call.op.endswith("Softmax")
        raise MixedError("each row is divided by a sum of several" if is_sum else "rows are compared with each other")
    axes: list[int | Size] = [*range(len(shape))]
    if call.op == "TopKV2":
        sizes = call.inputs[1].sizes
        axes[-1] = sizes[0] if sizes else call.unknown()
    return arranged(value, axes)


named_outputs("TopKV2", "values", "indices")


@rule_of_axes()
def _cumulative_axes(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    if value.kind is Kind.SAME:
        return same(shape)
    if call.numbers(1)[0] % len(shape) != value.axis:
        return arranged(value, range(len(shape)))
    is_plain = call.op == "Cumsum" and not call.attr("exclusive").b and not call.attr("reverse").b
    if is_plain and len(shape) == 1 and value.counts is not None and not shape[0].is_distinct:
        return Value(Kind.ENDS, shape, target=value.counts)
    raise MixedError("each row is added to those before it")


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(call: NodeCall) -> list[Value] | Value:
    value = call.inputs[0]
    is_backward = call.op == "Cumsum" and call.attr("reverse").b and call.dtype().is_integer
    if is_backward and value.kind is Kind.ROWS and value.rank == 2 and value.axis == 0:
        shape = value.known_shape
        if call.numbers(1) in ([1], [-1]) and is_one_width(shape[1]):
            if value.fill is None or value.fill != 0:
                raise MixedError(DEPENDS_ON_WIDTH)
            return rows_value(shape, 0, fill=value.fill)  # zeros behind a row's values change no sum that begins there
    return _cumulative_axes(call)


# ---- products


def _contracted(call: NodeCall, terms: Sequence[str], out: str) -> Value:
    """Return what an einsum of the inputs is, with a letter for each of their axes. An axis of size 1 may be repeated."""
    found: dict[str, list[Size]] = {}
    letters = set()
    for term, value in zip(terms, call.inputs, strict=True):
        as_rows(value, Kind.ROWS, Kind.SAME)
        refuse_width(value)
        shape = value.known_shape
        if len(shape) != len(term) or len(set(term)) < len(term):
            raise MixedError("its equation is of another number of dimensions")
        if value.kind is Kind.ROWS:
            letters.add(term[value.axis])
        for letter, size in zip(term, shape, strict=True):
            found.setdefault(letter, []).append(size)
    sizes = {letter: equal_size(each, call.unknown) for letter, each in found.items()}
    if not letters:
        return same([sizes[letter] for letter in out])
    if len(letters) != 1 or not letters <= set(out):
        raise MixedError("it adds up over rows")
    return rows_value([sizes[letter] for letter in out], out.index(letters.pop()))


@rule("MatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(call: NodeCall) -> Value:
    if call.is_same and None in [value.shape for value in call.inputs]:
        return same()
    ranks = [len(value.known_shape) for value in call.inputs]
    batch = "abcdefgh"[: max(ranks) - 2]
    flags = ("transpose_a", "transpose_b") if call.op == "MatMul" else ("adj_x", "adj_y")
    terms = []
    for rank, flag, matrix in zip(ranks, flags, ("ij", "jk"), strict=True):
        turned = matrix[::-1] if call.attr(flag).b else matrix
        terms.append(batch[len(batch) - rank + 2 :] + turned)
    return _contracted(call, terms, f"{batch}ik")


@rule("Einsum")
def _einsum(call: NodeCall) -> Value:
    terms, _, out = call.attr("equation").s.decode().replace(" ", "").partition("->")
    if call.is_same:
        return same()
    if "." in terms or len(set(out)) < len(out):
        raise MixedError("its equation leaves axes open")
    return _contracted(call, terms.split(","), out)


@rule_of_axes("Conv2D")
def _convolution(call: NodeCall, value: Value, shape: tuple[Size, ...]) -> Value:
    if value.kind is Kind.ROWS and (value.axis != 0 or len(shape) != 4):
        raise MixedError("its first axis is not that of the rows")
    return arranged(value, [0, *(call.unknown() for _ in shape[1:])])
