"""Floating-point numbers as TensorFlow Serving writes them (json_tensor.cc, WriteDecimal)."""

import struct

import numpy as np

from tpuembed_serving.core.servable import Array

__all__ = ["float_tokens"]

_FULL_PRECISION = {np.dtype(np.float32): "%.9g ", np.dtype(np.float64): "%.17g "}
_FEW = 16
"""Up to here, one number after the other costs less than numpy's calls."""
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def float_tokens(array: Array) -> list[str]:
    """One JSON token per element of a float32 or float64 array, in order.

    Six significant digits where they read back as the same number of the array's dtype, else as many as identify every
    number of that dtype; ".0" is added where nothing shows that it is no integer.
    """
    if array.size <= _FEW and array.dtype == np.float32:
        return [_float32_token(value) for value in array.ravel().tolist()]
    values = array.ravel()
    tokens = _format("%.6g ", values)
    with np.errstate(over="ignore"):
        read_back = np.array(list(map(float, tokens)), dtype=np.float64).astype(array.dtype)
    inexact = np.flatnonzero(read_back != values)
    longer = _format(_FULL_PRECISION[array.dtype], values[inexact])
    for index, token in zip(inexact.tolist(), longer, strict=True):
        tokens[index] = token
    return [token if "." in token or "e" in token else _NOT_FINITE.get(token) or f"{token}.0" for token in tokens]


def _float32_token(value: float) -> str:
    token = f"{value:.6g}"
    try:
        # A number that rounds up to infinity is an error here.
        if _FLOAT32.unpack(_FLOAT32.pack(float(token)))[0] != value:
            token = f"{value:.9g}"
    except OverflowError:
        token = f"{value:.9g}"
    return token if "." in token or "e" in token else _NOT_FINITE.get(token) or f"{token}.0"


_FLOAT32 = struct.Struct("f")


def _format(form: str, values: Array) -> list[str]:
    """Every value by one printf-style form that ends in a space, in one call."""
    return (form * values.size % tuple(values.tolist())).split()
