"""Rules of constants, variables, hash tables, and of operations that compute element by element."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tpuembed_serving.batching.row_proof.rules import (
    BOOL,
    CONSTANT_DTYPES,
    DEPENDS_ON_WIDTH,
    ELEMENT_BYTES,
    INT64,
    MOST_KNOWN_NUMBERS,
    STRING,
    USES_BATCH_SIZE,
    USES_POSITION,
    VALUE_FIELDS,
    NodeCall,
    as_rows,
    computed_value,
    in_range,
    is_all_same,
    known_shape,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, broadcast, same

__all__ = ["is_one_width"]


def _constant(tensor: Any) -> Any:
    """The value of a small TensorProto, or None."""
    dtype = CONSTANT_DTYPES.get(tensor.dtype)
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    count = int(np.prod(shape, dtype=np.int64))
    if tensor.dtype == STRING and not shape and not any(tensor.string_val):
        return np.array(b"", object)  # the padding of names
    if dtype is None or count > MOST_KNOWN_NUMBERS:
        return None
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype).reshape(shape)
    values = list(getattr(tensor, VALUE_FIELDS[tensor.dtype])) or [0]
    values += [values[-1]] * (count - len(values))  # the last stands for what is left out
    return np.array(values[:count], dtype).reshape(shape)


@rule("Const", "HostConst")
def _const(call: NodeCall) -> list[Value]:
    tensor = call.node.attr["value"].tensor
    array = _constant(tensor)
    sizes = None
    if array is not None and array.dtype.kind == "i":
        sizes = tuple(Size.of(int(number)) for number in array.flat)
    return [Value(Kind.SAME, call.sizes(tensor.tensor_shape), sizes=sizes, array=array)]


@rule("VarHandleOp")
def _variable(call: NodeCall) -> list[Value]:
    return [Value(Kind.HANDLE, element=same(call.shape()))]


@rule("ReadVariableOp")
def _read(call: NodeCall) -> list[Value]:
    (handle,) = call.inputs
    if handle.kind is not Kind.HANDLE or handle.element is None:
        raise MixedError("it is not known what is read")
    return [handle.element]


@rule("Variable", "VariableV2", "ImmutableConst")
def _old_variable(call: NodeCall) -> list[Value]:
    return [same(call.shape())]


@rule("HashTableV2", "HashTable", "MutableHashTableV2", "MutableHashTable")
def _table(_: NodeCall) -> list[Value]:
    return [Value(Kind.HANDLE)]


@rule("LookupTableFindV2", "LookupTableFind")
def _find(call: NodeCall) -> list[Value]:
    table, keys, default = call.inputs
    if table.kind is not Kind.HANDLE or default.kind is not Kind.SAME:
        raise MixedError("it is not known what is looked up")
    if default.shape != ():  # some tables take one default for each key
        raise MixedError("it may have a default for each row")
    return _elementwise(NodeCall(call.node, [keys], call._symbol))


@rule("LookupTableSizeV2")
def _table_size(_: NodeCall) -> list[Value]:
    return [same(())]


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
    if op in ("Add", "AddV2"):
        return one + other
    if op == "Sub":
        return one - other
    if op == "Mul":
        return one * other
    if op in ("Maximum", "Minimum"):
        if one.at_least(other) or other.at_least(one):
            return one if one.at_least(other) == (op == "Maximum") else other
        return None
    if other.number == 0:
        return None
    if one.number is not None and other.number is not None:
        quotient = one.number // other.number
        return Size.of(quotient if op == "FloorDiv" else one.number - quotient * other.number)
    exact = one.divided(other)
    if exact is None or other.number is None:  # a symbol may be 0
        return None
    return exact if op == "FloorDiv" else Size.of(0)


_COMPARISONS: Final = frozenset({"Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"})
_ARITHMETIC: Final = frozenset({"Add", "AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Minimum"})
_MIRRORED: Final = {
    "Less": "Greater",
    "Greater": "Less",
    "LessEqual": "GreaterEqual",
    "GreaterEqual": "LessEqual",
}


def _of_sizes(call: NodeCall) -> list[Value] | None:
    """Return what arithmetic and comparisons of sizes give, or None if it is not known."""
    one, other = call.inputs
    if one.sizes is None or other.sizes is None or one.shape is None or other.shape is None:
        return None
    if len(one.shape) > 1 or len(other.shape) > 1:
        return None
    count = max(len(one.sizes), len(other.sizes))
    if {len(one.sizes), len(other.sizes)} - {1, count}:
        return None
    pairs = list(
        zip(*(list(v.sizes or ()) * (count if len(v.sizes or ()) == 1 else 1) for v in call.inputs), strict=True)
    )
    shape = one.shape if len(one.shape) > len(other.shape) or len(one.sizes) == count else other.shape
    shape = shape if len(shape) == max(len(one.shape), len(other.shape)) else (Size.of(count),)
    if call.op in _COMPARISONS:
        found = [_compared(call.op, *pair) for pair in pairs]
        if None in found:
            return None
        array = np.array(found).reshape([count] if shape else [])
        return [Value(Kind.SAME, shape, array=array)]
    numbers = [_arithmetic(call.op, *pair) for pair in pairs]
    if call.op == "FloorDiv" and is_all_same(call):  # of sizes by a number: a size
        sizes = [first.at_least(Size.of(0)) and (second.number or 0) > 0 for first, second in pairs]
        numbers = [
            call.unknown() if number is None and is_size else number
            for number, is_size in zip(numbers, sizes, strict=True)
        ]
    if any(number is None for number in numbers):
        return None
    return [computed_value(call.dtype(), shape, [number for number in numbers if number is not None])]


def _of_bounds(call: NodeCall) -> list[Value] | None:
    """Comparisons of the lowest and highest of all rows with a constant, and conditions over all rows."""
    kinds = [value.kind for value in call.inputs]
    for every, opposite in ((Kind.EVERY, "LogicalAnd"), (Kind.SOME, "LogicalOr")):
        if every in kinds and set(kinds) <= {every, Kind.SAME}:
            if call.op == opposite:
                return [Value(every, _of_all(call))]
            if call.op == "LogicalNot":
                return [Value(Kind.SOME if every is Kind.EVERY else Kind.EVERY, _of_all(call))]
    bounds = [kind for kind in kinds if kind in (Kind.LOWEST, Kind.HIGHEST)]
    if len(bounds) == 1 and len(kinds) == 2 and Kind.SAME in kinds and call.op in _MIRRORED:
        op = call.op if kinds[0] is bounds[0] else _MIRRORED[call.op]
        kind = Kind.EVERY if op.startswith("Greater") == (bounds[0] is Kind.LOWEST) else Kind.SOME
        return [Value(kind, _of_all(call))]
    return None


def _of_all(call: NodeCall) -> tuple[Size, ...] | None:
    """The shape that inputs without rows are broadcast to."""
    return broadcast([same(value.shape) for value in call.inputs], call.unknown)[0]


def _of_lengths(call: NodeCall) -> list[Value] | None:
    """Lengths of rows, out of where they start and end, and the columns that are within them."""
    if len(call.inputs) != 2:
        return None
    one, other = call.inputs
    if call.op == "Sub" and (one.kind, other.kind) == (Kind.ENDS, Kind.STARTS):
        is_of_one = one.shape == other.shape and one.target == other.target
        if is_of_one:
            return [rows_value(one.shape, 0, counts=one.target, width=call.width())]
    if call.op == "Maximum" and Kind.HIGHEST in (one.kind, other.kind):
        highest, least = (one, other) if one.kind is Kind.HIGHEST else (other, one)
        is_scalar = highest.shape == () and least.shape == ()
        if is_scalar and highest.width is not None and least.kind is Kind.SAME and least.numbers() == [0]:
            return [Value(Kind.SIZE, (), sizes=(highest.width,))]
    if call.op == "Less" and one.kind is Kind.COLUMNS and other.kind is Kind.ROWS and one.shape is not None:
        shape = known_shape(other.shape)
        if len(shape) == 2 and other.axis == 0 and shape[1].number == 1 and other.width == one.shape[-1]:
            return [rows_value([shape[0], one.shape[-1]], 0, counts=other.counts, fill=np.False_)]
    return None


def is_one_width(size: Size) -> bool:
    """Returns True if `size` is the width of the widest row and nothing else."""
    if len(size.terms) != 1:
        return False
    names, number = size.terms[0]
    return number == 1 and len(names) == 1 and names[0][0] == "w"


def _of_positions(call: NodeCall) -> list[Value] | None:
    """Return the value of an operation on positions of rows, or None if it is another operation."""
    pointers = [value for value in call.inputs if value.kind is Kind.POINTER]
    others = [value for value in call.inputs if value.kind is not Kind.POINTER]
    if any(value.target is None or value.target.is_padded for value in pointers):
        return None
    first = pointers[0]
    if call.op in ("SelectV2", "Select") and first is call.inputs[1] and len(pointers) == 1:
        condition, _, instead = call.inputs
        below = instead.numbers() if instead.kind is Kind.SAME else None
        if below and max(below) < 0 and condition.kind in (Kind.ROWS, Kind.SAME):
            shape, axis = broadcast([first, condition, instead], call.unknown)
            return [Value(Kind.POINTER, shape, axis or 0, target=first.target, holes=True)]
    if call.op == "Mul" and len(pointers) == 1 and first.target is not None:
        times = others[0].numbers() if others and others[0].kind is Kind.SAME and others[0].shape == () else None
        if times and times[0] > 0 and not first.holes:
            return [Value(Kind.POINTER, first.shape, first.axis, target=first.target * Size.of(times[0]))]
    if len(pointers) != 2 or pointers[0].target != pointers[1].target or any(each.holes for each in pointers):
        return None
    if call.op not in _COMPARISONS and call.op != "Sub":
        return None
    shape, axis = broadcast(pointers, call.unknown)
    return [rows_value(shape, axis or 0)]


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
    function = _FILLS.get(call.op)
    if function is None or any(fill is None for fill in fills):
        return None
    return function(*fills)


_FILLS: Final[dict[str, Callable[..., Any]]] = {
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "LogicalNot": np.logical_not,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
}

_ELEMENTWISE: Final = """
    Abs Acos Acosh Add AddV2 AddN AsString Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd BiasAddV1 Bucketize Ceil
    CheckNumerics ClipByValue Complex Conj Cos Cosh DecodeBase64 Digamma Div DivNoNan Elu EncodeBase64 Equal Erf Erfc Erfinv Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift
    Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter
    NotEqual Pow Real RealDiv Reciprocal RegexFullMatch RegexReplace Relu Relu6 RightShift Rint Round Rsqrt Selu SelectV2
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StringJoin
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber
    StringUpper Sub Substr Tan Tanh TruncateDiv TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy Zeta BitwiseAnd BitwiseOr
    BitwiseXor ComplexAbs Angle PopulationCount FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
"""


@rule(*_ELEMENTWISE.split())
def _elementwise(call: NodeCall) -> list[Value]:
    inputs = call.inputs
    if len(inputs) == 2 and call.op in _COMPARISONS | _ARITHMETIC:
        found = _of_sizes(call)
        if found is not None:
            return found
    if call.op == "BiasAdd" and call.text("data_format") not in ("", "NHWC"):
        raise MixedError("its channels are no last axis")
    found = _of_bounds(call) or _of_lengths(call)
    if found is not None:
        return found
    if any(value.kind is Kind.POINTER for value in inputs):
        found = _of_positions(call)
        if found is None:
            raise MixedError(USES_POSITION)
        return found
    unknown = (Kind.SIZE, Kind.LOWEST, Kind.HIGHEST)
    if any(value.kind in unknown for value in inputs) and all(value.shape == () for value in inputs):
        return [Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {USES_BATCH_SIZE}")]
    for value in inputs:
        as_rows(value, Kind.ROWS, Kind.SAME)
    shape, axis = broadcast(inputs, call.unknown)
    if axis is None:
        return [same(shape)]
    is_bool = call.op in _COMPARISONS or call.op.startswith(("Logical", "Is"))
    padded = shape is not None and any(size.is_padded for size in shape)
    return [rows_value(shape, axis, counts=call.entries() if is_bool else None, fill=_fill(call) if padded else None)]


@rule("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "_EagerConst")
def _identity(call: NodeCall) -> list[Value]:
    return list(call.inputs)


@rule("PlaceholderWithDefault")
def _default(call: NodeCall) -> list[Value]:
    return _ensure_shape(call) if call.inputs[0].kind is Kind.ROWS else list(call.inputs)


@rule("Cast", "Bitcast")
def _cast(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    source, to = call.dtype("SrcT") or call.dtype("T"), call.dtype("DstT") or call.dtype("type")
    narrow = {3, 9}  # others may lose what a size or a position is
    if value.kind in (Kind.ROWS, Kind.SAME):
        if call.op == "Bitcast":
            if ELEMENT_BYTES.get(source) is None or ELEMENT_BYTES.get(source) != ELEMENT_BYTES.get(to):
                raise MixedError("it changes the number of dimensions")
            return [Value(value.kind, value.shape, value.axis)]
        keeps = source in narrow and to in narrow and in_range(value.sizes or (), to)
        fill = None if value.fill is None or to not in CONSTANT_DTYPES else CONSTANT_DTYPES[to](value.fill)
        counts = value.counts if (source == BOOL and to in narrow) or keeps else None
        return [
            Value(
                value.kind,
                value.shape,
                value.axis,
                sizes=value.sizes if keeps else None,
                counts=counts,
                width=value.width if keeps else None,
                fill=fill,
            )
        ]
    if source in narrow and to in narrow and call.op == "Cast" and in_range(value.sizes or (), to):
        is_bound = value.kind in (Kind.LOWEST, Kind.HIGHEST)
        if is_bound and value.width is None and (source, to) == (INT64, 3):
            raise MixedError("the lowest or highest of all rows may wrap around")
        return [value]
    raise MixedError(USES_BATCH_SIZE if value.kind is Kind.SIZE else USES_POSITION)


@rule("ZerosLike", "OnesLike")
def _like(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    refuse_width(value)
    if value.kind is Kind.SAME:
        return [same(value.shape)]
    return [rows_value(value.shape, value.axis) if value.kind in (Kind.ROWS, Kind.POINTER) else _refuse(value)]


def _refuse(value: Value) -> Value:
    return as_rows(value)


@rule("Select")
def _select(call: NodeCall) -> list[Value]:
    """Takes whole rows where the condition is a vector; else all three have one shape."""
    condition, one, _ = call.inputs
    if condition.shape == ():
        return _elementwise(call)
    if is_all_same(call):
        return [same(one.shape)]
    shapes = [known_shape(value.shape) for value in call.inputs]
    if shapes[0] == shapes[1] == shapes[2]:
        return _elementwise(call)
    if len(shapes[0]) == 1 and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]:
        for value in call.inputs:
            as_rows(value)
            refuse_width(value)
        return [rows_value(shapes[1], 0)]
    raise MixedError("its condition has another shape")


@rule("EnsureShape")
def _ensure_shape(call: NodeCall) -> list[Value]:
    (value,) = call.inputs
    wanted = call.shape()
    if wanted is None or value.kind is Kind.SAME:
        return [value]
    if value.kind is not Kind.ROWS:
        raise MixedError(USES_POSITION)
    if value.shape is not None and len(value.shape) != len(wanted):
        raise MixedError("another number of dimensions is asked for")
    if wanted[value.axis].number is not None:
        raise MixedError("a fixed number of rows is asked for")
    if value.is_padded:
        return [value] if all(size.number is None for size in wanted) else _wide()
    shape = list(value.shape) if value.shape is not None else list(wanted)
    if value.shape is None and value.axis == 0:
        raise MixedError("the number of dimensions of an input is not known")
    found = [size if want.number is None else want for size, want in zip(shape, wanted, strict=True)]
    return [rows_value(found, value.axis, counts=value.counts)]


def _wide() -> list[Value]:
    raise MixedError(DEPENDS_ON_WIDTH)
