"""Converts JSON values to tensors, with TensorFlow Serving's type rules, shapes and messages (json_tensor.cc)."""

import base64
import itertools
import math
from typing import Any

import numpy as np

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, TensorInfo, cannot_hold
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.json.debug import debug_string, type_name
from tpuembed_serving.http.json.document import format_error

__all__ = ["MAX_RANK", "base64_decode", "dense_shape", "fast_tensor", "fill", "is_base64_object", "to_array"]

MAX_RANK = 64
"""The limit of a numpy array; TensorFlow's own limit is 254."""

_ELEMENTS_BETWEEN_CHECKS = 1024
_INT_RANGES = {
    "int8": range(-(2**7), 2**7),
    "int16": range(-(2**15), 2**15),
    "uint8": range(2**8),
    "int32": range(-(2**31), 2**31),
    "int64": range(-(2**63), 2**63),
    "uint32": range(2**32),
    "uint64": range(2**64),
}
_FLOATS = frozenset({"float", "double"})
_LEAF_TYPES: dict[str, frozenset[type]] = {
    **dict.fromkeys(_INT_RANGES, frozenset({int})),
    **dict.fromkeys(_FLOATS, frozenset({int, float})),
    "bool": frozenset({bool}),
    "string": frozenset({str}),
}


def fast_tensor(value: Any, info: TensorInfo) -> Array | None:
    """Convert `value` at once. Returns None if it must be decoded value by value, perhaps to report an error."""
    types = _leaf_types(value)
    if not types or not types <= _LEAF_TYPES.get(info.dtype, frozenset()):
        return None
    if info.dtype == "string":
        return _fast_strings(value)
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # ragged, too deep, or an integer beyond 64 bits
        return None
    return _cast(array, info)


def _leaf_types(value: Any) -> set[type]:
    """Return the types of the leaves of nested lists. The types are more than the leaves' if the depth varies.

    Checked before numpy is called: numpy converts true to 1, and makes all strings as long as the longest.
    """
    level, types = [value], {type(value)}
    while types == {list}:
        level = list(itertools.chain.from_iterable(level))
        types = set(map(type, level))
    return types


def _cast(array: Array, info: TensorInfo) -> Array | None:
    """Cast an array to the input's dtype. Returns None if a value does not fit."""
    if info.dtype in _FLOATS:
        return _to_float(array, info)
    if array.dtype == info.numpy_dtype:  # bool and int64
        return array
    if array.dtype.kind not in "iu":  # a mix of negative integers and integers beyond int64
        return None
    allowed = _INT_RANGES[info.dtype]
    inside = int(array.min()) in allowed and int(array.max()) in allowed
    return array.astype(info.numpy_dtype) if inside else None


def _to_float(array: Array, info: TensorInfo) -> Array:
    """Cast through double, as RapidJSON's GetFloat. Values that are too large become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float64).astype(info.numpy_dtype)


def _fast_strings(value: Any) -> Array | None:
    """Convert a list of strings. Returns None for anything else."""
    if not isinstance(value, list) or isinstance(value[0], list):
        return None
    array = np.empty(len(value), dtype=object)
    array[:] = [text.encode("utf-8", "surrogateescape") for text in value]
    return array


def is_base64_object(value: Any) -> bool:
    """Returns True if `value` is {"b64": string} and nothing else."""
    return (
        type(value) is dict and len(value) == 1 and isinstance(value.get("b64"), str)
    )  # JsonObject has a repeated key


def dense_shape(value: Any) -> list[int]:
    """Return the shape that the first elements of nested lists have, or [] for a value that is not a list."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    if len(shape) > MAX_RANK:
        raise invalid_argument(f"Tensor rank {len(shape)} is larger than the supported rank {MAX_RANK}")
    return shape


def fill(
    value: Any, shape: list[int], info: TensorInfo, leaves: list[Any], level: int = 0, check: Check = noop
) -> None:
    """Check `value` against `shape` and the dtype, and append its leaves to `leaves`. `check` is called now and then.

    Raises:
        StatusError: the lists are not rectangular, or a leaf is not of the dtype.
    """
    if not isinstance(value, list):
        if level != len(shape):
            where = f"found at incorrect level: {level + 1} in the JSON DOM. Expected at level: {len(shape)}"
            raise format_error(value, where)
        leaves.append(_leaf(value, info))
        return
    if level >= len(shape):
        raise invalid_argument(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        sizes = f"{len(value)} at level: {level} expected size: {shape[level]}"
        raise invalid_argument(f"Encountered list at unexpected size: {sizes}")
    for index, element in enumerate(value):
        if index % _ELEMENTS_BETWEEN_CHECKS == 0:
            check()
        fill(element, shape, info, leaves, level + 1, check)


def _leaf(value: Any, info: TensorInfo) -> Any:
    dtype = info.dtype
    if isinstance(value, dict):
        if dtype != "string":
            raise _type_error(value, info)
        return base64_decode(value)
    if dtype not in _INT_RANGES and dtype not in _FLOATS and dtype not in ("string", "bool"):
        text = f"Conversion of JSON Value: {debug_string(value)} to type: {dtype}"
        raise StatusError(Code.UNIMPLEMENTED, text)
    if not _accepts(value, dtype):
        error = _type_error(value, info)
        if dtype in _INT_RANGES and _is_integer(
            value
        ):  # TensorFlow Serving lets int8, int16 and uint8 wrap to a different id
            number = value if isinstance(value, int) else f"{value:.1f}"
            error = invalid_argument(f"{error.message}. {cannot_hold(info.alias, dtype, number, dtype).message}")
        raise error
    return value.encode("utf-8", "surrogateescape") if dtype == "string" else value


def _accepts(value: Any, dtype: str) -> bool:
    if dtype == "string":
        return isinstance(value, str)
    if isinstance(value, bool) or dtype == "bool":
        return isinstance(value, bool) and dtype == "bool"
    if dtype in _FLOATS:
        return isinstance(value, int | float)
    return isinstance(value, int) and value in _INT_RANGES[dtype]


def _is_integer(value: Any) -> bool:
    """Return True for an integer, also for one beyond 64 bits, of which the parser makes a float."""
    return type(value) is int or (type(value) is float and math.isfinite(value) and abs(value) >= 2**63)


def _type_error(value: Any, info: TensorInfo) -> StatusError:
    return format_error(value, f"Type: {type_name(value)} is not of expected type: {info.dtype}")


def base64_decode(value: dict[str, Any]) -> bytes:
    """Decode {"b64": string}. Whitespace is ignored and padding is optional, as in `absl::Base64Unescape`."""
    if not is_base64_object(value):
        raise format_error(value, "not formatted correctly for base64 data")
    text = "".join(value["b64"].split())
    digits = text.rstrip("=")
    padding = -len(digits) % 4
    if len(text) - len(digits) not in (0, padding):
        raise invalid_argument("Unable to base64 decode")
    try:
        return base64.b64decode(digits + "=" * padding, validate=True)
    except ValueError:
        raise invalid_argument("Unable to base64 decode") from None


def to_array(leaves: list[Any], shape: list[int], info: TensorInfo) -> Array:
    """Return leaves that `fill` accepted as a tensor."""
    if info.dtype == "string":
        strings = np.empty(len(leaves), dtype=object)
        strings[:] = leaves
        return strings.reshape(shape)
    if info.dtype in _FLOATS:
        return _to_float(np.array(leaves, dtype=np.float64), info).reshape(shape)
    wide = {"bool": np.bool_, "uint64": np.uint64}.get(info.dtype, np.int64)
    return np.array(leaves, dtype=wide).astype(info.numpy_dtype).reshape(shape)
