"""Rules of constants, variables, hash tables, and of operations that compute element by element."""

import dataclasses
import operator
import re
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tpuembed.row_proof.rules import (
    DEPENDS_ON_WIDTH,
    MOST_KNOWN_NUMBERS,
    USES_BATCH_SIZE,
    USES_POSITION,
    NodeCall,
    as_rows,
    computed_value,
    in_range,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed.row_proof.values import Kind, MixedError, Size, Value, broadcast, same

__all__ = ["is_one_width"]

_KNOWN_DTYPES: Final = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool)
_INTEGERS: Final = (tf.int32, tf.int64)
"""Other integers may lose what a size or a position is."""


@rule("Const")
def _const(call: NodeCall) -> Value:
    tensor, shape = call.attr("value").tensor, call.sizes(call.attr("value").tensor.tensor_shape)
    dtype, count = tf.dtypes.as_dtype(tensor.dtype), int(np.prod([dim.size for dim in tensor.tensor_shape.dim]))
    if dtype == tf.string and not shape and not any(tensor.string_val):
        return same((), array=np.array(b"", object))  # the padding of names
    if dtype not in _KNOWN_DTYPES or count > MOST_KNOWN_NUMBERS:
        return same(shape)
    array = tf.make_ndarray(tensor)
    return same(shape, [Size.of(int(number)) for number in array.flat] if dtype.is_integer else None, array)


@rule("VarHandleOp")
def _variable(call: NodeCall) -> Value:
    return Value(Kind.HANDLE, element=same(call.sizes(call.attr("shape").shape)))


@rule("ReadVariableOp")
def _read(call: NodeCall) -> Value:
    (handle,) = call.inputs
    if handle.kind is not Kind.HANDLE or handle.element is None:
        raise MixedError("it is not known what is read")
    return handle.element


@rule("Variable", "VariableV2", "ImmutableConst")
def _old_variable(call: NodeCall) -> Value:
    return same(call.sizes(call.attr("shape").shape))


@rule("HashTableV2", "MutableHashTableV2")
def _table(_: NodeCall) -> Value:
    return Value(Kind.HANDLE)


@rule("LookupTableFindV2")
def _find(call: NodeCall) -> Value:
    table, keys, default = call.inputs
    if table.kind is not Kind.HANDLE or default.kind is not Kind.SAME:
        raise MixedError("it is not known what is looked up")
    if default.shape != ():  # some tables take one default for each key
        raise MixedError("it may have a default for each row")
    return _elementwise(NodeCall(call.node, [keys], call.symbol))


@rule("LookupTableSizeV2")
def _table_size(_: NodeCall) -> Value:
    return same(())


# ---- one by one


def _compared(op: str, one: Size, other: Size) -> bool | None:
    """The outcome of a comparison, where it is the same for all numbers that the symbols stand for."""
    if op in ("Greater", "Less", "GreaterEqual", "LessEqual"):
        first, second = (one, other) if op.startswith("Greater") else (other, one)
        strict = int(not op.endswith("Equal"))
        if first.at_least(second, strict):
            return True
        return False if second.at_least(first, 1 - strict) else None
    if one == other:
        return op == "Equal"
    if one.at_least(other, 1) or other.at_least(one, 1):
        return op == "NotEqual"
    return None


def _arithmetic(op: str, one: Size, other: Size) -> Size | None:
    if op in _RING:
        return _RING[op](one, other)
    if op in ("Maximum", "Minimum"):
        if one.at_least(other) or other.at_least(one):
            return one if one.at_least(other) == (op == "Maximum") else other
        return None
    if not other.number:  # a symbol may be 0
        return None
    if one.number is not None:
        return Size.of(one.number // other.number if op == "FloorDiv" else one.number % other.number)
    exact = one.divided(other)
    return exact if exact is None or op == "FloorDiv" else Size.of(0)


_RING: Final = {"Add": operator.add, "AddV2": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_COMPARISONS: Final = frozenset({"Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"})
_ARITHMETIC: Final = frozenset({*_RING, "FloorDiv", "FloorMod", "Maximum", "Minimum"})
_ORDERS: Final = frozenset({"Less", "Greater", "LessEqual", "GreaterEqual"})


def _of_sizes(call: NodeCall) -> Value | None:
    """Return what arithmetic and comparisons of sizes give, or None if it is not known."""
    known = [value for value in call.inputs if value.sizes is not None and value.rank in (0, 1)]
    if len(known) != 2:
        return None
    one, other = (value.sizes or () for value in known)
    count = max(len(one), len(other))
    if {len(one), len(other)} - {1, count}:
        return None
    pairs = list(zip(*(sizes * (count if len(sizes) == 1 else 1) for sizes in (one, other)), strict=True))
    shape = (Size.of(count),) if any(value.rank for value in known) else ()
    if call.op in _COMPARISONS:
        outcomes = [_compared(call.op, *pair) for pair in pairs]
        return None if None in outcomes else same(shape, array=np.array(outcomes).reshape([count] if shape else []))
    numbers = []
    for first, second in pairs:
        number = _arithmetic(call.op, first, second)
        if number is None and call.op == "FloorDiv" and call.is_same and (second.number or 0) > 0:
            number = call.unknown() if first.at_least(Size.of(0)) else None  # of a size by a number: a size
        if number is None:
            return None
        numbers.append(number)
    return computed_value(call.dtype(), shape, numbers)


def _of_bounds(call: NodeCall) -> Value | None:
    """Comparisons of the lowest and highest of all rows with a constant, and conditions over all rows."""
    kinds = {value.kind for value in call.inputs}
    of_rows = kinds - {Kind.SAME}
    found = next(iter(of_rows)) if len(of_rows) == 1 else None
    if found in (Kind.EVERY, Kind.SOME):
        if call.op == ("LogicalAnd" if found is Kind.EVERY else "LogicalOr"):
            return Value(found, _of_all(call))
        if call.op == "LogicalNot":
            return Value(Kind.SOME if found is Kind.EVERY else Kind.EVERY, _of_all(call))
    if found in (Kind.LOWEST, Kind.HIGHEST) and Kind.SAME in kinds and call.op in _ORDERS:
        is_greater = call.op.startswith("Greater") == (call.inputs[0].kind is found)
        return Value(Kind.EVERY if is_greater == (found is Kind.LOWEST) else Kind.SOME, _of_all(call))
    return None


def _of_all(call: NodeCall) -> tuple[Size, ...] | None:
    """The shape that inputs without rows are broadcast to."""
    return broadcast([same(value.shape) for value in call.inputs], call.unknown)[0]


def _of_lengths(call: NodeCall) -> Value | None:
    """Lengths of rows, out of where they start and end, and the columns that are within them."""
    if len(call.inputs) != 2:
        return None
    one, other = call.inputs
    if call.op == "Sub" and (one.kind, other.kind) == (Kind.ENDS, Kind.STARTS):
        is_of_one = one.shape == other.shape and one.target == other.target
        return rows_value(one.shape, 0, counts=one.target, width=call.symbol("w")) if is_of_one else None
    if call.op == "Maximum" and Kind.HIGHEST in (one.kind, other.kind):
        highest, least = (one, other) if one.kind is Kind.HIGHEST else (other, one)
        is_scalar = highest.shape == () and least.shape == ()
        if is_scalar and highest.width is not None and least.kind is Kind.SAME and least.numbers() == [0]:
            return Value(Kind.SIZE, (), sizes=(highest.width,))
    if call.op == "Less" and one.kind is Kind.COLUMNS and other.kind is Kind.ROWS and one.shape is not None:
        shape = other.known_shape
        if len(shape) == 2 and other.axis == 0 and shape[1].number == 1 and other.width == one.shape[-1]:
            return rows_value([shape[0], one.shape[-1]], 0, counts=other.counts, fill=np.False_)
    return None


def is_one_width(size: Size) -> bool:
    """Returns True if `size` is the width of the widest row and nothing else."""
    names = [*size.symbols]
    return len(names) == 1 and names[0][0] == "w" and size == Size.symbol(names[0])


def _of_positions(call: NodeCall) -> Value:
    """Return the value of an operation on positions of rows: how far they are from each other."""
    pointers = [value for value in call.inputs if value.kind is Kind.POINTER]
    target = pointers[0].target
    if len(pointers) != 2 or pointers[1].target != target or (call.op not in _COMPARISONS and call.op != "Sub"):
        raise MixedError(USES_POSITION)
    if target is None or target.is_padded:
        raise MixedError(USES_POSITION)
    shape, axis = broadcast(pointers, call.unknown)
    return rows_value(shape, axis or 0)


def _fill(call: NodeCall) -> Any:
    """Return the fill behind the rows of an elementwise result, or None if it is not known."""
    fills: list[Any] = []
    for value in call.inputs:
        if value.is_padded:
            fills.append(value.fill)
        else:
            fills.append(value.array if value.kind is Kind.SAME and value.shape == () else None)
    if call.op in ("SelectV2", "Select") and fills[0] is not None:
        return fills[1] if bool(fills[0]) else fills[2]
    if call.op == "LogicalAnd" and any(fill is not None and not fill for fill in fills):
        return np.False_
    if call.op not in _FILLED or any(fill is None for fill in fills):
        return None
    return getattr(np, re.sub(r"\B([A-Z])", r"_\1", call.op).lower())(*fills)


_FILLED: Final = _COMPARISONS | {"LogicalAnd", "LogicalOr", "LogicalNot", "Maximum", "Minimum"}
"""Operations of which numpy has functions with the same names."""

_ELEMENTWISE: Final = """
    Abs Acos Acosh Add AddV2 AddN AsString Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd BiasAddV1 Bucketize Ceil
    CheckNumerics ClipByValue Complex Conj Cos Cosh DecodeBase64 Digamma Div DivNoNan Elu EncodeBase64 Equal Erf Erfc Erfinv Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift
    Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter
    NotEqual Pow Real RealDiv Reciprocal RegexFullMatch RegexReplace Relu Relu6 RightShift Rint Round Rsqrt Selu Select SelectV2
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StringJoin
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber
    StringUpper Sub Substr Tan Tanh TruncateDiv TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy Zeta BitwiseAnd BitwiseOr
    BitwiseXor ComplexAbs Angle PopulationCount FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
"""


@rule(*_ELEMENTWISE.split())
def _elementwise(call: NodeCall) -> Value:
    inputs = call.inputs
    if call.op == "BiasAdd" and call.attr("data_format").s not in (b"", b"NHWC"):
        raise MixedError("its channels are no last axis")
    if call.op == "Select" and inputs[0].shape not in ((), inputs[1].shape):
        raise MixedError("its condition has another shape")
    found = _of_sizes(call) if call.op in _COMPARISONS | _ARITHMETIC else None
    found = found or _of_bounds(call) or _of_lengths(call)
    if found is not None:
        return found
    if any(value.kind is Kind.POINTER for value in inputs):
        return _of_positions(call)
    unknown = (Kind.SIZE, Kind.LOWEST, Kind.HIGHEST)
    if any(value.kind in unknown for value in inputs) and all(value.shape == () for value in inputs):
        return Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {USES_BATCH_SIZE}")
    for value in inputs:
        as_rows(value, Kind.ROWS, Kind.SAME)
    shape, axis = broadcast(inputs, call.unknown)
    if axis is None:
        return same(shape)
    is_bool = call.op in _COMPARISONS or call.op.startswith(("Logical", "Is"))
    padded = shape is not None and any(size.is_padded for size in shape)
    return rows_value(shape, axis, counts=call.symbol("n") if is_bool else None, fill=_fill(call) if padded else None)


@rule("Identity", "IdentityN", "StopGradient", "PreventGradient")
def _identity(call: NodeCall) -> list[Value]:
    return list(call.inputs)


@rule("Cast")
def _cast(call: NodeCall) -> Value:
    (value,) = call.inputs
    source, to = call.dtype("SrcT"), call.dtype("DstT")
    keeps = source in _INTEGERS and to in _INTEGERS and in_range(value.sizes or (), to)
    if value.kind in (Kind.ROWS, Kind.SAME):
        return dataclasses.replace(
            value,
            array=None,
            sizes=value.sizes if keeps else None,
            counts=value.counts if keeps or (source == tf.bool and to in _INTEGERS) else None,
            width=value.width if keeps else None,
            fill=None if value.fill is None or to not in _KNOWN_DTYPES else to.as_numpy_dtype(value.fill),
        )
    if not keeps:
        raise MixedError(USES_BATCH_SIZE if value.kind is Kind.SIZE else USES_POSITION)
    if value.kind in (Kind.LOWEST, Kind.HIGHEST) and value.width is None and (source, to) == _INTEGERS[::-1]:
        raise MixedError("the lowest or highest of all rows may wrap around")
    return value


@rule("ZerosLike", "OnesLike")
def _like(call: NodeCall) -> Value:
    (value,) = call.inputs
    refuse_width(value)
    if value.kind is Kind.SAME:
        return same(value.shape)
    return rows_value(as_rows(value, Kind.ROWS, Kind.POINTER).shape, value.axis)


@rule("EnsureShape", "PlaceholderWithDefault")
def _ensure_shape(call: NodeCall) -> Value:
    (value,) = call.inputs
    wanted = call.sizes(call.attr("shape").shape)
    if wanted is None or value.kind is Kind.SAME:
        return value
    if value.kind is not Kind.ROWS:
        raise MixedError(USES_POSITION)
    if value.shape is not None and len(value.shape) != len(wanted):
        raise MixedError("another number of dimensions is asked for")
    if wanted[value.axis].number is not None:
        raise MixedError("a fixed number of rows is asked for")
    if value.is_padded:
        if any(size.number is not None for size in wanted):
            raise MixedError(DEPENDS_ON_WIDTH)
        return value
    shape = value.known_shape
    found = [size if want.number is None else want for size, want in zip(shape, wanted, strict=True)]
    return rows_value(found, value.axis, counts=value.counts)
