"""The table of operations: what each makes of rows. An operation that is not here is mixed.

A rule is called with a `Call`, none of whose inputs is mixed, and returns the operation's outputs, or raises `MixedError`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from tpuembed_serving.row_proof.values import ROWS, Kind, MixedError, Size, Value, broadcast, same

__all__ = ["OUTPUTS", "RULES", "Call"]

_SMALL: Final = 4096
_POSITION: Final = "a position in the batch is used as a number"
_BATCH_SIZE: Final = "a number made from the batch size is used otherwise than to shape rows"
_WIDTH: Final = "it depends on the width of the widest row"
_CONSTANTS: Final = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 10: np.bool_}
_VALUES: Final = {1: "float_val", 2: "double_val", 3: "int_val", 9: "int64_val", 10: "bool_val"}
_INTEGERS: Final = frozenset({3, 4, 5, 6, 9, 17, 22, 23})
_BOOL: Final = 10
_OF_ALL: Final = (Kind.EVERY, Kind.SOME, Kind.LOWEST, Kind.HIGHEST)
_INT64: Final = 9
_STRING: Final = 7
_BYTES: Final = {1: 4, 3: 4, 22: 4, 2: 8, 9: 8, 23: 8, 19: 2, 14: 2, 5: 2, 17: 2, 4: 1, 6: 1}


class Call:
    """A node and what is known of its inputs."""

    def __init__(self, node: Any, inputs: Sequence[Value], symbol: Callable[[str], Size]) -> None:
        self.node, self.inputs, self._symbol = node, inputs, symbol

    @property
    def op(self) -> str:
        """The operation's name."""
        return str(self.node.op)

    def unknown(self) -> Size:
        """A number that is the same in every run."""
        return self._symbol("s")

    def entries(self) -> Size:
        """A number of entries of rows."""
        return self._symbol("n")

    def distinct(self) -> Size:
        """A number of values that differ."""
        return self._symbol("u")

    def width(self) -> Size:
        """The width of the widest row."""
        return self._symbol("w")

    def flag(self, name: str) -> bool:
        """A bool attribute."""
        return bool(self.node.attr[name].b) if name in self.node.attr else False

    def integer(self, name: str, default: int = 0) -> int:
        """An int attribute."""
        return int(self.node.attr[name].i) if name in self.node.attr else default

    def integers(self, name: str) -> list[int]:
        """An attribute that is a list of ints."""
        return list(self.node.attr[name].list.i) if name in self.node.attr else []

    def text(self, name: str) -> str:
        """A string attribute."""
        return self.node.attr[name].s.decode() if name in self.node.attr else ""

    def dtype(self, name: str = "T") -> int:
        """A dtype attribute."""
        return int(self.node.attr[name].type) if name in self.node.attr else 0

    def shape(self, name: str = "shape") -> tuple[Size, ...] | None:
        """A shape attribute, with symbols for what it leaves open."""
        return self.sizes(self.node.attr[name].shape) if name in self.node.attr else None

    def sizes(self, shape: Any) -> tuple[Size, ...] | None:
        """Returns the sizes of a TensorShapeProto."""
        if shape.unknown_rank:
            return None
        return tuple(Size.of(dim.size) if dim.size >= 0 else self.unknown() for dim in shape.dim)

    def numbers(self, index: int) -> list[int]:
        """The numbers of an input that is a known constant."""
        found = self.inputs[index].numbers() if self.inputs[index].kind is Kind.SAME else None
        if found is None:
            raise MixedError("an axis or a size is not known before it runs")
        return found


Rule = Callable[[Call], list[Value]]
RULES: Final[dict[str, Rule]] = {}
OUTPUTS: Final[dict[str, Callable[[Any], list[tuple[str, int]]]]] = {}
"""Of operations with several named outputs: the names, and how many tensors each is."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return add


def _outputs(op: str, *names: str) -> None:
    OUTPUTS[op] = lambda _: [(name, 1) for name in names]


def _known(shape: tuple[Size, ...] | None) -> tuple[Size, ...]:
    if shape is None:
        raise MixedError("the number of dimensions of an input is not known")
    return shape


def _laid_out(value: Value, *kinds: Kind) -> Value:
    """`value`, which must be of rows."""
    if value.kind is Kind.SIZE:
        raise MixedError(_BATCH_SIZE)
    if value.kind not in (kinds or (Kind.ROWS,)):
        raise MixedError(
            _POSITION if value.kind in (Kind.POINTER, Kind.INDICES, Kind.SPLITS, Kind.ENDS) else "rows meet here"
        )
    return value


def _all_same(call: Call) -> bool:
    return all(value.kind is Kind.SAME for value in call.inputs)


def _no_width(*values: Value) -> None:
    if any(value.is_padded for value in values):
        raise MixedError(_WIDTH)


def _rows(shape: Iterable[Size] | None, axis: int, **more: Any) -> Value:
    """Rows of this shape, of which no other size may depend on the batch."""
    known = None if shape is None else tuple(shape)
    if known is not None:
        if not known[axis].is_count:
            raise MixedError("rows do not stay apart")
        if any(not size.is_same and not _is_width(size) for index, size in enumerate(known) if index != axis):
            raise MixedError("two axes depend on the batch size")
    return Value(Kind.ROWS, known, axis, **more)


def _is_width(size: Size) -> bool:
    return all(name[0] in "sw" for name in size.symbols)


def _numbers_value(shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """A tensor of integers."""
    kind = Kind.SAME if all(size.is_same for size in sizes) else Kind.SIZE
    return Value(kind, shape, sizes=tuple(sizes))


def _in_range(sizes: Iterable[Size], dtype: int) -> bool:
    """Whether integers of a dtype hold these numbers, in a run of less than 2**14 rows; others wrap around."""
    largest = 2**63 if dtype == _INT64 else 2**31
    for size in sizes:
        for names, number in size.terms:
            if not -largest <= number < largest:
                return False
            if size.symbols and abs(number) > (largest >> 15 if names else largest >> 1):
                return False
    return True


def _computed(dtype: int, shape: tuple[Size, ...], sizes: Sequence[Size]) -> Value:
    """A tensor of integers that arithmetic makes."""
    if _in_range(sizes, dtype):
        return _numbers_value(shape, sizes)
    if all(size.is_same for size in sizes):
        return same(shape)
    raise MixedError(f"{_BATCH_SIZE}, and wraps around")


# ---- constants, variables, tables


def _constant(tensor: Any) -> Any:
    """The value of a small TensorProto, or None."""
    dtype = _CONSTANTS.get(tensor.dtype)
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    count = int(np.prod(shape, dtype=np.int64))
    if dtype is None or count > _SMALL:
        return None
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype).reshape(shape)
    values = list(getattr(tensor, _VALUES[tensor.dtype])) or [0]
    values += [values[-1]] * (count - len(values))  # the last stands for what is left out
    return np.array(values[:count], dtype).reshape(shape)


@_rule("Const", "HostConst")
def _const(call: Call) -> list[Value]:
    tensor = call.node.attr["value"].tensor
    array = _constant(tensor)
    sizes = None
    if array is not None and array.dtype.kind == "i":
        sizes = tuple(Size.of(int(number)) for number in array.flat)
    return [Value(Kind.SAME, call.sizes(tensor.tensor_shape), sizes=sizes, array=array)]


@_rule("VarHandleOp")
def _variable(call: Call) -> list[Value]:
    return [Value(Kind.HANDLE, element=same(call.shape()))]


@_rule("ReadVariableOp")
def _read(call: Call) -> list[Value]:
    (handle,) = call.inputs
    if handle.kind is not Kind.HANDLE or handle.element is None:
        raise MixedError("it is not known what is read")
    return [handle.element]


@_rule("Variable", "VariableV2", "ImmutableConst")
def _old_variable(call: Call) -> list[Value]:
    return [same(call.shape())]


@_rule("HashTableV2", "HashTable", "MutableHashTableV2", "MutableHashTable")
def _table(_: Call) -> list[Value]:
    return [Value(Kind.HANDLE)]


@_rule("LookupTableFindV2", "LookupTableFind")
def _find(call: Call) -> list[Value]:
    table, keys, default = call.inputs
    if table.kind is not Kind.HANDLE or default.kind is not Kind.SAME:
        raise MixedError("it is not known what is looked up")
    if default.shape != ():  # some tables take one default for each key
        raise MixedError("it may have a default for each row")
    return _elementwise(Call(call.node, [keys], call._symbol))


@_rule("LookupTableSizeV2")
def _table_size(_: Call) -> list[Value]:
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


def _of_sizes(call: Call) -> list[Value] | None:
    """What arithmetic and comparisons of sizes give, where it is known."""
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
    if call.op == "FloorDiv" and _all_same(call):  # of sizes by a number: a size
        sizes = [first.at_least(Size.of(0)) and (second.number or 0) > 0 for first, second in pairs]
        numbers = [
            call.unknown() if number is None and is_size else number
            for number, is_size in zip(numbers, sizes, strict=True)
        ]
    if any(number is None for number in numbers):
        return None
    return [_computed(call.dtype(), shape, [number for number in numbers if number is not None])]


def _of_bounds(call: Call) -> list[Value] | None:
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


def _of_all(call: Call) -> tuple[Size, ...] | None:
    """The shape that inputs without rows are broadcast to."""
    return broadcast([same(value.shape) for value in call.inputs], call.unknown)[0]


def _of_lengths(call: Call) -> list[Value] | None:
    """Lengths of rows, out of where they start and end, and the columns that are within them."""
    if len(call.inputs) != 2:
        return None
    one, other = call.inputs
    if call.op == "Sub" and (one.kind, other.kind) == (Kind.ENDS, Kind.STARTS):
        is_of_one = one.shape == other.shape and one.target == other.target
        if is_of_one:
            return [_rows(one.shape, 0, counts=one.target, width=call.width())]
    if call.op == "Maximum" and Kind.HIGHEST in (one.kind, other.kind):
        highest, least = (one, other) if one.kind is Kind.HIGHEST else (other, one)
        is_scalar = highest.shape == () and least.shape == ()
        if is_scalar and highest.width is not None and least.kind is Kind.SAME and least.numbers() == [0]:
            return [Value(Kind.SIZE, (), sizes=(highest.width,))]
    if call.op == "Less" and one.kind is Kind.COLUMNS and other.kind is Kind.ROWS and one.shape is not None:
        shape = _known(other.shape)
        if len(shape) == 2 and other.axis == 0 and shape[1].number == 1 and other.width == one.shape[-1]:
            return [_rows([shape[0], one.shape[-1]], 0, counts=other.counts, fill=np.False_)]
    return None


def _is_one_width(size: Size) -> bool:
    """Whether it is the width of the widest row and nothing else."""
    if len(size.terms) != 1:
        return False
    names, number = size.terms[0]
    return number == 1 and len(names) == 1 and names[0][0] == "w"


def _of_positions(call: Call) -> list[Value] | None:
    """What keeps positions of rows, or makes row by row of them."""
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
    return [_rows(shape, axis or 0)]


def _fill(call: Call) -> Any:
    """What stands behind the rows of an elementwise operation's result; None where it is not known."""
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


@_rule(*_ELEMENTWISE.split())
def _elementwise(call: Call) -> list[Value]:
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
            raise MixedError(_POSITION)
        return found
    unknown = (Kind.SIZE, Kind.LOWEST, Kind.HIGHEST)
    if any(value.kind in unknown for value in inputs) and all(value.shape == () for value in inputs):
        return [Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {_BATCH_SIZE}")]
    for value in inputs:
        _laid_out(value, Kind.ROWS, Kind.SAME)
    shape, axis = broadcast(inputs, call.unknown)
    if axis is None:
        return [same(shape)]
    is_bool = call.op in _COMPARISONS or call.op.startswith(("Logical", "Is"))
    padded = shape is not None and any(size.is_padded for size in shape)
    return [_rows(shape, axis, counts=call.entries() if is_bool else None, fill=_fill(call) if padded else None)]


@_rule("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "_EagerConst")
def _identity(call: Call) -> list[Value]:
    return list(call.inputs)


@_rule("PlaceholderWithDefault")
def _default(call: Call) -> list[Value]:
    return _ensure_shape(call) if call.inputs[0].kind is Kind.ROWS else list(call.inputs)


@_rule("Cast", "Bitcast")
def _cast(call: Call) -> list[Value]:
    (value,) = call.inputs
    source, to = call.dtype("SrcT") or call.dtype("T"), call.dtype("DstT") or call.dtype("type")
    narrow = {3, 9}  # others may lose what a size or a position is
    if value.kind in (Kind.ROWS, Kind.SAME):
        if call.op == "Bitcast":
            if _BYTES.get(source) is None or _BYTES.get(source) != _BYTES.get(to):
                raise MixedError("it changes the number of dimensions")
            return [Value(value.kind, value.shape, value.axis)]
        keeps = source in narrow and to in narrow and _in_range(value.sizes or (), to)
        fill = None if value.fill is None or to not in _CONSTANTS else _CONSTANTS[to](value.fill)
        counts = value.counts if (source == _BOOL and to in narrow) or keeps else None
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
    if source in narrow and to in narrow and call.op == "Cast" and _in_range(value.sizes or (), to):
        is_bound = value.kind in (Kind.LOWEST, Kind.HIGHEST)
        if is_bound and value.width is None and (source, to) == (_INT64, 3):
            raise MixedError("the lowest or highest of all rows may wrap around")
        return [value]
    raise MixedError(_BATCH_SIZE if value.kind is Kind.SIZE else _POSITION)


@_rule("ZerosLike", "OnesLike")
def _like(call: Call) -> list[Value]:
    (value,) = call.inputs
    _no_width(value)
    if value.kind is Kind.SAME:
        return [same(value.shape)]
    return [_rows(value.shape, value.axis) if value.kind in (Kind.ROWS, Kind.POINTER) else _refuse(value)]


def _refuse(value: Value) -> Value:
    return _laid_out(value)


@_rule("Select")
def _select(call: Call) -> list[Value]:
    """Takes whole rows where the condition is a vector; else all three have one shape."""
    condition, one, _ = call.inputs
    if condition.shape == ():
        return _elementwise(call)
    if _all_same(call):
        return [same(one.shape)]
    shapes = [_known(value.shape) for value in call.inputs]
    if shapes[0] == shapes[1] == shapes[2]:
        return _elementwise(call)
    if len(shapes[0]) == 1 and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]:
        for value in call.inputs:
            _laid_out(value)
            _no_width(value)
        return [_rows(shapes[1], 0)]
    raise MixedError("its condition has another shape")


@_rule("EnsureShape")
def _ensure_shape(call: Call) -> list[Value]:
    (value,) = call.inputs
    wanted = call.shape()
    if wanted is None or value.kind is Kind.SAME:
        return [value]
    if value.kind is not Kind.ROWS:
        raise MixedError(_POSITION)
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
    return [_rows(found, value.axis, counts=value.counts)]


def _wide() -> list[Value]:
    raise MixedError(_WIDTH)


# ---- shapes


@_rule("Shape", "ShapeN")
def _shape(call: Call) -> list[Value]:
    found = []
    for value in call.inputs:
        if value.kind is Kind.SAME and value.shape is None:
            found.append(same((call.unknown(),)))
        else:
            shape = _known(value.shape)
            found.append(_numbers_value((Size.of(len(shape)),), shape))
    return found


@_rule("Size")
def _size(call: Call) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME and value.shape is None:
        return [same(())]
    return [_numbers_value((), [functools.reduce(operator.mul, _known(value.shape), Size.of(1))])]


@_rule("Rank")
def _rank(call: Call) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME and value.shape is None:
        return [same(())]
    return [_numbers_value((), [Size.of(len(_known(value.shape)))])]


def _product(sizes: Iterable[Size]) -> Size:
    return functools.reduce(operator.mul, sizes, Size.of(1))


@_rule("Reshape")
def _reshape(call: Call) -> list[Value]:
    value, target = call.inputs
    if value.kind in _OF_ALL and target.kind is Kind.SAME:
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
            raise MixedError(_BATCH_SIZE)
        return [
            Value(value.kind, shape, sizes=value.sizes, array=None if value.array is None else _as(value.array, shape))
        ]
    if value.kind in (Kind.SPLITS, Kind.STARTS, Kind.ENDS):
        if shape != value.shape:
            raise MixedError(_POSITION)
        return [value]
    axis = _kept_axis(call, value, shape)
    fill = value.fill if _keeps_padding(value, shape, axis) else None
    return [Value(value.kind, shape, axis, target=value.target, holes=value.holes, counts=value.counts, fill=fill)]


def _keeps_padding(value: Value, shape: Sequence[Size], axis: int) -> bool:
    """Whether a reshape leaves what stands behind a row's values there, or makes a vector of all.

    Of [rows, 2, width], a reshape to [rows, width, 2] would put it between values, at other places in every width.
    """
    old = _known(value.shape)
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


def _reshaped(call: Call, value: Value, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape after a reshape, with its -1 worked out."""
    total = _product(_known(value.shape))
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


def _kept_axis(call: Call, value: Value, shape: Sequence[Size]) -> int:
    """Where the rows are after a reshape that leaves all before them as it is."""
    before = [size for size in _known(value.shape)[: value.axis] if size.number != 1]
    axes = [index for index, size in enumerate(shape) if any(name[0] in "nu" for name in size.symbols)]
    if len(axes) != 1 or [size for size in shape[: axes[0]] if size.number != 1] != before:
        raise MixedError("rows do not stay apart")
    if not shape[axes[0]].is_count or any(not size.is_same for size in shape[axes[0] + 1 :] if not _is_width(size)):
        raise MixedError("rows do not stay apart")
    if _product(shape) != _product(_known(value.shape)):
        # Other symbols for the same number: it is equal wherever the reshape succeeds, but for what a row is.
        mine = [n for n in _product(shape).symbols if n[0] in "nuw"]
        theirs = [n for n in _product(_known(value.shape)).symbols if n[0] in "nuw"]
        if sorted(mine) != sorted(theirs) or any(name[0] == "w" for name in mine) or call.op != "Reshape":
            raise MixedError("rows do not stay apart")
    return axes[0]


@_rule("ExpandDims")
def _expand(call: Call) -> list[Value]:
    value = call.inputs[0]
    if value.kind is Kind.SAME and value.shape is None:
        return [same()]
    shape = list(_known(value.shape))
    (axis,) = call.numbers(1)
    axis += len(shape) + 1 if axis < 0 else 0
    if value.kind in _OF_ALL:
        return [dataclasses.replace(value, shape=tuple(_inserted(shape, axis, Size.of(1))))]
    if value.kind in (Kind.SAME, Kind.SIZE):
        shape.insert(axis, Size.of(1))
        return [Value(value.kind, tuple(shape), sizes=value.sizes)]
    _laid_out(value, Kind.ROWS, Kind.POINTER)
    shape.insert(axis, Size.of(1))
    return [_moved(value, shape, value.axis + (axis <= value.axis))]


def _moved(value: Value, shape: Iterable[Size], axis: int) -> Value:
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


@_rule("Squeeze")
def _squeeze(call: Call) -> list[Value]:
    (value,) = call.inputs
    axes = call.integers("squeeze_dims")
    if value.kind in _OF_ALL:
        return [value if value.shape == () else dataclasses.replace(value, shape=None)]
    if value.kind is Kind.SAME and (value.shape is None or not axes):
        known = value.shape if value.shape and all(size.number is not None for size in value.shape) else None
        return [same(None if known is None else [size for size in known if size.number != 1], value.sizes)]
    shape = _known(value.shape)
    if not axes:
        raise MixedError("a batch of one row would lose its axis")
    gone = {axis % len(shape) for axis in axes}
    left = [size for axis, size in enumerate(shape) if axis not in gone]
    if value.kind in (Kind.SAME, Kind.SIZE):
        return [Value(value.kind, tuple(left), sizes=value.sizes)]
    _laid_out(value, Kind.ROWS, Kind.POINTER)
    if value.axis in gone or any(shape[axis].is_padded for axis in gone):
        raise MixedError("a batch of one row would lose its axis")
    return [_moved(value, left, value.axis - sum(axis < value.axis for axis in gone))]


@_rule("Transpose")
def _transpose(call: Call) -> list[Value]:
    value = call.inputs[0]
    if value.kind is Kind.SAME and (value.shape is None or call.inputs[1].numbers() is None):
        return [same()]
    shape, order = _known(value.shape), call.numbers(1)
    if value.kind is Kind.SAME:
        return [same([shape[axis] for axis in order])]
    _laid_out(value)
    _no_width(value)
    return [_rows([shape[axis] for axis in order], order.index(value.axis))]


@_rule("Pack")
def _pack(call: Call) -> list[Value]:
    axis = call.integer("axis")
    if all(value.sizes is not None and value.shape == () for value in call.inputs):
        sizes = [size for value in call.inputs for size in value.sizes or ()]
        return [_numbers_value((Size.of(len(sizes)),), sizes)]
    if _all_same(call):
        shape = call.inputs[0].shape
        return [same() if shape is None else same(_inserted(shape, axis, Size.of(len(call.inputs))))]
    first = _laid_out(call.inputs[0])
    shape = _known(first.shape)
    for value in call.inputs:
        _laid_out(value)
        _no_width(value)
        if (
            _known(value.shape)[first.axis : first.axis + 1] != shape[first.axis : first.axis + 1]
            or value.axis != first.axis
        ):
            raise MixedError("rows of one input stand beside others of another")
    axis += len(shape) + 1 if axis < 0 else 0
    shape = _merged(call, [_known(value.shape) for value in call.inputs])
    return [_rows(_inserted(shape, axis, Size.of(len(call.inputs))), first.axis + (axis <= first.axis))]


def _inserted(shape: Sequence[Size], axis: int, size: Size) -> list[Size]:
    axis += len(shape) + 1 if axis < 0 else 0
    return [*shape[:axis], size, *shape[axis:]]


def _merged(call: Call, shapes: Sequence[tuple[Size, ...]], but: int | None = None) -> tuple[Size, ...]:
    """What shapes that must be equal, but in one axis, are known to be."""
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


@_rule("Unpack")
def _unpack(call: Call) -> list[Value]:
    (value,) = call.inputs
    axis, count = call.integer("axis"), call.integer("num")
    if value.sizes is not None and value.rank == 1:
        return [_numbers_value((), [size]) for size in value.sizes]
    if value.kind is Kind.SAME:
        shape = None if value.shape is None else [*value.shape]
        if shape is not None:
            del shape[axis]
        return [same(shape)] * count
    shape = list(_known(value.shape))
    axis %= len(shape)
    if value.kind is Kind.INDICES and axis == 1:
        return [_column(value, index) for index in range(count)]
    _laid_out(value)
    _no_width(value)
    if axis == value.axis:
        raise MixedError("it takes rows by their numbers")
    del shape[axis]
    return [_rows(shape, value.axis - (axis < value.axis))] * count


@_rule("ConcatV2", "Concat")
def _concat(call: Call) -> list[Value]:
    at = len(call.inputs) - 1 if call.op == "ConcatV2" else 0
    parts = [value for index, value in enumerate(call.inputs) if index != at]
    (axis,) = call.numbers(at)
    if len(parts) == 1:
        return parts
    if all(value.sizes is not None and value.rank == 1 for value in parts):
        sizes = [size for value in parts for size in value.sizes or ()]
        return [_numbers_value((Size.of(len(sizes)),), sizes)]
    if all(value.kind is Kind.SAME for value in parts):
        if any(value.shape is None for value in parts):
            return [same()]
        shapes = [_known(value.shape) for value in parts]
        return [same(_merged(call, shapes, axis % len(shapes[0])))]
    is_splits = parts[-1].kind is Kind.ENDS and len(parts) == 2 and parts[0].numbers() == [0]
    if is_splits and axis in (0, -1) and parts[0].rank == parts[1].rank == 1:
        return [Value(Kind.SPLITS, (_known(parts[1].shape)[0] + Size.of(1),), target=parts[1].target)]
    for value in parts:
        if value.kind is Kind.SAME:
            raise MixedError("a constant number of rows is put beside rows")
        _laid_out(value)
    shapes = [_known(value.shape) for value in parts]
    axis %= len(shapes[0])
    if {value.axis for value in parts} != {parts[0].axis} or axis == parts[0].axis:
        raise MixedError("rows of different inputs stand behind each other")
    if any(value.is_padded for value in parts) and any(shape[axis].is_padded for shape in shapes):
        raise MixedError(_WIDTH)
    _no_width(*parts)
    return [_rows(_merged(call, shapes, axis), parts[0].axis)]


@_rule("Split", "SplitV")
def _split(call: Call) -> list[Value]:
    value, axis_at = (call.inputs[1], 0) if call.op == "Split" else (call.inputs[0], 2)
    count = call.integer("num_split")
    if _all_same(call):
        axis = call.inputs[axis_at].numbers()
        if value.shape is None or axis is None:
            return [same()] * count
        return [
            same([call.unknown() if at == axis[0] % len(value.shape) else size for at, size in enumerate(value.shape)])
            for _ in range(count)
        ]
    (axis_number,) = call.numbers(axis_at)
    shape = list(_known(_laid_out(value).shape))
    _no_width(value)
    axis_number %= len(shape)
    if axis_number == value.axis:
        raise MixedError("it takes rows by their numbers")
    known = call.inputs[1].sizes if call.op == "SplitV" else None
    even = shape[axis_number].divided(Size.of(count)) if call.op == "Split" else None
    found = []
    for index in range(count):
        size = even or (known[index] if known is not None else call.unknown())
        size = call.unknown() if not size.is_same or not size.at_least(Size.of(0)) else size
        found.append(_rows([*shape[:axis_number], size, *shape[axis_number + 1 :]], value.axis))
    if call.op == "SplitV" and call.inputs[1].kind is not Kind.SAME:
        raise MixedError(_BATCH_SIZE)
    return found


def _column(value: Value, index: int) -> Value:
    """A column of the indices of entries."""
    shape = _known(value.shape)[:1]
    if index % (_known(value.shape)[1].number or 1) == value.axis:
        return Value(Kind.POINTER, shape, target=value.target, covers=value.covers)
    return _rows(shape, 0)


@_rule("Slice")
def _slice(call: Call) -> list[Value]:
    value, begin, size = call.inputs
    if _all_same(call):
        shape = None if value.shape is None else [call.unknown() for _ in value.shape]
        starts, lengths = begin.numbers(), size.numbers()
        if value.sizes is not None and value.rank == 1 and starts and lengths:
            stop = None if lengths[0] == -1 else starts[0] + lengths[0]
            found = value.sizes[starts[0] : stop]
            return [_numbers_value((Size.of(len(found)),), found)]
        if shape is not None and lengths is not None:
            shape = [Size.of(n) if n >= 0 else s for n, s in zip(lengths, shape, strict=True)]
        return [same(shape)]
    if value.kind is Kind.SIZE and value.sizes is not None and value.rank == 1:
        (start,), (length,) = call.numbers(1), call.numbers(2)
        found = value.sizes[start : None if length == -1 else start + length]
        return [_numbers_value((Size.of(len(found)),), found)]
    shape = list(_known(value.shape))
    if begin.sizes is None or size.sizes is None:
        raise MixedError("which part is taken is not known before it runs")
    if value.kind is Kind.INDICES:
        first, at = (bound.number for bound in begin.sizes)
        if first == 0 and at is not None and [bound.number for bound in size.sizes] == [-1, 1]:
            column = _column(value, at)
            return [_moved(column, [*_known(column.shape), Size.of(1)], 0)]
    _laid_out(value)
    _no_width(value)
    if begin.sizes[value.axis].number != 0 or not (
        size.sizes[value.axis].number == -1 or size.sizes[value.axis] == shape[value.axis]
    ):
        raise MixedError("it takes rows by their numbers")
    for axis, taken in enumerate(size.sizes):
        if axis != value.axis:
            if not taken.is_same or not begin.sizes[axis].is_same:
                raise MixedError(_BATCH_SIZE)
            rest = shape[axis] - begin.sizes[axis]
            if taken.number != -1:
                rest = taken if taken.at_least(Size.of(0)) else call.unknown()  # it may be -1 when it runs
            shape[axis] = rest
    return [_rows(shape, value.axis)]


@_rule("StridedSlice")
def _strided_slice(call: Call) -> list[Value]:
    value = call.inputs[0]
    spec = _slice_spec(call)
    if value.kind in (Kind.SAME, Kind.SIZE) and value.rank == 1 and value.sizes is not None:
        found = _sliced_sizes(value.sizes, spec)
        if found is not None:
            return [found]
    if value.kind is Kind.SAME and any(part.kind is not Kind.SAME for part in call.inputs[1:]):
        raise MixedError(_BATCH_SIZE)
    if value.kind is Kind.SAME and (value.shape is None or spec is None):
        return [same()]
    if value.kind is Kind.SPLITS and spec is not None and len(spec) == 1 and spec[0][0] == "part" and spec[0][3] == 1:
        start, stop = (None if bound is None else bound.number for bound in spec[0][1:3])
        rows = (_known(value.shape)[0] - Size.of(1),)
        if start == 1 and spec[0][2] is None:
            return [Value(Kind.ENDS, rows, target=value.target)]
        if (spec[0][1] is None or start == 0) and stop == -1:
            return [Value(Kind.STARTS, rows, target=value.target)]
    if value.kind not in (Kind.SAME, Kind.ROWS, Kind.POINTER, Kind.INDICES):
        _laid_out(value)
    if spec is None:
        raise MixedError("which part is taken is not known before it runs")
    shape = _known(value.shape)
    found_shape: list[Size] = []
    axis, new_axis, columns = 0, None, None
    skipped = len(shape) - sum(entry[0] not in ("new", "...") for entry in spec)
    whole: _Entry = ("part", None, None, 1)
    entries: list[_Entry] = []
    for entry in spec:
        entries += [whole] * skipped if entry[0] == "..." else [entry]
    if not any(entry[0] == "..." for entry in spec):
        entries += [whole] * skipped
    for what, begin, end, step in entries:
        if what == "new":
            if value.kind is Kind.INDICES:
                raise MixedError("an axis is added to the entries' indices")
            found_shape.append(Size.of(1))
            continue
        if axis >= len(shape):
            raise MixedError("it takes more axes than there are")
        is_whole = (
            what == "part"
            and step == 1
            and (begin is None or begin.number == 0)
            and (end is None or end == shape[axis])
        )
        if value.kind is not Kind.SAME and axis == value.axis and value.kind is not Kind.INDICES:
            if not is_whole:
                raise MixedError("it takes rows by their numbers")
            new_axis = len(found_shape)
            found_shape.append(shape[axis])
        elif value.kind is Kind.INDICES:
            if axis == 0 and not is_whole:
                raise MixedError("it takes entries by their numbers")
            if axis == 1:
                if step != 1:
                    raise MixedError("it takes several columns of the entries' indices")
                columns = what, begin, end, is_whole
        elif is_whole:
            found_shape.append(shape[axis])
        else:
            if shape[axis].is_padded:
                raise MixedError(_WIDTH)
            if any(size is not None and not size.is_same for size in (begin, end)):
                raise MixedError(_BATCH_SIZE)
            if what == "part":
                found_shape.append(_length(call, shape[axis], begin, end, step))
        axis += 1
    if value.kind is Kind.INDICES:
        return [_columns(value, columns)]
    if value.kind is Kind.SAME:
        return [same(found_shape)]
    return [
        _moved(
            Value(value.kind, None, 0, target=value.target, holes=value.holes, fill=value.fill),
            found_shape,
            new_axis or 0,
        )
    ]


def _columns(value: Value, columns: Any) -> Value:
    what, begin, end, is_whole = columns or ("part", None, None, True)
    if is_whole:
        return value
    width = _known(value.shape)[1].number or 0
    start = 0 if begin is None else begin.number
    if start is None:
        raise MixedError("which part is taken is not known before it runs")
    if what == "shrink":
        return _column(value, start % width)
    stop = width if end is None else end.number
    if stop is None or len(range(*slice(start, stop).indices(width))) != 1:
        raise MixedError("it takes several columns of the entries' indices")
    column = _column(value, range(*slice(start, stop).indices(width))[0])
    return _moved(column, [*_known(column.shape), Size.of(1)], 0)


def _length(call: Call, size: Size, begin: Size | None, end: Size | None, step: int) -> Size:
    numbers = [None if bound is None else bound.number for bound in (begin, end)]
    is_known = all(bound is None or number is not None for bound, number in zip((begin, end), numbers, strict=True))
    if size.number is not None and is_known and step:
        return Size.of(len(range(*slice(numbers[0], numbers[1], step).indices(size.number))))
    return call.unknown()


_Entry = tuple[str, Size | None, Size | None, int]


def _slice_spec(call: Call) -> list[_Entry] | None:
    """(what, begin, end, step) of each entry of a slice: new, ..., shrink or part."""
    _, begin, end, strides = call.inputs
    for bound in (begin, end, strides):
        if bound.kind not in (Kind.SAME, Kind.SIZE):
            raise MixedError("which part is taken depends on rows")
    count = next((known.shape[0].number for known in (begin, end, strides) if known.shape), None)
    steps = strides.numbers()
    if count is None or steps is None:
        return None
    found: list[_Entry] = []
    for index in range(count):
        bit = 1 << index
        starts = begin.sizes[index] if begin.sizes is not None else call.unknown()
        stops = end.sizes[index] if end.sizes is not None else call.unknown()
        if call.integer("ellipsis_mask") & bit:
            found.append(("...", None, None, 1))
        elif call.integer("new_axis_mask") & bit:
            found.append(("new", None, None, 1))
        elif call.integer("shrink_axis_mask") & bit:
            found.append(("shrink", starts, None, 1))
        else:
            first = None if call.integer("begin_mask") & bit else starts
            last = None if call.integer("end_mask") & bit else stops
            found.append(("part", first, last, steps[index]))
    return found


def _sliced_sizes(sizes: Sequence[Size], spec: list[_Entry] | None) -> Value | None:
    if spec is None or len(spec) != 1 or spec[0][0] not in ("part", "shrink"):
        return None
    what, begin, end, step = spec[0]
    start, stop = (None if bound is None else bound.number for bound in (begin, end))
    if (begin is not None and start is None) or (end is not None and stop is None):
        return None
    if what == "shrink":
        if start is None or not -len(sizes) <= start < len(sizes):
            return None
        return _numbers_value((), [sizes[start]])
    found = sizes[slice(start, stop, step)]
    return _numbers_value((Size.of(len(found)),), found)


@_rule("Fill")
def _fill_with(call: Call) -> list[Value]:
    dims, value = call.inputs
    if value.kind is not Kind.SAME:
        raise MixedError(_BATCH_SIZE if value.kind is Kind.SIZE else "rows meet here")
    return [_spread(dims)]


def _spread(dims: Value) -> Value:
    """A tensor of this shape that is the same for each row."""
    if dims.sizes is None:
        if dims.kind is not Kind.SAME:
            raise MixedError("its shape depends on rows")
        return same()
    axes = [axis for axis, size in enumerate(dims.sizes) if not size.is_same]
    if not axes:
        return same(dims.sizes)
    if len(axes) > 1 or dims.sizes[axes[0]].is_padded:
        raise MixedError("two axes depend on the batch size")
    return _rows(dims.sizes, axes[0])


@_rule("BroadcastTo")
def _broadcast_to(call: Call) -> list[Value]:
    value, dims = call.inputs
    _laid_out(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if value.kind is Kind.SAME and dims.kind is Kind.SAME:
        return [same(dims.sizes)]
    if dims.sizes is not None and value.shape == dims.sizes:
        return [value]
    target = _spread(dims)
    if target.shape is None:
        raise MixedError("its shape is not known before it runs")
    _no_width(value, target)
    if value.kind is Kind.SAME:
        broadcast([value, target], call.unknown)
        return [target]
    _, axis = broadcast([value, target], call.unknown)
    if target.kind is Kind.SAME or target.axis != axis:
        raise MixedError("a fixed number of rows is asked for")
    return [_repeated(value, target.shape, axis or 0)]


@_rule("Tile")
def _tile(call: Call) -> list[Value]:
    value, times = call.inputs
    _no_width(value)
    _laid_out(value, Kind.ROWS, Kind.SAME, Kind.POINTER)
    if _all_same(call):
        if value.shape is None or times.sizes is None:
            return [same()]
        return [same([size * by for size, by in zip(value.shape, times.sizes, strict=True)])]
    if times.sizes is None:
        raise MixedError("how often is not known before it runs")
    shape = [size * by for size, by in zip(_known(value.shape), times.sizes, strict=True)]
    axes = [axis for axis, size in enumerate(shape) if not _is_width(size)]
    wide = [axis for axis, by in enumerate(times.sizes) if by.is_padded]
    if any(_known(value.shape)[axis].number != 1 for axis in wide) or (wide and value.kind is Kind.SAME):
        raise MixedError(_WIDTH)
    if value.kind is Kind.SAME:
        if len(axes) != 1:
            raise MixedError("two axes depend on the batch size")
        if _known(value.shape)[axes[0]].number != 1:
            raise MixedError("what is repeated for each row has rows of its own")
        return [_rows(shape, axes[0])]
    if axes != [value.axis] or times.sizes[value.axis].number != 1:
        raise MixedError("rows are repeated behind each other")
    return [_repeated(value, shape, value.axis)]


def _repeated(value: Value, shape: Iterable[Size], axis: int) -> Value:
    """The same rows, with elements that stand several times in each."""
    return Value(value.kind, tuple(shape), axis, target=value.target, holes=value.holes)


@_rule("Range")
def _range(call: Call) -> list[Value]:
    start, limit, step = call.inputs
    if any(value.kind not in (Kind.SAME, Kind.SIZE) for value in call.inputs):
        raise MixedError("its bounds depend on rows")
    if _all_same(call):
        numbers = [value.numbers() for value in call.inputs]
        if all(number is not None and len(number) == 1 for number in numbers):
            first, last, by = (number[0] for number in numbers if number)
            if by and len(range(first, last, by)) <= _SMALL:
                found = list(range(first, last, by))
                return [same([Size.of(len(found))], [Size.of(number) for number in found])]
        size = call.unknown()
        if limit.sizes is not None and start.numbers() == [0] and step.numbers() == [1]:
            size = limit.sizes[0] if limit.sizes[0].at_least(Size.of(0)) else size  # of a negative limit it is empty
        return [same([size])]
    is_plain = start.numbers() == [0] and step.numbers() == [1] and limit.sizes is not None
    if is_plain and limit.sizes and _is_one_width(limit.sizes[0]):
        return [Value(Kind.COLUMNS, limit.sizes)]
    if not is_plain or limit.sizes is None or not limit.sizes[0].is_count:
        raise MixedError(_BATCH_SIZE)
    if limit.sizes[0].is_padded or limit.sizes[0].is_distinct:
        raise MixedError(_WIDTH)
    return [Value(Kind.POINTER, limit.sizes, target=limit.sizes[0])]


@_rule("Pad", "PadV2", "MirrorPad")
def _pad(call: Call) -> list[Value]:
    value = call.inputs[0]
    if _all_same(call):
        return [same(None if value.shape is None else [call.unknown() for _ in value.shape])]
    if len(call.inputs) > 2:
        _laid_out(call.inputs[2], Kind.SAME)
    shape = list(_known(_laid_out(value).shape))
    _no_width(value)
    more = call.numbers(1)
    for axis, (before, behind) in enumerate(zip(more[::2], more[1::2], strict=True)):
        if axis == value.axis and (before or behind):
            raise MixedError("rows are added")
        shape[axis] += Size.of(before + behind)
    return [_rows(shape, value.axis)]


@_rule("ReverseV2")
def _reverse(call: Call) -> list[Value]:
    value = call.inputs[0]
    if _all_same(call):
        return [same(value.shape)]
    axes = call.numbers(1)
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if value.axis in [axis % len(shape) for axis in axes]:
        raise MixedError("rows change their places")
    return [_rows(shape, value.axis)]


@_rule("LowerBound", "UpperBound")
def _search(call: Call) -> list[Value]:
    ordered, values = call.inputs
    if _all_same(call):
        return [same(values.shape)]
    _laid_out(ordered, Kind.SAME)
    shape = _known(_laid_out(values).shape)
    _no_width(values)
    if values.axis != 1 or len(shape) != 2:
        raise MixedError("rows are looked for among others")
    return [_rows(shape, 1)]


@_rule("OneHot")
def _one_hot(call: Call) -> list[Value]:
    value, depth = call.inputs[:2]
    for other in call.inputs[1:]:
        _laid_out(other, Kind.SAME)
    size = depth.sizes[0] if depth.sizes else call.unknown()
    if value.kind is Kind.SAME:
        return [same(None if value.shape is None else _inserted(value.shape, call.integer("axis", -1), size))]
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    axis = call.integer("axis", -1)
    axis += len(shape) + 1 if axis < 0 else 0
    return [_rows(_inserted(shape, axis, size), value.axis + (axis <= value.axis))]


# ---- along an axis


@_rule("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def _reduce(call: Call) -> list[Value]:
    value = call.inputs[0]
    keep = call.flag("keep_dims")
    axes = call.inputs[1].numbers() if call.inputs[1].kind is Kind.SAME else None
    is_vector = value.kind in (Kind.SAME, Kind.SIZE) and value.sizes is not None and value.rank == 1
    if is_vector and axes and call.op in ("Prod", "Sum"):
        by = operator.mul if call.op == "Prod" else operator.add
        total = functools.reduce(by, value.sizes or (), Size.of(int(call.op == "Prod")))
        return [_computed(call.dtype(), (Size.of(1),) if keep else (), [total])]
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
    shape = _known(value.shape)
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = [Size.of(1) if axis in gone else size for axis, size in enumerate(shape) if keep or axis not in gone]
    if value.kind is Kind.SAME:
        return [same(left)]
    if value.kind is Kind.POINTER and not left:
        return [Value(Kind.MIXED, (), reason=f"{call.node.name} ({call.op}): {_POSITION}")]
    if value.kind in again and again[value.kind] == call.op:
        return [dataclasses.replace(value, shape=tuple(left))]
    _laid_out(value)
    if any(shape[axis].is_padded for axis in gone):
        _check_fill(call, value)
    if value.axis in gone:
        kinds = {"All": Kind.EVERY, "Any": Kind.SOME}
        if call.dtype() in _INTEGERS:
            kinds |= {"Min": Kind.LOWEST, "Max": Kind.HIGHEST}
        if call.op == "Max" and call.dtype() in _INTEGERS and len(shape) == 1 and not keep:
            return [Value(Kind.HIGHEST, (), width=value.width)]
        if call.op not in kinds or any(size.is_padded for axis, size in enumerate(shape) if axis not in gone):
            raise MixedError("it makes one of several rows")
        return [Value(kinds[call.op], tuple(left))]
    axis = value.axis if keep else value.axis - sum(one < value.axis for one in gone)
    counts = value.counts if call.op == "Sum" else None
    return [_rows(left, axis, counts=counts, fill=value.fill if call.op in ("All", "Any") else None)]


def _check_fill(call: Call, value: Value) -> None:
    """Raise MixedError where what stands behind a row's values changes the result."""
    neutral = {"Sum": 0, "Any": False, "All": True}
    if value.fill is None or call.op not in neutral or value.fill != neutral[call.op]:
        raise MixedError(_WIDTH)


@_rule("ArgMax", "ArgMin")
def _arg(call: Call) -> list[Value]:
    value = call.inputs[0]
    if _all_same(call):
        return [same()]
    (axis,) = call.numbers(1)
    shape = list(_known(_laid_out(value).shape))
    _no_width(value)
    axis %= len(shape)
    if axis == value.axis:
        raise MixedError("it makes one of several rows")
    del shape[axis]
    return [_rows(shape, value.axis - (axis < value.axis))]


@_rule("Softmax", "LogSoftmax")
def _softmax(call: Call) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME:
        return [value]
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if value.axis == len(shape) - 1:
        raise MixedError("each row is divided by a sum of several")
    return [_rows(shape, value.axis)]


@_rule("L2Normalize", "SparseSoftmaxCrossEntropyWithLogits")
def _never(_: Call) -> list[Value]:
    raise MixedError("it is not in the table of operations")


@_rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(call: Call) -> list[Value]:
    value = call.inputs[0]
    if value.sizes is not None and value.rank == 1 and call.op in ("Cumsum", "Cumprod"):
        return [_cumulative_sizes(call, value)]
    if _all_same(call):
        return [same(value.shape)]
    (axis,) = call.numbers(1)
    shape = _known(_laid_out(value).shape)
    is_backward = call.op == "Cumsum" and call.flag("reverse") and call.dtype() in _INTEGERS
    if is_backward and len(shape) == 2 and value.axis == 0 and axis in (1, -1) and _is_one_width(shape[1]):
        if value.fill is None or value.fill != 0:
            raise MixedError(_WIDTH)
        return [_rows(shape, 0, fill=value.fill)]  # zeros behind a row's values change no sum that begins there
    _no_width(value)
    if axis % len(shape) == value.axis:
        is_plain = call.op == "Cumsum" and not call.flag("exclusive") and not call.flag("reverse")
        if is_plain and len(shape) == 1 and value.counts is not None and not shape[0].is_distinct:
            return [Value(Kind.ENDS, shape, target=value.counts)]
        raise MixedError("each row is added to those before it")
    return [_rows(shape, value.axis)]


def _cumulative_sizes(call: Call, value: Value) -> Value:
    sizes = list(value.sizes or ())
    sizes = sizes[::-1] if call.flag("reverse") else sizes
    by, start = (operator.add, 0) if call.op == "Cumsum" else (operator.mul, 1)
    total, found = Size.of(start), []
    for size in sizes:
        before, total = total, by(total, size)
        found.append(before if call.flag("exclusive") else total)
    return _computed(call.dtype(), value.shape or (), found[::-1] if call.flag("reverse") else found)


@_rule("TopKV2", "TopK")
def _top(call: Call) -> list[Value]:
    value = call.inputs[0]
    if _all_same(call):
        return [same(), same()]
    if call.op == "TopK":
        size = Size.of(call.integer("k"))
    else:
        _laid_out(call.inputs[1], Kind.SAME)
        size = call.inputs[1].sizes[0] if call.inputs[1].sizes else call.unknown()
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if value.axis == len(shape) - 1:
        raise MixedError("rows are sorted")
    return [_rows([*shape[:-1], size], value.axis)] * 2


_outputs("TopKV2", "values", "indices")
_outputs("TopK", "values", "indices")


@_rule("MatrixBandPart", "MatrixTranspose", "MatrixDiagPartV3", "MatrixDiagV3")
def _band(call: Call) -> list[Value]:
    if call.op != "MatrixBandPart":
        raise MixedError("it is not in the table of operations")
    value = call.inputs[0]
    if _all_same(call):
        return [same(value.shape)]
    for bound in call.inputs[1:]:
        _laid_out(bound, Kind.SAME)
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if value.axis >= len(shape) - 2:
        raise MixedError("rows are places of a matrix")
    return [_rows(shape, value.axis)]


# ---- products


@_rule("MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(call: Call) -> list[Value]:
    one, other, *more = call.inputs
    if _all_same(call):
        is_known = one.shape is not None and one.rank == other.rank
        return [same([call.unknown() for _ in _known(one.shape)] if is_known else None)]
    for value in (one, other):
        _laid_out(value, Kind.ROWS, Kind.SAME)
    for value in more:
        _laid_out(value, Kind.SAME)
    _no_width(one, other)
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
    found = [*_known(shape), first[-2], second[-1]]
    if in_matrix[0]:
        axis = len(found) - 2
    elif in_matrix[1]:
        axis = len(found) - 1
    return [_rows(found, axis or 0)]


def _matrix(value: Value, turned: bool) -> tuple[tuple[Size, ...], int | None]:
    """The shape and the axis of rows of a matrix, or of several, with its last two axes as they are multiplied."""
    shape = _known(value.shape)
    axis = value.axis if value.kind is Kind.ROWS else None
    if turned:
        shape = (*shape[:-2], shape[-1], shape[-2])
        last = len(shape) - 1
        axis = {last: last - 1, last - 1: last}.get(axis, axis) if axis is not None else None
    return shape, axis


@_rule("Einsum")
def _einsum(call: Call) -> list[Value]:
    terms, _, out = call.text("equation").replace(" ", "").partition("->")
    if _all_same(call):
        return [same()]
    if "." in terms or len(set(out)) < len(out):
        raise MixedError("its equation leaves axes open")
    sizes: dict[str, Size] = {}
    letters = set()
    for term, value in zip(terms.split(","), call.inputs, strict=True):
        _laid_out(value, Kind.ROWS, Kind.SAME)
        _no_width(value)
        shape = _known(value.shape)
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
    return [_rows([sizes[letter] for letter in out], out.index(letters.pop()))]


@_rule(
    "Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"
)
def _image(call: Call) -> list[Value]:
    value = call.inputs[0]
    normalizes = call.op.startswith("FusedBatchNorm")
    if normalizes and (call.flag("is_training") or "is_training" not in call.node.attr):
        raise MixedError("it normalizes by the mean of all rows")
    if _all_same(call):
        return [same()] * (6 if normalizes else 1)
    for other in call.inputs[1:]:
        _laid_out(other, Kind.SAME)
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if value.axis != 0 or len(shape) != 4:
        raise MixedError("its first axis is not that of the rows")
    if call.op in ("MaxPool", "AvgPool") and call.integers("ksize")[:1] != [1]:
        raise MixedError("it adds up over rows")
    if normalizes:
        return [_rows(shape, 0), *[same()] * 5]
    return [_rows([shape[0], *(call.unknown() for _ in shape[1:])], 0)]


for _name in ("FusedBatchNorm", "FusedBatchNormV2"):
    _outputs(_name, "y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2")
_outputs(
    "FusedBatchNormV3", "y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"
)


# ---- lookups


@_rule("GatherV2", "Gather", "ResourceGather")
def _gather(call: Call) -> list[Value]:
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
            raise MixedError(_BATCH_SIZE)
        found = [params.sizes[number] for number in numbers]
        return [_numbers_value(_known(indices.shape), found)]
    if batch_dims:
        return [_gathered_beside(params, indices, axis, batch_dims)]
    if params.kind is Kind.SAME:
        _laid_out(indices)
        if params.shape is None:
            is_of_rows = indices.shape is None or indices.shape[:1] == (ROWS,)
            if axis or indices.axis or indices.is_padded or not is_of_rows:
                raise MixedError("the number of dimensions of an input is not known")
            return [Value(Kind.ROWS, None, indices.axis)]
        axis %= len(params.shape)
        found_shape = [*params.shape[:axis], *_known(indices.shape), *params.shape[axis + 1 :]]
        return [_rows(found_shape, axis + indices.axis)]
    _laid_out(params, Kind.ROWS, Kind.POINTER, Kind.INDICES)
    shape = _known(params.shape)
    axis %= len(shape)
    if (
        indices.kind is Kind.PLACES
        and params.kind is Kind.ROWS
        and axis == params.axis
        and indices.target == shape[axis]
    ):
        return [_rows([*shape[:axis], *_known(indices.shape), *shape[axis + 1 :]], axis + indices.axis)]
    if params.kind is Kind.INDICES:
        if axis or indices.kind is not Kind.POINTER or indices.target != shape[0] or indices.rank != 1:
            raise MixedError("it takes entries by numbers")
        entries = (_known(indices.shape)[0], shape[1])
        return [Value(Kind.INDICES, entries, params.axis, sizes=params.sizes, target=params.target)]
    if axis != params.axis:
        _laid_out(params)
        _laid_out(indices, Kind.SAME)
        _no_width(params)
        inner = _known(indices.shape)
        found_shape = [*shape[:axis], *inner, *shape[axis + 1 :]]
        return [_rows(found_shape, params.axis if params.axis < axis else params.axis + len(inner) - 1)]
    if indices.kind is not Kind.POINTER or indices.target != shape[axis]:
        raise MixedError("it takes rows by numbers")
    found_shape = [*shape[:axis], *_known(indices.shape), *shape[axis + 1 :]]
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
    _laid_out(params)
    _laid_out(indices)
    _no_width(params, indices)
    shape, inner = _known(params.shape), _known(indices.shape)
    axis, batch_dims = axis % len(shape), batch_dims + (len(inner) if batch_dims < 0 else 0)
    if params.axis != indices.axis or params.axis >= batch_dims or shape[params.axis] != inner[params.axis]:
        raise MixedError("it takes rows by numbers")
    return _rows([*shape[:axis], *inner[batch_dims:], *shape[axis + 1 :]], params.axis)


@_rule("GatherNd", "ResourceGatherNd")
def _gather_nd(call: Call) -> list[Value]:
    params, indices = call.inputs
    if call.op == "ResourceGatherNd":
        if params.kind is not Kind.HANDLE or params.element is None:
            raise MixedError("it is not known what is looked up")
        params = params.element
    if params.kind is Kind.SAME and indices.kind is Kind.SAME:
        return [same()]
    if call.integer("batch_dims"):
        raise MixedError("it looks up within each row")
    depth = _known(indices.shape)[-1].number
    if depth is None:
        raise MixedError("how it looks up is not known before it runs")
    if params.kind is Kind.SAME:
        _laid_out(indices)
        if indices.axis == len(_known(indices.shape)) - 1:
            raise MixedError("rows are axes of what is looked up")
        return [_rows([*_known(indices.shape)[:-1], *_known(params.shape)[depth:]], indices.axis)]
    shape = _known(_laid_out(params).shape)
    if (
        indices.kind is Kind.POINTER
        and indices.rank == 2
        and depth == 1
        and params.axis == 0
        and indices.target == shape[0]
    ):
        return [_rows([_known(indices.shape)[0], *shape[1:]], 0)]
    if indices.kind is not Kind.INDICES or indices.axis != params.axis or indices.sizes != shape[:depth]:
        raise MixedError("it takes rows by numbers")
    return [_rows([_known(indices.shape)[0], *shape[depth:]], 0)]


@_rule("Where")
def _where(call: Call) -> list[Value]:
    (value,) = call.inputs
    if value.kind is Kind.SAME:
        return [same()]
    shape = _known(_laid_out(value).shape)
    if value.is_padded and (value.fill is None or value.fill):
        raise MixedError(_WIDTH)
    entries = value.counts if value.counts is not None and call.dtype() in (0, _BOOL) else call.entries()
    if shape[value.axis].is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    if len(shape) == 1:
        return [Value(Kind.POINTER, (entries, Size.of(1)), target=shape[0])]
    if value.axis != 0:
        raise MixedError("entries of different rows stand beside each other")
    return [Value(Kind.INDICES, (entries, Size.of(len(shape))), 0, sizes=shape, target=shape[0])]


# ---- entries of rows


@_rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _unsorted_segment(call: Call) -> list[Value]:
    data, segments, count = call.inputs
    if _all_same(call):
        return [same()]
    _laid_out(segments, Kind.POINTER)
    _laid_out(data)
    _no_width(data, segments)
    shape, inner = _known(data.shape), _known(segments.shape)
    if data.axis != 0 or shape[: len(inner)] != inner or segments.axis != 0:
        raise MixedError("its segments are not those of the entries")
    if count.sizes is None or segments.target != count.sizes[0]:
        raise MixedError("its segments are not the rows")
    return [_rows([count.sizes[0], *shape[len(inner) :]], 0)]


@_rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
def _segment(call: Call) -> list[Value]:
    data, segments = call.inputs[:2]
    if _all_same(call):
        return [same()]
    return [_segments(_laid_out(data), segments)]


def _segments(data: Value, segments: Value) -> Value:
    """One row for each segment; there is none for rows behind the last entry, so that each row must have one."""
    shape, inner = _known(data.shape), _known(_laid_out(segments, Kind.POINTER).shape)
    if data.axis != 0 or len(inner) != 1 or shape[0] != inner[0] or segments.target is None:
        raise MixedError("its segments are not those of the entries")
    if not segments.covers or segments.holes:
        raise MixedError("the last rows may have no entries, and be left out")
    _no_width(data, segments)
    return _rows([segments.target, *shape[1:]], 0)


@_rule("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
def _sparse_segment(call: Call) -> list[Value]:
    data, places, segments = call.inputs[:3]
    if _all_same(call):
        return [same()]
    _no_width(data, places, segments)
    if data.kind is Kind.SAME:
        shape = _known(data.shape)
        entries = _known(_laid_out(places).shape)
    else:
        shape = _known(_laid_out(data).shape)
        entries = _known(_laid_out(places, Kind.PLACES, Kind.POINTER).shape)
        if data.axis != 0 or places.target != shape[0] or places.holes:
            raise MixedError("it takes rows by numbers")
    if len(entries) != 1 or places.axis != 0:
        raise MixedError("its entries are no vector")
    return [_segments(_rows([entries[0], *shape[1:]], 0), segments)]


@_rule("Unique", "UniqueV2")
def _unique(call: Call) -> list[Value]:
    value = call.inputs[0]
    if _all_same(call):
        return [same(), same()]
    shape = _known(_laid_out(value).shape)
    _no_width(value)
    if len(shape) != 1:
        raise MixedError("what differs is no vector")
    if call.dtype() not in _INTEGERS | {_BOOL, _STRING}:
        raise MixedError("numbers that are equal may differ, as 0.0 and -0.0 do")
    distinct = call.distinct()
    return [_rows([distinct], 0), Value(Kind.PLACES, shape, target=distinct)]


_outputs("Unique", "y", "idx")
_outputs("UniqueV2", "y", "idx")


@_rule("SparseReshape")
def _sparse_reshape(call: Call) -> list[Value]:
    indices, dims, wanted = call.inputs
    if indices.kind is not Kind.INDICES or dims.sizes is None or dims.sizes != wanted.sizes:
        raise MixedError("entries change their rows")
    return [indices, dims]


_outputs("SparseReshape", "output_indices", "output_shape")


@_rule("SparseFillEmptyRows")
def _fill_rows(call: Call) -> list[Value]:
    indices, values, dims, default = call.inputs
    _laid_out(default, Kind.SAME)
    _laid_out(values)
    if indices.kind is not Kind.INDICES or indices.axis != 0 or dims.sizes is None or indices.target is None:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or _known(values.shape) != _known(indices.shape)[:1]:
        raise MixedError("its entries are not those of the rows")
    entries = call.entries()
    more = (entries, _known(indices.shape)[1])
    filled = Value(Kind.INDICES, more, 0, sizes=(), target=indices.target, covers=True)
    back = Value(Kind.MIXED, reason="where entries were is a position in the batch")
    return [filled, _rows([entries], 0), _rows([indices.target], 0), back]


_outputs("SparseFillEmptyRows", "output_indices", "output_values", "empty_row_indicator", "reverse_index_map")


@_rule("DenseBincount")
def _bincount(call: Call) -> list[Value]:
    value, size, weights = call.inputs
    if _all_same(call):
        return [same()]
    _laid_out(weights, Kind.SAME)
    if weights.shape != (Size.of(0),):
        raise MixedError("it has weights")
    shape = _known(_laid_out(value, Kind.ROWS, Kind.POINTER).shape)
    _no_width(value)
    if value.kind is Kind.POINTER:
        if len(shape) != 1 or value.holes or size.sizes != (value.target,) or call.flag("binary_output"):
            raise MixedError("it does not count the entries of rows")
        return [_rows(size.sizes, 0, counts=shape[0], width=call.width())]
    if len(shape) != 2 or value.axis != 0 or size.kind is not Kind.SAME:
        raise MixedError("it counts over rows")
    return [_rows([shape[0], size.sizes[0] if size.sizes else call.unknown()], 0)]


@_rule("SparseToDense")
def _sparse_to_dense(call: Call) -> list[Value]:
    indices, dims, values, default = call.inputs
    if _all_same(call):
        return [same(dims.sizes)]
    _laid_out(default, Kind.SAME)
    _laid_out(values)
    if indices.kind is not Kind.INDICES or dims.sizes is None or indices.axis != 0:
        raise MixedError("which rows its entries are of is not known")
    if indices.target != dims.sizes[0] or _known(values.shape) != _known(indices.shape)[:1]:
        raise MixedError("its entries are not those of the rows")
    if any(size.is_padded for size in dims.sizes) and indices.sizes != dims.sizes:
        raise MixedError(_WIDTH)
    return [_rows(dims.sizes, 0, fill=default.array if default.shape == () else None)]


@_rule("RaggedTensorToTensor")
def _ragged_to_tensor(call: Call) -> list[Value]:
    dims, values, default, *parts = call.inputs
    types = [kind.decode() for kind in call.node.attr["row_partition_types"].list.s]
    _laid_out(default, Kind.SAME)
    _laid_out(values)
    wanted = [size.number for size in dims.sizes] if dims.sizes is not None and dims.kind is Kind.SAME else None
    shape = _known(values.shape)
    if values.axis != 0:
        raise MixedError("its entries are not those of the rows")
    if types == ["ROW_SPLITS"]:
        splits = parts[0]
        fits = splits.kind is Kind.SPLITS and splits.target == shape[0]
        rows = _known(splits.shape)[0] - Size.of(1) if fits else None
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
    return [_rows([rows, width, *shape[1:]], 0, fill=fill)]


def _parsed_sparse(call: Call, count: int) -> tuple[list[Value], list[Value], list[Value]]:
    indices, values, shapes = [], [], []
    for _ in range(count):
        entries, dims = call.entries(), (ROWS, call.width())
        indices.append(Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=ROWS))
        values.append(_rows([entries], 0))
        shapes.append(Value(Kind.SIZE, (Size.of(2),), sizes=dims))
    return indices, values, shapes


@_rule("ParseExampleV2")
def _parse(call: Call) -> list[Value]:
    serialized, *others = call.inputs
    if _known(_laid_out(serialized).shape) != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    _no_names(others[0])
    for other in others:
        _laid_out(other, Kind.SAME)
    attr = call.node.attr
    indices, values, shapes = _parsed_sparse(call, call.integer("num_sparse"))
    dense = []
    for shape in attr["dense_shapes"].list.shape:
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            raise MixedError(_WIDTH)
        dense.append(_rows([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0))
    ragged, splits = [], []
    for _ in attr["ragged_value_types"].list.type:
        entries = call.entries()
        ragged.append(_rows([entries], 0))
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


@_rule("ParseExample")
def _parse_old(call: Call) -> list[Value]:
    if _known(_laid_out(call.inputs[0]).shape) != (ROWS,):
        raise MixedError("its examples are no vector of the rows")
    _no_names(call.inputs[1])
    for other in call.inputs[1:]:
        _laid_out(other, Kind.SAME)
    indices, values, shapes = _parsed_sparse(call, call.integer("Nsparse"))
    dense = []
    for shape in call.node.attr["dense_shapes"].list.shape:
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            raise MixedError(_WIDTH)
        dense.append(_rows([ROWS, *(Size.of(dim.size) for dim in shape.dim)], 0))
    return [*indices, *values, *shapes, *dense]


OUTPUTS["ParseExample"] = lambda node: [
    ("sparse_indices", node.attr["Nsparse"].i),
    ("sparse_values", node.attr["Nsparse"].i),
    ("sparse_shapes", node.attr["Nsparse"].i),
    ("dense_values", node.attr["Ndense"].i),
]


@_rule("DecodeCSV")
def _decode_csv(call: Call) -> list[Value]:
    records, *defaults = call.inputs
    for default in defaults:
        _laid_out(default, Kind.SAME)
    return [_rows(_laid_out(records).shape, records.axis)] * len(defaults)


@_rule("StringSplitV2", "StringSplit")
def _string_split(call: Call) -> list[Value]:
    if len(_known(_laid_out(call.inputs[0]).shape)) != 1:
        raise MixedError("what it splits is no vector")
    _laid_out(call.inputs[1], Kind.SAME)
    rows = _known(call.inputs[0].shape)[0]
    if rows.is_distinct:
        raise MixedError("which of several equal values is taken depends on all rows")
    entries, dims = call.entries(), (rows, call.width())
    return [
        Value(Kind.INDICES, (entries, Size.of(2)), 0, sizes=dims, target=rows),
        _rows([entries], 0),
        Value(Kind.SIZE, (Size.of(2),), sizes=dims),
    ]


_outputs("StringSplitV2", "indices", "values", "shape")
_outputs("StringSplit", "indices", "values", "shape")


# ---- lists of tensors, which loops keep


@_rule("TensorListFromTensor")
def _list_of(call: Call) -> list[Value]:
    value, wanted = call.inputs
    if value.kind is Kind.SAME:
        element = same(None if value.shape is None else value.shape[1:])
    else:
        shape = _known(_laid_out(value).shape)
        _no_width(value)
        if value.axis == 0:
            raise MixedError("it goes over rows")
        element = _rows(shape[1:], value.axis - 1)
    return [_with_element(Value(Kind.LIST, declared=_declared(wanted)), element)]


@_rule("TensorListReserve", "EmptyTensorList")
def _new_list(call: Call) -> list[Value]:
    if call.inputs[1].kind is not Kind.SAME:
        raise MixedError(_BATCH_SIZE)
    return [Value(Kind.LIST, declared=_declared(call.inputs[0]))]


def _declared(wanted: Value) -> tuple[Size, ...] | None:
    """The shape that the tensors of a list are said to have; a negative number leaves an axis open, None all of it."""
    if wanted.kind not in (Kind.SAME, Kind.SIZE) or wanted.sizes is None:
        raise MixedError("the shape of its tensors is not known before it runs")
    return None if wanted.shape == () else wanted.sizes


def _taken(kept: Value, wanted: tuple[Size, ...] | None) -> Value:
    """What a tensor of a list is, in its own shape; one that was never set is zeros in the shapes that were declared."""
    element = kept.element
    if element is None:
        raise MixedError("what its tensors are is not known")
    for shape in (kept.declared, wanted):
        element = _in_shape(element, shape)
    return element


def _in_shape(element: Value, declared: tuple[Size, ...] | None) -> Value:
    """A tensor of a list of which this shape is declared: in a shape left open, it is that of the tensors that were set."""
    if declared is None:
        return element
    known = element.shape
    is_open = [size.number is not None and size.number < 0 for size in declared]
    fits = known is not None and len(known) == len(declared)
    if known is not None and fits:
        fits = all(free or size == own for free, size, own in zip(is_open, declared, known, strict=True))
    if element.kind is Kind.SAME:
        if not all(size.is_same for size in declared):
            raise MixedError(_BATCH_SIZE)
        return element if fits else same()
    if known is None or len(known) != len(declared) or not (declared == known or is_open[element.axis]):
        raise MixedError("a fixed number of rows is asked for")
    return element


@_rule("TensorListGetItem")
def _list_item(call: Call) -> list[Value]:
    kept, index = call.inputs[:2]
    if kept.kind is not Kind.LIST or kept.element is None or index.kind is not Kind.SAME:
        raise MixedError("which of its tensors is taken depends on rows")
    return [_taken(kept, _declared(call.inputs[2]))]


@_rule("TensorListSetItem")
def _set_item(call: Call) -> list[Value]:
    kept, index, value = call.inputs
    if kept.kind is not Kind.LIST or index.kind is not Kind.SAME or call.flag("resize_if_index_out_of_bounds"):
        raise MixedError("which of its tensors is set depends on rows")
    return [_with_element(kept, value)]


@_rule("TensorListPushBack")
def _push(call: Call) -> list[Value]:
    if call.inputs[0].kind is not Kind.LIST:
        raise MixedError("it is not known what it is put into")
    return [_with_element(*call.inputs)]


def _with_element(kept: Value, value: Value) -> Value:
    """The list with one more tensor; of numbers that are known of one, nothing is known of each."""
    _laid_out(value, Kind.ROWS, Kind.SAME)
    _no_width(value)
    element = Value(value.kind, value.shape, value.axis)
    if kept.element is not None and kept.element != element:
        raise MixedError("its tensors differ")
    if element.kind is Kind.ROWS:
        _in_shape(element, kept.declared)
    return Value(Kind.LIST, element=element, declared=kept.declared)


@_rule("TensorListStack")
def _stack_list(call: Call) -> list[Value]:
    kept = call.inputs[0]
    if kept.kind is not Kind.LIST:
        raise MixedError("what its tensors are is not known")
    value = _taken(kept, _declared(call.inputs[1]))
    if value.kind is Kind.SAME:
        return [same(None if value.shape is None else (call.unknown(), *value.shape))]
    return [_rows([call.unknown(), *_known(value.shape)], value.axis + 1)]


@_rule("TensorListLength")
def _list_length(_: Call) -> list[Value]:
    return [same(())]


@_rule("NoOp")
def _nothing(_: Call) -> list[Value]:
    return []
