"""The layout of a row of the storage type int8, decoded without TensorFlow."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PARAMETER_BYTES", "decode_int8"]

PARAMETER_BYTES = 8
"""Bytes of a row after its codes: scale and centre, a little-endian float32 each."""


def decode_int8(stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return float32 [n, dim] of stored rows, int8 [n, dim + 8]."""
    codes, bytes_ = stored[:, :-PARAMETER_BYTES], stored[:, -PARAMETER_BYTES:]
    parameters = np.ascontiguousarray(bytes_).view("<f4")
    decoded: npt.NDArray[np.float32] = codes.astype(np.float32) * parameters[:, :1] + parameters[:, 1:]
    return decoded
