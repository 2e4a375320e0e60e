"""TensorFlow's numbers of dtypes and their names.

Source: tensorflow/core/framework/types.proto.
"""

from typing import Final

import ml_dtypes
import numpy as np

from tpuembed.formats.protobuf import MalformedError

__all__ = ["OPAQUE", "STRING", "dtype_name", "dtype_number", "item_bytes", "numpy_dtype"]

STRING: Final = "string"
OPAQUE: Final = frozenset({"qint8", "quint8", "qint32", "qint16", "quint16", "variant"})
"""Dtypes that are copied and never decoded."""

_NAMES: Final = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: STRING,
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    15: "qint16",
    16: "quint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    21: "variant",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    29: "int4",
    30: "uint4",
}
_NUMBERS: Final = {name: number for number, name in _NAMES.items()}


def dtype_name(number: int) -> str:
    """Return the name of TensorFlow's dtype `number`, as numpy and ml_dtypes spell it."""
    if number not in _NAMES:
        raise MalformedError(f"dtype number {number} is unknown")
    return _NAMES[number]


def dtype_number(name: str) -> int:
    """Return the number of the dtype `name`. Raises KeyError for a name that TensorFlow does not have."""
    return _NUMBERS[name]


def item_bytes(name: str) -> int:
    """Return the bytes of an element of the dtype `name`; 0 if they differ, or are never decoded."""
    return 0 if name == STRING or name in OPAQUE else numpy_dtype(name).itemsize


def numpy_dtype(name: str) -> np.dtype:
    """Return the little-endian numpy dtype `name`."""
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(extension if extension is not None else name).newbyteorder("<")
