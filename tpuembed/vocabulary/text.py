"""Names of any length in two arrays: all bytes one after the other, and where each name begins."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["GrowingArray", "Texts"]

_Bytes = npt.NDArray[np.uint8]
_Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Names without a Python object for each.

    Attributes:
        data: the bytes of all names.
        starts: int64 [n + 1]; name i is `data[starts[i]:starts[i + 1]]`.
    """

    data: _Bytes
    starts: _Integers

    @classmethod
    def of(cls, names: Iterable[Any]) -> "Texts":
        """Return the names of an iterable of bytes or str, which is saved in UTF-8.

        Raises:
            ConfigError: one is neither.
        """
        encoded = [name.encode() if isinstance(name, str) else name for name in names]
        for name in encoded:
            if not isinstance(name, bytes):
                raise ConfigError(f"vocabulary: a name must be str or bytes, got {name!r}, a {type(name).__name__}.")
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> bytes:
        """Return one name."""
        return self.data[self.starts[index] : self.starts[index + 1]].tobytes()

    @property
    def lengths(self) -> _Integers:
        """Return the bytes of each name."""
        return np.diff(self.starts)

    def take(self, indices: _Integers) -> "Texts":
        """Return the names at `indices`, in that order."""
        lengths = self.lengths[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.repeat(self.starts[indices] - starts[:-1], lengths) + np.arange(starts[-1])
        return Texts(self.data[places], starts)

    def equal(self, other: "Texts") -> npt.NDArray[np.bool_]:
        """Return which names equal those of `other` at the same place. Both have the same number of names."""
        same = self.lengths == other.lengths
        where = np.flatnonzero(same)
        mine, others = self.take(where), other.take(where)
        differs = np.concatenate([[0], np.cumsum(mine.data != others.data)])
        same[where] = differs[mine.starts[1:]] == differs[mine.starts[:-1]]
        return same

    def with_prefix(self, prefix: bytes) -> "Texts":
        """Return the names with `prefix` before each."""
        starts = self.starts + len(prefix) * np.arange(len(self.starts))
        data = np.empty(int(starts[-1]), np.uint8)
        own = np.ones(len(data), bool)
        first = starts[:-1, None] + np.arange(len(prefix))
        own[first] = False
        data[first] = np.frombuffer(prefix, np.uint8)
        data[own] = self.data
        return Texts(data, starts)


class GrowingArray:
    """An array that values are appended to. Its room doubles, so that an append seldom copies what is there."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array, self._size = np.empty(0, dtype), 0

    @property
    def values(self) -> npt.NDArray[Any]:
        """Return the values up to now, not a copy of them."""
        return self._array[: self._size]

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append `values`, [n]."""
        size = self._size + len(values)
        if size > len(self._array):
            array = np.empty(max(size, 2 * self._size), self._array.dtype)
            array[: self._size] = self.values
            self._array = array
        self._array[self._size : size] = values
        self._size = size
