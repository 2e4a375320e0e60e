"""Rules of constants, variables, hash tables, and of operations that compute element by element."""

import dataclasses
import operator
import re
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tpuembed.row_proof.values import Kind, MixedError, NodeCall, Size, Value, Why, rule, same

_KNOWN_DTYPES: Final = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool)
_INTEGERS: Final = (tf.int32, tf.int64)
"""Other integers may lose what a size or a position is."""


@rule("Const")
def _const(call: NodeCall) -> Value:
    tensor, shape = call.attr("value").tensor, call.sizes(call.attr("value").tensor.tensor_shape)
    dtype, count = tf.dtypes.as_dtype(tensor.dtype), int(np.prod([dim.size for dim in tensor.tensor_shape.dim]))
    if dtype == tf.string and not shape and not any(tensor.string_val):
        return same((), array=np.array(b"", object))  # the padding of names
    if dtype not in _KNOWN_DTYPES or count > Value.LIMIT:
        return same(shape)
    array = tf.make_ndarray(tensor)
    return same(shape, [Size.of(int(number)) for number in array.flat] if dtype.is_integer else None, array)


@rule("Variable VariableV2 ImmutableConst VarHandleOp HashTableV2 MutableHashTableV2")
def _variable(call: NodeCall) -> Value:
    if "Table" in call.op:
        return Value(Kind.HANDLE)
    value = same(call.sizes(call.attr("shape").shape))
    return Value(Kind.HANDLE, element=value) if call.op == "VarHandleOp" else value


@rule("LookupTableFindV2")
def _find(call: NodeCall) -> list[Value] | Value:
    table, keys, default = call.inputs
    if table.kind is not Kind.HANDLE or default.kind is not Kind.SAME:
        raise MixedError("it is not known what is looked up")
    if default.shape != ():  # some tables take one default for each key
        raise MixedError("it may have a default for each row")
    return _elementwise(NodeCall(call.node, [keys], call.symbol))


rule("ReadVariableOp")(lambda call: call.inputs[0].held)
rule("LookupTableSizeV2 TensorListLength")(lambda _: same(()))
rule("Identity IdentityN StopGradient PreventGradient")(lambda call: list(call.inputs))


# ---- one by one

_RING: Final = {"Add": operator.add, "AddV2": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_ORDERS: Final = frozenset({"Less", "Greater", "LessEqual", "GreaterEqual"})
_COMPARISONS: Final = _ORDERS | {"Equal", "NotEqual"}
_ARITHMETIC: Final = frozenset({*_RING, "FloorDiv", "FloorMod", "Maximum", "Minimum"})


def _compared(op: str, one: Size, other: Size) -> bool | None:
    """The outcome of a comparison, where it is the same for all numbers that the symbols stand for."""
    if op in _ORDERS:
        first, second = (one, other) if op.startswith("Greater") else (other, one)
        strict = int(not op.endswith("Equal"))
        if first.at_least(second, strict):
            return True
        return False if second.at_least(first, 1 - strict) else None
    if one == other:
        return op == "Equal"
    return op == "NotEqual" if one.at_least(other, 1) or other.at_least(one, 1) else None


def _arithmetic(call: NodeCall, one: Size, other: Size) -> Size | None:
    op = call.op
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
    if exact is None and op == "FloorDiv" and call.is_same and other.number > 0 and one.at_least(Size.of(0)):
        return call.unknown()  # of a size by a number: a size
    return exact if exact is None or op == "FloorDiv" else Size.of(0)


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
        if None not in outcomes:
            return same(shape, array=np.array(outcomes).reshape([count] if shape else []))
        # Of numbers that are the same in every run, the outcome is the same in every run, whatever it is.
        unknown = [size for outcome, pair in zip(outcomes, pairs, strict=True) if outcome is None for size in pair]
        return same(shape) if all(size.is_same for size in unknown) else None
    numbers = [number for pair in pairs if (number := _arithmetic(call, *pair)) is not None]
    return None if len(numbers) < count else Value.integers(numbers, shape, call.dtype())


def _of_bounds(call: NodeCall) -> Value | None:
    """Comparisons of the lowest and highest of all rows with a constant, and conditions over all rows."""
    kinds = {value.kind for value in call.inputs}
    of_rows = kinds - {Kind.SAME}
    found = next(iter(of_rows)) if len(of_rows) == 1 else None
    kind = None
    if found in (Kind.EVERY, Kind.SOME):
        if call.op == ("LogicalAnd" if found is Kind.EVERY else "LogicalOr"):
            kind = found
        elif call.op == "LogicalNot":
            kind = Kind.SOME if found is Kind.EVERY else Kind.EVERY
    elif found in (Kind.LOWEST, Kind.HIGHEST) and Kind.SAME in kinds and call.op in _ORDERS:
        is_greater = call.op.startswith("Greater") == (call.inputs[0].kind is found)
        kind = Kind.EVERY if is_greater == (found is Kind.LOWEST) else Kind.SOME
    shape = call.broadcast([same(value.shape) for value in call.inputs])[0] if kind else None
    return Value(kind, shape) if kind else None


def _of_lengths(call: NodeCall) -> Value | None:
    """Lengths of rows, out of where they start and end, and the columns that are within them."""
    if len(call.inputs) != 2:
        return None
    one, other = call.inputs
    if call.op == "Sub" and (one.kind, other.kind) == (Kind.ENDS, Kind.STARTS):
        is_of_one = one.shape == other.shape and one.target == other.target
        return Value.rows(one.shape, 0, counts=one.target, width=call.symbol("w")) if is_of_one else None
    if call.op == "Maximum" and Kind.HIGHEST in (one.kind, other.kind):
        highest, least = (one, other) if one.kind is Kind.HIGHEST else (other, one)
        is_scalar = highest.shape == () and least.shape == ()
        if is_scalar and highest.width is not None and least.kind is Kind.SAME and least.numbers() == [0]:
            return Value(Kind.SIZE, (), sizes=(highest.width,))
    if call.op == "Less" and one.kind is Kind.COLUMNS and other.kind is Kind.ROWS and one.shape is not None:
        shape = other.known_shape
        if len(shape) == 2 and other.axis == 0 and shape[1].number == 1 and other.width == one.shape[-1]:
            return Value.rows([shape[0], one.shape[-1]], 0, counts=other.counts, fill=np.False_)
    return None


def _fill(call: NodeCall) -> Any:
    """Return the fill behind the rows of an elementwise result, or None if it is not known."""
    fills: list[Any] = [
        value.fill if value.is_padded else value.array if value.kind is Kind.SAME and value.shape == () else None
        for value in call.inputs
    ]
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


@rule(_ELEMENTWISE)
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
    if pointers := [value for value in inputs if value.kind is Kind.POINTER]:  # how far positions are from each other
        target = pointers[0].target
        if len(pointers) != 2 or pointers[1].target != target or (call.op not in _COMPARISONS and call.op != "Sub"):
            raise MixedError(Why.USES_POSITION)
        if target is None or target.has("w"):
            raise MixedError(Why.USES_POSITION)
        shape, axis = call.broadcast(pointers)
        return Value.rows(shape, axis or 0)
    unknown = (Kind.SIZE, Kind.LOWEST, Kind.HIGHEST)
    if any(value.kind in unknown for value in inputs) and all(value.shape == () for value in inputs):
        return Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {Why.USES_BATCH_SIZE}")
    for value in inputs:
        value.of(Kind.ROWS, Kind.SAME)
    shape, axis = call.broadcast(inputs)
    if axis is None:
        return same(shape)
    is_bool = call.op in _COMPARISONS or call.op.startswith(("Logical", "Is"))
    is_padded = shape is not None and any(size.has("w") for size in shape)
    return Value.rows(
        shape, axis, counts=call.symbol("n") if is_bool else None, fill=_fill(call) if is_padded else None
    )


@rule("Cast")
def _cast(call: NodeCall) -> Value:
    (value,) = call.inputs
    source, to = call.dtype("SrcT"), call.dtype("DstT")
    keeps = source in _INTEGERS and to in _INTEGERS and Value.in_range(value.sizes or (), to)
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
        raise MixedError(Why.USES_BATCH_SIZE if value.kind is Kind.SIZE else Why.USES_POSITION)
    if value.kind in (Kind.LOWEST, Kind.HIGHEST) and value.width is None and (source, to) == _INTEGERS[::-1]:
        raise MixedError("the lowest or highest of all rows may wrap around")
    return value


@rule("ZerosLike OnesLike")
def _like(call: NodeCall) -> Value:
    (value,) = call.inputs
    value.of(Kind.SAME, Kind.ROWS, Kind.POINTER).unpadded()
    return same(value.shape) if value.kind is Kind.SAME else Value.rows(value.shape, value.axis)


@rule("EnsureShape PlaceholderWithDefault")
def _ensure_shape(call: NodeCall) -> Value:
    (value,) = call.inputs
    wanted = call.sizes(call.attr("shape").shape)
    if wanted is None or value.kind is Kind.SAME:
        return value
    if value.kind is not Kind.ROWS:
        raise MixedError(Why.USES_POSITION)
    if value.shape is not None and len(value.shape) != len(wanted):
        raise MixedError("another number of dimensions is asked for")
    if wanted[value.axis].number is not None:
        raise MixedError(Why.FIXED_ROWS)
    if value.is_padded:
        if any(size.number is not None for size in wanted):
            raise MixedError(Why.DEPENDS_ON_WIDTH)
        return value
    shape = value.known_shape
    found = [size if want.number is None else want for size, want in zip(shape, wanted, strict=True)]
    return Value.rows(found, value.axis, counts=value.counts)
