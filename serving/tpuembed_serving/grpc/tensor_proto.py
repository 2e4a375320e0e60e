"""Converts TensorProtos to arrays and back, as TensorFlow's `Tensor::FromProto` and `AsProtoField` (framework/tensor.cc).

A sender can claim any shape. So memory is allocated only for values that the message contains. One exception is limited
in size: a tensor whose last value is repeated.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, Final

import ml_dtypes
import numpy as np
from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2, types_pb2

from tpuembed.formats.protobuf import MalformedError, bytes_field, read_varint
from tpuembed_serving.core.servable import Array, cannot_hold
from tpuembed_serving.core.status import Code, StatusError, invalid_argument

__all__ = ["MAX_FILLED_BYTES", "decode_tensor", "dtype_name", "encode_input", "encode_tensor"]

MAX_FILLED_BYTES: Final = 64 << 20
"""The largest tensor whose last value is repeated because not all values are sent."""
_STRING_BYTES: Final = 64
"""The memory of a short string: in the array, in TensorFlow and in an answer."""
_MAX_RANK: Final = 64
"""The limit of a numpy array; TensorFlow's own limit is 254."""
_SHORT_SHAPE: Final = 64
"""The bytes of the serialized shapes that are kept: requests repeat few."""
_PIECE: Final = 2**16
"""Elements converted from or to Python objects at once. The objects take much memory, and other threads wait."""
_MAX_ELEMENTS: Final = 2**58
"""The limit of the product of a tensor's nonzero sizes, from which numpy computes even an empty tensor's bytes."""


@dataclasses.dataclass(frozen=True)
class _Field:
    """How a TensorProto carries a dtype.

    Attributes:
        name: the repeated field of the values.
        dtype: the dtype of the tensor, little-endian as in tensor_content.
        carrier: the dtype of one entry of the field.
        per_element: how many entries of the field make one element.
    """

    name: str
    dtype: np.dtype[Any]
    carrier: np.dtype[Any]
    per_element: int = 1

    @property
    def fixed_width(self) -> bool:
        """Returns True if the serialized field has the same bytes as the array."""
        return self.name in _FIXED_WIDTH

    @functools.cached_property
    def number(self) -> int:
        """Returns the number of the field."""
        return int(tensor_pb2.TensorProto.DESCRIPTOR.fields_by_name[self.name].number)


def _field(name: str, dtype: Any, carrier: Any = None, per_element: int = 1) -> _Field:
    return _Field(name, np.dtype(dtype), np.dtype(dtype if carrier is None else carrier), per_element)


_FIXED_WIDTH: Final = frozenset({"float_val", "double_val", "scomplex_val", "dcomplex_val"})
_FIELDS: Final = {
    types_pb2.DT_FLOAT: _field("float_val", "<f4"),
    types_pb2.DT_DOUBLE: _field("double_val", "<f8"),
    types_pb2.DT_INT8: _field("int_val", np.int8, np.int32),
    types_pb2.DT_INT16: _field("int_val", "<i2", np.int32),
    types_pb2.DT_INT32: _field("int_val", "<i4"),
    types_pb2.DT_UINT8: _field("int_val", np.uint8, np.int32),
    types_pb2.DT_UINT16: _field("int_val", "<u2", np.int32),
    types_pb2.DT_INT64: _field("int64_val", "<i8"),
    types_pb2.DT_UINT32: _field("uint32_val", "<u4"),
    types_pb2.DT_UINT64: _field("uint64_val", "<u8"),
    types_pb2.DT_BOOL: _field("bool_val", np.bool_),
    types_pb2.DT_HALF: _field("half_val", "<f2", np.int32),
    types_pb2.DT_BFLOAT16: _field("half_val", ml_dtypes.bfloat16, np.int32),
    types_pb2.DT_COMPLEX64: _field("scomplex_val", "<c8", "<f4", 2),
    types_pb2.DT_COMPLEX128: _field("dcomplex_val", "<c16", "<f8", 2),
}

_DESCRIBING: Final = frozenset({"dtype", "tensor_shape", "version_number", "tensor_content"})
"""The fields of a TensorProto that hold no values."""


def dtype_name(dtype: int) -> str:
    """Return the name of a DataType in TensorFlow's C++ messages, such as "float"."""
    try:
        return str(types_pb2.DataType.Name(dtype)).removeprefix("DT_").lower()
    except ValueError:
        return f"unknown dtype enum ({dtype})"


def decode_tensor(proto: Any, alias: str) -> Array:
    """Return the tensor of a TensorProto, in either representation.

    Raises:
        StatusError: INVALID_ARGUMENT, the message is not a valid tensor, or has an integer that its dtype cannot hold.
    """
    try:
        number = proto.dtype
        if number == types_pb2.DT_STRING:
            _check_field(proto, "string_val", alias)
            return _strings(proto, _shape(proto.tensor_shape))
        field = _FIELDS[number]
        _check_field(proto, field.name, alias)
        return _numbers(proto, field, _shape(proto.tensor_shape), alias)
    except (_MalformedTensorError, MalformedError, KeyError):
        raise invalid_argument(f"tensor parsing error: {alias}") from None


def _check_field(proto: Any, own: str, alias: str) -> None:
    """Raise INVALID_ARGUMENT if the values are in the field of another dtype. TensorFlow ignores those, and fills in zeros."""
    if proto.tensor_content or len(getattr(proto, own)):
        return
    for field, _ in proto.ListFields():
        if field.name not in _DESCRIBING:
            kind = dtype_name(proto.dtype)
            raise invalid_argument(
                f"Input {alias} is {kind}, and has values in {field.name}. Send {kind} values in {own}."
            )


class _MalformedTensorError(Exception):
    """The parts of a TensorProto contradict one another."""


def _shape(proto: Any) -> tuple[int, ...]:
    serialized = proto.SerializeToString()
    return _known_shape(serialized) if len(serialized) <= _SHORT_SHAPE else _parsed_shape(serialized)


def _parsed_shape(serialized: bytes) -> tuple[int, ...]:
    proto = tensor_shape_pb2.TensorShapeProto.FromString(serialized)
    shape = tuple([dim.size for dim in proto.dim])
    if proto.unknown_rank or len(shape) > _MAX_RANK or min(shape, default=0) < 0:
        raise _MalformedTensorError
    if math.prod(filter(None, shape)) > _MAX_ELEMENTS:
        raise _MalformedTensorError
    return shape


_known_shape = functools.lru_cache(maxsize=1024)(_parsed_shape)


def _numbers(proto: Any, field: _Field, shape: tuple[int, ...], alias: str) -> Array:
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, field.dtype)
    if content := proto.tensor_content:
        return _from_content(content, field, count).reshape(shape)
    values = _field_values(getattr(proto, field.name), field)
    if values.dtype != field.dtype:
        values = _narrowed(values, field, alias, dtype_name(proto.dtype))
    return _filled(values, count, field.dtype).reshape(shape)


def _from_content(content: bytes, field: _Field, count: int) -> Array:
    if len(content) != count * field.dtype.itemsize:
        raise _MalformedTensorError
    if field.dtype == np.bool_:
        values = np.frombuffer(content, np.uint8)
        if values.max() > 1:
            raise _MalformedTensorError
        return values != 0
    return np.frombuffer(content, field.dtype)


def _field_values(values: Any, field: _Field) -> Array:
    """Return the entries of a repeated field. Narrow integers and 16-bit floats are still in their carrier."""
    if len(values) % field.per_element:
        raise _MalformedTensorError
    if hasattr(values, "__array__"):  # since protobuf 7.34: in a hundredth of the time of an iteration
        array = np.asarray(values, field.carrier)
        return array.view(field.dtype) if field.fixed_width else array
    if field.fixed_width:
        return _fixed_width_values(values, field)
    array, left = np.empty(len(values), field.carrier), iter(values)
    for start in range(0, len(array), _PIECE):
        array[start : start + _PIECE] = np.fromiter(itertools.islice(left, _PIECE), field.carrier)
    return array


def _narrowed(values: Array, field: _Field, alias: str, kind: str) -> Array:
    """Return the elements that 32-bit integers carry. TensorFlow drops the upper bits, which makes another id of an id."""
    is_float = field.name == "half_val"
    dtype = np.dtype("<u2") if is_float else field.dtype
    limits = np.iinfo(dtype)
    outside = (values < limits.min) | (values > limits.max)
    if outside.any():
        raise cannot_hold(alias, f"{kind} in 16 bits" if is_float else kind, values[outside][0], dtype)
    return values.astype(dtype).view(field.dtype)


def _fixed_width_values(values: Any, field: _Field) -> Array:
    """Return the values without creating Python numbers: a message with only this field ends in the values' bytes."""
    alone = tensor_pb2.TensorProto()
    getattr(alone, field.name).MergeFrom(values)
    size = len(values) * field.carrier.itemsize
    return np.frombuffer(alone.SerializeToString()[-size:] if size else b"", field.dtype)


def _filled(values: Array, count: int, dtype: np.dtype[Any]) -> Array:
    """Return `values` with the last one repeated up to `count`. Zeros if there is no value."""
    if len(values) == count:
        return values
    if len(values) > count or count * dtype.itemsize > MAX_FILLED_BYTES:
        raise _MalformedTensorError
    if not len(values):
        return np.zeros(count, dtype)
    return np.concatenate([values, np.full(count - len(values), values[-1], dtype)])


def _strings(proto: Any, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, object)
    values = _string_content(proto.tensor_content, count) if proto.tensor_content else list(proto.string_val)
    if len(values) > count or (len(values) < count and count * _STRING_BYTES > MAX_FILLED_BYTES):
        raise _MalformedTensorError
    array = np.empty(count, object)
    array[:] = values + values[-1:] * (count - len(values)) if values else b""  # np.full would drop NULs at the end
    return array.reshape(shape)


def _string_content(content: bytes, count: int) -> list[bytes]:
    """Decode a list of strings: all lengths, then all bytes (`port::DecodeStringList`)."""
    if count > len(content):  # each length takes at least a byte
        raise _MalformedTensorError
    sizes, start = [], 0
    for _ in range(count):
        size, start = read_varint(content, start)
        sizes.append(size)
    if start + sum(sizes) != len(content):
        raise _MalformedTensorError
    values = []
    for size in sizes:
        values.append(content[start : start + size])
        start += size
    return values


def encode_tensor(array: Array, dtype: str, proto: Any) -> None:
    """Fill an empty TensorProto, with the values in the field of the dtype.

    Raises:
        StatusError: UNIMPLEMENTED, the dtype is not supported.
    """
    number = _number(dtype)
    field = _FIELDS.get(number)
    if field is not None and field.fixed_width:  # the serialized field, without creating Python numbers
        data = np.ascontiguousarray(array, field.dtype).tobytes()
        proto.MergeFromString(_head(number, array.shape) + bytes_field(field.number, data))
        return
    proto.MergeFromString(_head(number, array.shape))
    if number == types_pb2.DT_STRING:
        proto.string_val.extend(array.ravel().tolist())
    elif field is None:
        raise StatusError(Code.UNIMPLEMENTED, f"tensors of type {dtype} cannot be sent")
    else:
        _put(proto, field, array)


def encode_input(array: Array, dtype: str, proto: Any) -> None:
    """Fill an empty TensorProto, with numbers as their bytes, which both sides convert fast. TensorFlow reads both forms.

    Raises:
        StatusError: UNIMPLEMENTED, the dtype is not supported.
    """
    number = _number(dtype)
    field = _FIELDS.get(number)
    if field is None or array.dtype != field.dtype or not array.size:
        encode_tensor(array, dtype, proto)
    else:
        proto.MergeFromString(_head(number, array.shape))
        proto.tensor_content = array.tobytes()


@functools.cache
def _number(dtype: str) -> int:
    return int(types_pb2.DataType.Value(f"DT_{dtype.upper()}"))


@functools.lru_cache(maxsize=1024)
def _head(number: int, shape: tuple[int, ...]) -> bytes:
    """Return a serialized TensorProto of this dtype and shape, without values."""
    proto = tensor_pb2.TensorProto(dtype=number)
    proto.tensor_shape.SetInParent()  # a scalar has an empty shape, not a missing one
    for size in shape:
        proto.tensor_shape.dim.add().size = size
    return bytes(proto.SerializeToString())


def _put(proto: Any, field: _Field, array: Array) -> None:
    flat, values = array.ravel(), getattr(proto, field.name)
    if field.name == "half_val":
        flat = flat.astype(field.dtype, copy=False).view("<u2")
    for start in range(0, len(flat), _PIECE):
        values.extend(flat[start : start + _PIECE].tolist())
