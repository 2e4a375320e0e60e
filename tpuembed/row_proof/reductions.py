"""Rules of operations along an axis: reductions, sums, products of matrices; and of the lists of tensors that loops keep."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpuembed.row_proof.values import ONE, Kind, MixedError, NodeCall, Size, Value, Why, rule, same

_OVER_ROWS: Final = {"All": Kind.EVERY, "Any": Kind.SOME, "Min": Kind.LOWEST, "Max": Kind.HIGHEST}
"""What a reduction over the rows is. It may be reduced in the same way again."""
_NEUTRAL: Final = {"Sum": 0, "Any": False, "All": True}
"""What changes no result, if it stands behind a row's values."""
_SEVERAL: Final = "it makes one of several rows"


@rule("Sum Mean Prod Max Min All Any EuclideanNorm ReduceJoin")
def _reduce(call: NodeCall) -> Value:
    value, keep = call.inputs[0], call.attr("keep_dims").b
    axes = call.inputs[1].numbers() if call.inputs[1].kind is Kind.SAME else None
    kind = _OVER_ROWS.get(call.op)
    if axes is None and call.is_same and value.shape == ():
        return same(())
    if axes is None:
        raise MixedError("which axes it adds up is not known before it runs")
    if value.is_of_all and value.shape is None and kind is value.kind:
        return value
    shape = value.known_shape
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = tuple(ONE if axis in gone else size for axis, size in enumerate(shape) if keep or axis not in gone)
    is_vector = value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and len(shape) == 1 == len(gone)
    if is_vector and call.op in ("Prod", "Sum"):
        sizes = value.sizes or ()
        total = Size.product(sizes) if call.op == "Prod" else functools.reduce(operator.add, sizes, Size.of(0))
        return Value.integers([total], left, call.dtype())
    if value.kind is Kind.SAME:
        array = None
        if value.array is not None and call.op in ("All", "Any"):
            array = np.array(getattr(np, call.op.lower())(value.array, tuple(gone), keepdims=keep))
        return same(left, array=array)
    if value.is_of_all and (kind is value.kind or not gone):
        return dataclasses.replace(value, shape=left)
    if value.kind is Kind.POINTER and not left:
        return Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {Why.USES_POSITION}")
    value.of(Kind.ROWS)
    is_neutral = value.fill is not None and call.op in _NEUTRAL and value.fill == _NEUTRAL[call.op]
    if not is_neutral and any(shape[axis].has("w") for axis in gone):
        raise MixedError(Why.DEPENDS_ON_WIDTH)
    if value.axis in gone:
        is_known = kind in (Kind.EVERY, Kind.SOME) or (kind is not None and call.dtype().is_integer)
        if kind is None or not is_known or any(size.has("w") for size in left):
            if left:
                raise MixedError(_SEVERAL)
            # It cannot fail, so that an assertion may have it in its message.
            return Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {_SEVERAL}")
        return Value(kind, left, width=value.width if call.op == "Max" and not left else None)
    axis = value.axis if keep else value.axis - sum(one < value.axis for one in gone)
    counts = value.counts if call.op == "Sum" else None
    return Value.rows(left, axis, counts=counts, fill=value.fill if call.op in ("All", "Any") else None)


@rule("TopKV2", outputs=("values", "indices"))
@rule("ArgMax ArgMin Conv2D LogSoftmax MatrixBandPart MirrorPad OneHot Pad PadV2 ReverseV2 Softmax Transpose")
def _of_axes(call: NodeCall) -> Value:
    """An operation that makes something else of some axes, none of which may be that of the rows."""
    value, shape = call.along_axes()
    axes: list[int | Size] = [*range(len(shape))]
    reason = Why.STAY_APART
    match call.op:
        case "Transpose":
            axes[:] = call.numbers(1)
        case "ArgMax" | "ArgMin":
            reason = _SEVERAL
            axes.pop(call.numbers(1)[0] % len(shape))
        case "Softmax" | "LogSoftmax":
            reason = "each row is divided by a sum of several"
            axes[-1] = shape[-1]
        case "MatrixBandPart":
            reason = "rows are compared with each other"
            axes[-2:] = shape[-2:]
        case "TopKV2":  # the second input says how many elements are left
            reason = "rows are compared with each other"
            sizes = call.inputs[1].sizes
            axes[-1] = sizes[0] if sizes else call.unknown()
        case "ReverseV2":
            reason = "rows change their places"
            for axis in call.numbers(1):
                axes[axis] = shape[axis]
        case "OneHot":
            sizes, axis = call.inputs[1].sizes, call.attr("axis").i if "axis" in call.node.attr else -1
            axes.insert(axis % (len(shape) + 1), sizes[0] if sizes else call.unknown())
        case "Conv2D":
            reason = "its first axis is not that of the rows"
            axes = [0 if len(shape) == 4 else shape[0], *(call.unknown() for _ in shape[1:])]
        case _:
            if call.is_same and call.inputs[1].numbers() is None:
                return same([call.unknown() for _ in shape])
            reason, more = "rows are added", call.numbers(1)
            for axis, (size, *pair) in enumerate(zip(shape, more[::2], more[1::2], strict=True)):
                if any(pair):
                    axes[axis] = size + Size.of(sum(pair))
    return value.arranged(axes, reason)


@rule("Cumsum Cumprod CumulativeLogsumexp")
def _cumulative(call: NodeCall) -> Value:
    value, is_sum, reverse = call.inputs[0], call.op == "Cumsum", call.attr("reverse").b
    is_of_lists = value.kind is Kind.ROWS and value.rank == 2 and value.axis == 0 and value.known_shape[1].is_one_width
    if is_of_lists and is_sum and reverse and call.dtype().is_integer and call.numbers(1) in ([1], [-1]):
        if value.fill is None or value.fill != 0:
            raise MixedError(Why.DEPENDS_ON_WIDTH)
        # Zeros behind a row's values change no sum that begins there.
        return Value.rows(value.known_shape, 0, fill=value.fill)
    value, shape = call.along_axes()
    if value.kind is Kind.SAME or call.numbers(1)[0] % len(shape) != value.axis:
        return value.arranged(range(len(shape)))
    is_plain = is_sum and not reverse and not call.attr("exclusive").b
    if is_plain and len(shape) == 1 and value.counts is not None and not shape[0].has("u"):
        return Value(Kind.ENDS, shape, target=value.counts)
    raise MixedError("each row is added to those before it")


# ---- products


def _contracted(call: NodeCall, terms: Sequence[str], out: str) -> Value:
    """Return what an einsum of the inputs is, with a letter for each of their axes. An axis of size 1 may be repeated."""
    found: dict[str, list[Size]] = {}
    letters = set()
    for term, value in zip(terms, call.inputs, strict=True):
        value.of(Kind.ROWS, Kind.SAME).unpadded()
        shape = value.known_shape
        if len(shape) != len(term) or len(set(term)) < len(term):
            raise MixedError("its equation is of another number of dimensions")
        if value.kind is Kind.ROWS:
            letters.add(term[value.axis])
        for letter, size in zip(term, shape, strict=True):
            found.setdefault(letter, []).append(size)
    sizes = {letter: call.equal_size(each) for letter, each in found.items()}
    if not letters:
        return same([sizes[letter] for letter in out])
    if len(letters) != 1 or not letters <= set(out):
        raise MixedError("it adds up over rows")
    return Value.rows([sizes[letter] for letter in out], out.index(letters.pop()))


@rule("MatMul BatchMatMulV2 BatchMatMulV3")
def _matmul(call: NodeCall) -> Value:
    ranks = [len(value.known_shape) for value in call.inputs]
    batch = "abcdefgh"[: max(ranks) - 2]
    flags = ("transpose_a", "transpose_b") if call.op == "MatMul" else ("adj_x", "adj_y")
    terms = []
    for rank, flag, matrix in zip(ranks, flags, ("ij", "jk"), strict=True):
        terms.append(batch[len(batch) - rank + 2 :] + (matrix[::-1] if call.attr(flag).b else matrix))
    return _contracted(call, terms, f"{batch}ik")


@rule("Einsum")
def _einsum(call: NodeCall) -> Value:
    terms, _, out = call.attr("equation").s.decode().replace(" ", "").partition("->")
    if "." in terms or len(set(out)) < len(out):
        raise MixedError("its equation leaves axes open")
    return _contracted(call, terms.split(","), out)


# ---- lists of tensors


@rule("TensorListReserve EmptyTensorList")
def _new_list(call: NodeCall) -> Value:
    if call.inputs[1].kind is not Kind.SAME:
        raise MixedError(Why.USES_BATCH_SIZE)
    return Value(Kind.LIST, declared=_declared(call.inputs[0]))


@rule("TensorListFromTensor")
def _list_of(call: NodeCall) -> Value:
    value, wanted = call.inputs
    value.unpadded()
    if value.kind is not Kind.SAME or value.shape is not None:
        value = value.arranged(range(1, len(value.known_shape)), "it goes over rows")
    return _with_element(Value(Kind.LIST, declared=_declared(wanted)), value)


@rule("TensorListSetItem TensorListPushBack")
def _set_item(call: NodeCall) -> Value:
    kept, *index, value = call.inputs
    if any(one.kind is not Kind.SAME for one in index) or call.attr("resize_if_index_out_of_bounds").b:
        raise MixedError("which of its tensors is set depends on rows")
    return _with_element(kept, value)


@rule("TensorListGetItem TensorListStack")
def _taken(call: NodeCall) -> Value:
    """Any tensor of a list, or all. One that was never set is zeros of the shape that is declared, or wanted."""
    kept, *index, wanted = call.inputs
    if kept.kind is not Kind.LIST or kept.element is None:
        raise MixedError("what its tensors are is not known")
    for one in index:
        one.of(Kind.SAME)
    value = _in_shape(_in_shape(kept.element, kept.declared), _declared(wanted))
    is_open = value.kind is Kind.SAME and value.shape is None
    return value if index or is_open else value.expanded(0, call.unknown())


def _declared(wanted: Value) -> tuple[Size, ...] | None:
    if wanted.kind not in (Kind.SAME, Kind.SIZE) or wanted.sizes is None:
        raise MixedError("the shape of its tensors is not known before it runs")
    return None if wanted.shape == () else wanted.sizes


def _with_element(kept: Value, value: Value) -> Value:
    """Return the list with one more tensor. What is known of the numbers of one is not known of each."""
    if value.of(Kind.ROWS, Kind.SAME).kind is Kind.ROWS:
        element = Value.rows(value.known_shape, value.axis)
        _in_shape(element, kept.declared)
    else:
        element = same(value.shape)
    if value.is_padded or kept.kind is not Kind.LIST or kept.element not in (None, element):
        raise MixedError("its tensors differ")
    return Value(Kind.LIST, element=element, declared=kept.declared)


def _in_shape(element: Value, declared: tuple[Size, ...] | None) -> Value:
    """Return `element` as far as it is also known of zeros of a declared shape. An axis left open is as in `element`."""
    if declared is None:
        return element
    known = element.shape
    is_open = [size.number is not None and size.number < 0 for size in declared]
    if element.kind is Kind.SAME:
        if not all(size.is_same for size in declared):
            raise MixedError(Why.USES_BATCH_SIZE)
        if known is None or len(known) != len(declared):
            return same()
        fits = all(free or size == own for free, size, own in zip(is_open, declared, known, strict=True))
        return element if fits else same()
    if known is None or len(known) != len(declared) or not (declared == known or is_open[element.axis]):
        raise MixedError(Why.FIXED_ROWS)
    return element
