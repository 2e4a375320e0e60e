"""Datatypes of the Open Inference Protocol, and the binary form of tensors in both directions.

A sender can claim any shape. So what a shape needs is compared with the bytes that are there, before they are read.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, TensorInfo
from tpuembed_serving.core.status import Code, StatusError, invalid_argument

__all__ = [
    "DTYPES",
    "Content",
    "check_shape",
    "datatype_of",
    "read_binary",
    "write_binary",
    "wrong_size",
]

DTYPES: Final = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(object),
}
"""The dtype of the arrays of each datatype, little-endian as in the binary form."""
_NAMES: Final = {
    "float": "FP32",
    "double": "FP64",
    "half": "FP16",
    "bfloat16": "BF16",
    "string": "BYTES",
    "bool": "BOOL",
} | {name.lower(): name for name in DTYPES if "INT" in name}
"""The datatype of each dtype of TensorFlow's C++."""
_MAX_RANK: Final = 64
"""The limit of a numpy array; TensorFlow's own limit is 254."""
_MAX_ELEMENTS: Final = 2**58
"""The limit of the product of a tensor's nonzero sizes, from which numpy computes even an empty tensor's bytes."""
_SHOWN_RANK: Final = 8
_LENGTH: Final = struct.Struct("<I")
_ELEMENTS_BETWEEN_CHECKS: Final = 1024


class Content(NamedTuple):
    """A tensor's bytes: those of `buffer` from `start` to `stop`."""

    buffer: bytes
    start: int
    stop: int


def datatype_of(info: TensorInfo) -> str:
    """Return the datatype of an input or output.

    Raises:
        StatusError: UNIMPLEMENTED, the protocol has none for its dtype.
    """
    found = _NAMES.get(info.dtype)
    if found is None:
        raise StatusError(
            Code.UNIMPLEMENTED, f"{info.alias} is {info.dtype}, which the Open Inference Protocol cannot carry"
        )
    return found


def check_shape(name: str, sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of input `name`, proven to be one that an array can have.

    Raises:
        StatusError: INVALID_ARGUMENT, a size is no integer, is negative, or they are too many or too large.
    """
    if len(sizes) > _MAX_RANK:
        raise invalid_argument(f"input {name} has {len(sizes)} dimensions. The most is {_MAX_RANK}")
    if any(type(size) is not int or size < 0 for size in sizes) or math.prod(filter(None, sizes)) > _MAX_ELEMENTS:
        shown = f"{list(sizes)[:_SHOWN_RANK]}{' and more' * (len(sizes) > _SHOWN_RANK)}"
        raise invalid_argument(
            f"input {name} has the shape {shown}. Give integers of 0 or more, whose product is at most 2^58"
        )
    return tuple(sizes)


def wrong_size(name: str, datatype: str, shape: Sequence[int], found: str) -> StatusError:
    """Return the error of an input whose data does not have the size that its shape needs."""
    return invalid_argument(f"input {name} is {datatype} with the shape {list(shape)}, and its data has {found}")


def read_binary(name: str, datatype: str, shape: tuple[int, ...], content: Content, check: Check) -> Array:
    """Return a tensor of binary data. Numbers are not copied: the array is read-only, and may be unaligned.

    Args:
        name: the input's name, for messages.
        datatype: one of `DTYPES`.
        shape: its shape, as `check_shape` returns it.
        content: its bytes.
        check: called now and then.

    Raises:
        StatusError: INVALID_ARGUMENT, the bytes are fewer or more than the shape needs, or not of the datatype.
    """
    count, size = math.prod(shape), content.stop - content.start
    if datatype == "BYTES":
        return _read_strings(name, shape, count, content, check)
    dtype = DTYPES[datatype]
    if count * dtype.itemsize != size:
        raise wrong_size(name, datatype, shape, f"{size} bytes. It needs {count * dtype.itemsize}")
    if not count:
        return np.empty(shape, dtype)
    if datatype == "BOOL":
        values = np.frombuffer(content.buffer, np.uint8, count, content.start)
        if values.max() > 1:
            raise invalid_argument(f"input {name} is BOOL, and one of its bytes is {values.max()}. Send 0 or 1")
        return values.view(dtype).reshape(shape)
    return np.frombuffer(content.buffer, dtype, count, content.start).reshape(shape)


def _read_strings(name: str, shape: tuple[int, ...], count: int, content: Content, check: Check) -> Array:
    """Read elements of a 4-byte length and so many bytes, which must end where the content ends."""
    buffer, at, stop = content
    if count * _LENGTH.size > stop - at:
        raise wrong_size(name, "BYTES", shape, f"{stop - at} bytes. Each element needs 4 for its length")
    values = []
    for index in range(count):
        if index % _ELEMENTS_BETWEEN_CHECKS == 0:
            check()
        if stop - at < _LENGTH.size:
            raise wrong_size(name, "BYTES", shape, f"ended after {index} of {count} elements")
        (size,) = _LENGTH.unpack_from(buffer, at)
        at += _LENGTH.size
        if size > stop - at:
            raise wrong_size(
                name, "BYTES", shape, f"{stop - at} bytes left for element {index}, whose length is {size}"
            )
        values.append(buffer[at : at + size])
        at += size
    if at != stop:
        raise wrong_size(name, "BYTES", shape, f"{stop - at} bytes after its last element")
    array = np.empty(count, object)
    array[:] = values
    return array.reshape(shape)


def write_binary(array: Array, datatype: str, check: Check) -> memoryview:
    """Return the binary form of a tensor. That of numbers shares the array's memory if this has the order that is needed."""
    if datatype != "BYTES":
        return np.ascontiguousarray(array, DTYPES[datatype]).reshape(-1).view(np.uint8).data
    parts: list[bytes] = []
    flat = array.reshape(-1)
    for start in range(0, len(flat), _ELEMENTS_BETWEEN_CHECKS):
        check()
        for value in flat[start : start + _ELEMENTS_BETWEEN_CHECKS].tolist():
            parts += (_LENGTH.pack(len(value)), value)
    return memoryview(b"".join(parts))
