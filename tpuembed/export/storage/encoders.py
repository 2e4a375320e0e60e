"""Encodes blocks of float32 rows as stored rows: casts, and int8. `formats` says which storage type uses which encoder.

An int8 row of width `dim` is `dim` signed codes, then its scale and its centre, float32 each.

    value = code * scale + centre,   centre = (min + max) / 2,   scale = (max - min) / 254,   code in [-127, 127]

Codes around the centre stay correct if max - min overflows, and decode a row of one value, such as zeros, exactly. One
gather reads the whole row; the eight bytes at its end are reinterpreted in place. They are little-endian, as
TensorFlow's bundles are.

A table that was quantized in training with at most 256 buckets has its own grid. Its codes are the numbers of the
buckets.
"""

import functools
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig
from tpuembed.formats.saved_model.stack_rows import PARAMETER_BYTES

__all__ = [
    "BlockEncoder",
    "CastBlocks",
    "Int8Blocks",
    "UnstorableRowError",
    "block_rows",
    "first_not_finite",
    "quantize",
]

_Floats = npt.NDArray[np.float32]
# Elements of a block. With its scratch, a block fits in a core's cache, and numpy's call overhead stays small.
_BLOCK_ELEMENTS = 1 << 17
# What a row costs beside its elements: columns of numbers per row.
_ROW_ELEMENTS = 16
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

_INFINITY: dict[str, tuple[Any, Any, int]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
"""The integers to read a dtype as, and its infinity read so."""


class UnstorableRowError(Exception):
    """A storage type cannot hold a row. The error has its index, and the reason as the end of a sentence."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class BlockEncoder(Protocol):
    """Stores blocks of rows."""

    def encode(self, block: npt.NDArray[np.float32], out: npt.NDArray[Any], start: int) -> float:
        """Store `block` [n, dim] in `out` [n, columns] and return the largest error. `start` is the number of its first
        row.

        Raises:
            UnstorableRowError: this storage cannot hold a row.
        """


def block_rows(dim: int) -> int:
    """Return the rows of a block of a table of width `dim`."""
    return max(1, _BLOCK_ELEMENTS // (dim + _ROW_ELEMENTS))


class CastBlocks:
    """Casts blocks of rows and measures the error."""

    def __init__(self, dim: int, *, exact: bool) -> None:
        """Create buffers. `exact`: rows are read straight into their place, so there is nothing to cast."""
        self._exact = exact
        self._error: _Floats = np.empty((0 if exact else block_rows(dim), dim), np.float32)

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        """See BlockEncoder."""
        if self._exact:
            return 0.0
        out[...] = block
        error = self._error[: len(block)]
        error[...] = out
        error -= block
        worst = float(max(error.max(), -error.min()))
        return worst if np.isfinite(worst) else _worst_of_finite(block, out, error, start)


def _worst_of_finite(block: _Floats, out: npt.NDArray[Any], error: _Floats, start: int) -> float:
    """Return the largest error of a block that contains infinities or NaN, which a cast keeps.

    Raises:
        UnstorableRowError: a finite value became infinite.
    """
    finite = np.isfinite(block)
    overflown = finite & ~np.isfinite(error)
    if overflown.any():
        row, column = np.argwhere(overflown)[0]
        raise UnstorableRowError(start + int(row), f"{block[row, column]:g}, which overflows {out.dtype.name}")
    return float(np.abs(error, where=finite, out=np.zeros_like(error)).max())


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


def quantize(values: npt.NDArray[np.float32], quantization: QuantizationConfig) -> None:
    """Replace `values` by the nearest of `num_buckets` levels from `lower` to `upper`. NaN stays NaN.

    Source: SimulatedQuantization in tensorflow/core/protobuf/tpu/optimization_parameters.proto, and the docstring of
    `tf.tpu.experimental.embedding.QuantizationConfig`; in float32, as accelerators compute.
    """
    np.clip(values, quantization.lower, quantization.upper, out=values)
    values -= np.float32(quantization.lower)
    values /= np.float32(quantization.quantum)
    values += np.float32(0.5)
    np.floor(values, out=values)
    values *= np.float32(quantization.quantum)
    values += np.float32(quantization.lower)


def first_not_finite(rows: npt.NDArray[Any]) -> int | None:
    """Return the index of the first of `rows` [n, dim] with a NaN or an infinity, or None if all values are finite.

    No copy is made. Read as integers, IEEE 754 numbers of one sign are in the order of their sizes, and infinities and NaN are the
    last. So the largest signed integer shows whether there is one with a plus, and the largest unsigned integer one with a minus.
    """
    signed, unsigned, plus = _INFINITY[rows.dtype.name]
    minus = plus | 1 << (8 * rows.dtype.itemsize - 1)
    step = block_rows(rows.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.view(signed).max() >= plus or block.view(unsigned).max() >= minus:
            bad = (block.view(signed).max(axis=1) >= plus) | (block.view(unsigned).max(axis=1) >= minus)
            return start + int(np.argmax(bad))
    return None
