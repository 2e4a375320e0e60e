"""The storage type int8: a row of width `dim` is `dim` signed codes, then its scale and its centre, float32 each.

    value = code * scale + centre,   centre = (min + max) / 2,   scale = (max - min) / 254,   code in [-127, 127]

Codes around the centre stay correct if max - min overflows, and decode a row of one value, such as zeros, exactly. One
gather reads the whole row; the eight bytes at its end are reinterpreted in place. They are little-endian, as
TensorFlow's bundles are.

A table that was quantized in training with at most 256 buckets has its own grid. Its codes are the numbers of the
buckets.
"""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig
from tpuembed.export.storage.types import UnstorableRowError, block_rows
from tpuembed.saved_model.stored_rows import PARAMETER_BYTES

__all__ = ["Int8Blocks"]

_Floats = npt.NDArray[np.float32]
_MAX_CODE = np.float32(127)
_MAX_BUCKETS = 256
# TensorFlow's kernels flush smaller numbers to zero.
_TINY = np.finfo(np.float32).tiny
# Larger numbers are clipped to this one, a millionth below float32's maximum, so that no sum overflows.
_LARGEST = np.float32(np.finfo(np.float32).max * (1 - 2.0**-20))
_PARAMETERS = np.dtype("<f4")
_WIDE = 32
# Element types as wide as this many floats, or as this many codes.
_FLOATS: dict[int, Any] = {1: np.float32, 2: np.complex64, 4: np.complex128}
_CODES: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32}


class Int8Blocks:
    """Encodes transposed blocks of rows: numpy is fast along many rows, and slow along the few values of one row.

    Up to four neighbours in a row are moved as one wider element, which makes the transposition faster. They stay
    adjacent, as `lanes` of their row.
    """

    def __init__(self, dim: int, quantization: QuantizationConfig | None) -> None:
        self._lanes = _lanes(dim)
        shape = (dim // self._lanes, block_rows(dim) * self._lanes)
        self._values, self._work = (np.empty(shape, np.float32) for _ in range(2))
        self._codes = np.empty(shape, np.int8)
        self._grid = _grid(quantization)

    @staticmethod
    def scratch_bytes(dim: int) -> int:
        """Return the bytes per row of a block: values, work, codes, and a dozen numbers per lane."""
        return 9 * dim + 48 * _lanes(dim)

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        """See BlockEncoder."""
        columns = slice(len(block) * self._lanes)
        values, work, codes = self._values[:, columns], self._work[:, columns], self._codes[:, columns]
        values.view(_FLOATS[self._lanes])[...] = block.view(_FLOATS[self._lanes]).T
        clipped, lowest, highest = self._limit(values, start)
        scale, centre = self._grid or _row_grid(lowest, highest)
        step, middle, inverse = (self._per_lane(number) for number in (scale, centre, _inverse(scale)))
        np.subtract(values, middle, out=work)
        np.multiply(work, inverse, out=work)
        np.rint(work, out=work)
        np.copyto(codes, work, casting="unsafe")
        out[:, :-PARAMETER_BYTES].view(_CODES[self._lanes])[...] = codes.view(_CODES[self._lanes]).T
        _write_parameters(out, scale, centre)
        work *= step  # decode as a lookup does
        work += middle
        work -= values
        return clipped + float(max(work.max(), -work.min()))

    def _limit(self, values: _Floats, start: int) -> tuple[float, _Floats, _Floats]:
        """Clip `values` to the range of int8 rows. Return the amount clipped, and each row's lowest and highest value
        [n].

        Raises:
            UnstorableRowError: a value is not finite.
        """
        lowest = functools.reduce(np.minimum, values.min(0).reshape(-1, self._lanes).T)
        highest = functools.reduce(np.maximum, values.max(0).reshape(-1, self._lanes).T)
        sound = np.isfinite(lowest) & np.isfinite(highest)
        if not sound.all():
            row = int(np.argmin(sound))
            found = lowest[row] if np.isfinite(highest[row]) else highest[row]
            raise UnstorableRowError(start + row, f"{found}, which int8 cannot hold")
        largest = float(max(highest.max(), -lowest.min()))
        if largest <= _LARGEST:
            return 0.0, lowest, highest
        for array in (values, lowest, highest):
            np.clip(array, -_LARGEST, _LARGEST, out=array)
        return largest - float(_LARGEST), lowest, highest

    def _per_lane(self, number: Any) -> Any:
        """Repeat a number of each row [n], or one for all rows, for every lane."""
        return number if np.ndim(number) == 0 else np.repeat(number, self._lanes)


def _lanes(dim: int) -> int:
    """Return how many values are moved at once. Narrow rows use 1, because their extremes are then cheaper to find."""
    return math.gcd(dim, 4) if dim >= _WIDE else 1


def _row_grid(lowest: _Floats, highest: _Floats) -> tuple[_Floats, _Floats]:
    """Return scale and centre of rows [n]. A row whose values are all equal, or nearly so, has scale 0 and equals its
    centre.
    """
    half = np.float32(0.5)
    centre: _Floats = half * lowest + half * highest
    np.copyto(centre, lowest, where=lowest == highest)
    scale = np.maximum(highest - centre, centre - lowest) / _MAX_CODE
    scale[scale < _TINY] = 0
    return scale, centre


def _grid(quantization: QuantizationConfig | None) -> tuple[np.float32, np.float32] | None:
    """Return scale and centre of all rows if training quantized them into few enough buckets for int8 codes, else None."""
    if quantization is None or quantization.num_buckets > _MAX_BUCKETS:
        return None
    centre = quantization.lower + quantization.num_buckets // 2 * quantization.quantum
    return np.float32(quantization.quantum), np.float32(centre)


def _inverse(scale: Any) -> Any:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def _write_parameters(out: npt.NDArray[Any], scale: Any, centre: Any) -> None:
    parameters = np.empty((len(out), 2), _PARAMETERS)
    parameters[:, 0], parameters[:, 1] = scale, centre
    out[:, -PARAMETER_BYTES:] = parameters.view(np.int8)
