"""How rows are stored: one class per storage type, which encodes rows, and decodes them as lookups do.

Beside a class, a type has a case in native/src/rows.h: an enum in the order of STORAGES, and how C reads a value.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["STORAGES", "STORAGE_TYPES", "Codec", "Levels", "UnstorableRowError", "block_rows"]

_Floats = npt.NDArray[np.float32]
_Tensor = Any
# Elements of a block. With its scratch, a block fits in a core's cache, and numpy's call overhead stays small.
_BLOCK_ELEMENTS: Final = 1 << 17
# What a row costs beside its elements: columns of numbers per row.
_ROW_ELEMENTS: Final = 16
# TensorFlow's kernels flush smaller numbers to zero.
_TINY: Final = np.finfo(np.float32).tiny
# Larger numbers are clipped to this one, a millionth below float32's maximum, so that no sum overflows.
_LARGEST: Final = np.float32(np.finfo(np.float32).max * (1 - 2.0**-20))
_WIDE: Final = 32
# Element types as wide as this many floats, or as this many codes.
_FLOATS: Final[dict[int, Any]] = {1: np.float32, 2: np.complex64, 4: np.complex128}
_CODES: Final[dict[int, Any]] = {1: np.int8, 2: np.int16, 4: np.int32}


class UnstorableRowError(Exception):
    """A storage type cannot hold a row. The error has its index, and the reason as the end of a sentence."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclasses.dataclass(frozen=True)
class Levels:
    """The values of a table that was quantized in training: `count` of them, `step` apart, from `lowest` on."""

    lowest: float
    step: float
    count: int


def block_rows(dim: int) -> int:
    """Return the rows of a block of a table of width `dim`."""
    return max(1, _BLOCK_ELEMENTS // (dim + _ROW_ELEMENTS))


class Codec(abc.ABC):
    """A storage type. An object encodes the rows of a table, and has the buffers for a block of them.

    Attributes:
        dtype: of the stored variable.
        values: the dtype that has the stored values without loss.
        parameters: elements of a row after its values.
        better: the types with smaller errors, for messages.
    """

    dtype: ClassVar[np.dtype[Any]]
    values: ClassVar[np.dtype[Any]]
    parameters: ClassVar[int] = 0
    better: ClassVar[str] = "float32"

    @abc.abstractmethod
    def __init__(self, dim: int, levels: Levels | None) -> None:
        """Create the buffers for a table of width `dim`."""

    @abc.abstractmethod
    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        """Store `block` [n, dim] in `out` [n, columns] and return the largest error. `start` is the number of its first row.

        Raises:
            UnstorableRowError: this type cannot hold a row.
        """

    @staticmethod
    @abc.abstractmethod
    def scratch_bytes(dim: int) -> int:
        """Return the bytes of buffers per row of a block."""

    @staticmethod
    @abc.abstractmethod
    def decode(stored: npt.NDArray[Any]) -> _Floats:
        """Return stored rows [n, columns] as float32 [n, dim], as a lookup computes them."""

    @staticmethod
    @abc.abstractmethod
    def decode_in_graph(tf: Any, stored: _Tensor, dim: int) -> _Tensor:
        """Do the same with tensors. `tf` is TensorFlow, which readers and shard writers never import."""

    @classmethod
    def columns(cls, dim: int) -> int:
        """Return the elements of one stored row of a table of width `dim`."""
        return dim + cls.parameters

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        """Return the bytes of one stored row of a table of width `dim`."""
        return cls.columns(dim) * cls.dtype.itemsize


class _Cast(Codec):
    """Casts to the nearest value, ties to even, as `tf.cast` rounds."""

    def __init__(self, dim: int, levels: Levels | None) -> None:  # noqa: ARG002 - casts are as near to any values
        self._error: _Floats = np.empty((block_rows(dim), dim), np.float32)

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        out[...] = block
        error = self._error[: len(block)]
        error[...] = out
        error -= block
        worst = float(max(error.max(), -error.min()))
        return worst if np.isfinite(worst) else _worst_of_finite(block, out, error, start)

    @staticmethod
    def scratch_bytes(dim: int) -> int:
        return 4 * dim

    @staticmethod
    def decode(stored: npt.NDArray[Any]) -> _Floats:
        return stored.astype(np.float32)

    @staticmethod
    def decode_in_graph(tf: Any, stored: _Tensor, dim: int) -> _Tensor:  # noqa: ARG004 - the width stays
        return tf.cast(stored, tf.float32)


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


class Float32(_Cast):
    """Rows as they are: read straight into their place, so that there is nothing to cast."""

    dtype = values = np.dtype(np.float32)

    def __init__(self, dim: int, levels: Levels | None) -> None:
        """Create nothing."""

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:  # noqa: ARG002
        """See Codec.encode."""
        return 0.0

    @staticmethod
    def scratch_bytes(dim: int) -> int:  # noqa: ARG004
        """See Codec.scratch_bytes."""
        return 0


class BFloat16(_Cast):
    """bfloat16: the range of float32, and 8 bits of precision."""

    dtype = values = np.dtype(ml_dtypes.bfloat16)
    better = "float16 or float32"


class Float16(_Cast):
    """float16: 11 bits of precision, and numbers up to 65504."""

    dtype = values = np.dtype(np.float16)


class Int8(Codec):
    """Signed codes, then the scale and the centre of the row, float32 each.

        value = code * scale + centre,   centre = (min + max) / 2,   scale = (max - min) / 254,   code in [-127, 127]

    Codes around the centre stay correct if max - min overflows, and decode a row of one value, such as zeros, exactly. One
    gather reads the whole row; the eight bytes at its end are reinterpreted in place. They are little-endian, as
    TensorFlow's bundles are. A table that was quantized in training to at most 256 values has their numbers as its codes.

    Blocks are encoded transposed: numpy is fast along many rows, and slow along the few values of one row. Up to four
    neighbours in a row are moved as one wider element, which makes the transposition faster. They stay adjacent, as `lanes`
    of their row.
    """

    dtype = np.dtype(np.int8)
    values = np.dtype(np.float32)
    parameters = 8
    better = "float16, bfloat16 or float32"

    def __init__(self, dim: int, levels: Levels | None) -> None:
        """See Codec."""
        self._lanes = _lanes(dim)
        shape = (dim // self._lanes, block_rows(dim) * self._lanes)
        self._values, self._work = (np.empty(shape, np.float32) for _ in range(2))
        self._codes = np.empty(shape, np.int8)
        self._grid: tuple[np.float32, np.float32] | None = None
        if levels is not None and levels.count <= 256:
            self._grid = np.float32(levels.step), np.float32(levels.lowest + levels.count // 2 * levels.step)

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        """See Codec.encode."""
        columns = slice(len(block) * self._lanes)
        values, work, codes = self._values[:, columns], self._work[:, columns], self._codes[:, columns]
        values.view(_FLOATS[self._lanes])[...] = block.view(_FLOATS[self._lanes]).T
        clipped, lowest, highest = self._limit(values, start)
        scale, centre = self._grid or _row_grid(lowest, highest)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        step, middle, inverse = (self._per_lane(number) for number in (scale, centre, inverse))
        np.subtract(values, middle, out=work)
        np.multiply(work, inverse, out=work)
        np.rint(work, out=work)
        np.copyto(codes, work, casting="unsafe")
        out[:, : -self.parameters].view(_CODES[self._lanes])[...] = codes.view(_CODES[self._lanes]).T
        numbers = np.empty((len(out), 2), "<f4")
        numbers[:, 0], numbers[:, 1] = scale, centre
        out[:, -self.parameters :] = numbers.view(np.int8)
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

    @staticmethod
    def scratch_bytes(dim: int) -> int:
        """Return the bytes per row of a block: values, work, codes, and a dozen numbers per lane."""
        return 9 * dim + 48 * _lanes(dim)

    @staticmethod
    def decode(stored: npt.NDArray[Any]) -> _Floats:
        """See Codec.decode."""
        codes, bytes_ = stored[:, : -Int8.parameters], stored[:, -Int8.parameters :]
        numbers = np.ascontiguousarray(bytes_).view("<f4")
        decoded: _Floats = codes.astype(np.float32) * numbers[:, :1] + numbers[:, 1:]
        return decoded

    @staticmethod
    def decode_in_graph(tf: Any, stored: _Tensor, dim: int) -> _Tensor:
        """See Codec.decode_in_graph."""
        codes, parameters = tf.split(stored, [dim, Int8.parameters], axis=1)
        scale, centre = tf.split(tf.bitcast(tf.reshape(parameters, [-1, 2, 4]), tf.float32), 2, axis=1)
        return tf.cast(codes, tf.float32) * scale + centre


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
    scale = np.maximum(highest - centre, centre - lowest) / np.float32(127)
    scale[scale < _TINY] = 0
    return scale, centre


STORAGES: Final[Mapping[str, type[Codec]]] = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "float16": Float16,
    "int8": Int8,
}
"""The types that tables can be stored as."""
STORAGE_TYPES: Final = tuple(STORAGES)
