"""Writes floating-point numbers as TensorFlow Serving does (json_tensor.cc, WriteDecimal)."""

import struct

import numpy as np

from tpuembed_serving.core.servable import Array

__all__ = ["float_tokens"]

_FULL_PRECISION = {np.dtype(np.float32): "%.9g ", np.dtype(np.float64): "%.17g "}
_FEW = 16
"""Up to this many numbers, a loop is faster than numpy's calls."""
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def float_tokens(array: Array) -> list[str]:
    """Return one JSON token per element of a float32 or float64 array, in order.

    A token has six significant digits if they read back as the same number of the dtype, else the full precision of the
    dtype. ".0" is added to a token that looks like an integer.
    """
    if array.size <= _FEW and array.itemsize == 4:
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
        # `pack` raises OverflowError if a number rounds up to infinity.
        if _FLOAT32.unpack(_FLOAT32.pack(float(token)))[0] != value:
            token = f"{value:.9g}"
    except OverflowError:
        token = f"{value:.9g}"
    return token if "." in token or "e" in token else _NOT_FINITE.get(token) or f"{token}.0"


_FLOAT32 = struct.Struct("f")


def _format(form: str, values: Array) -> list[str]:
    """Format all values in one call, by a printf-style form that ends in a space."""
    return (form * values.size % tuple(values.tolist())).split()
