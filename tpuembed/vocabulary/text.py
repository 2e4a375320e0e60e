"""Names of any length in arrays: all bytes in one, and where each name begins and how long it is."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["SLACK", "Texts", "encoded"]

_Bytes = npt.NDArray[np.uint8]
_Integers = npt.NDArray[np.int64]

SLACK: Final = 8
"""Bytes after the last name, so that 8 bytes can be read at every place of a name."""
_LONG: Final = 256
_AT_ONCE: Final = 1 << 18
_BYTES_AT_ONCE: Final = 16 << 20


@dataclasses.dataclass(frozen=True)
class Texts:
    """Names without a Python object for each.

    Attributes:
        data: the bytes of all names, and SLACK bytes or more after them. Bytes between names belong to none.
        starts: int64 [n].
        lengths: int64 or uint32, [n]; name i is `data[starts[i]:starts[i] + lengths[i]]`.
    """

    data: _Bytes
    starts: _Integers
    lengths: npt.NDArray[Any]

    @classmethod
    def of(cls, names: Iterable[Any]) -> "Texts":
        """Return the names of an iterable of bytes or str, which is saved in UTF-8.

        Raises:
            ConfigError: one is neither, or has no UTF-8.
        """
        given = encoded(names)
        lengths = np.fromiter(map(len, given), np.int64, len(given))
        return cls(np.frombuffer(b"".join([*given, bytes(SLACK)]), np.uint8), _starts_of(lengths), lengths)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        """Return one name."""
        start = int(self.starts[index])
        return self.data[start : start + int(self.lengths[index])].tobytes()

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """Return the 64 bits, little-endian, that begin at each byte of `data`, the last 7 bytes apart. It is no copy."""
        return np.ndarray((len(self.data) - 7,), "<u8", np.ascontiguousarray(self.data), 0, (1,))

    def take(self, indices: _Integers) -> "Texts":
        """Return the names at `indices`, in that order. Their bytes are not copied."""
        return Texts(self.data, self.starts[indices], self.lengths[indices])

    def pieces(self) -> "Iterator[Texts]":
        """Yield all names, some megabytes at a time. Their bytes are not copied."""
        start = 0
        while start < len(self):
            sizes = np.cumsum(self.lengths[start : start + _AT_ONCE], dtype=np.int64)
            stop = start + max(1, int(np.searchsorted(sizes, _BYTES_AT_ONCE)))
            yield Texts(self.data, self.starts[start:stop], self.lengths[start:stop])
            start = stop

    def packed(self, prefix: bytes = b"") -> "Texts":
        """Return the names one after the other, with `prefix` before each, without other bytes but SLACK."""
        lengths = self.lengths.astype(np.int64)
        starts = _starts_of(lengths + len(prefix))
        own = np.arange(int(lengths.sum()))
        before = _starts_of(lengths)
        data = np.zeros(len(own) + len(prefix) * len(self) + SLACK, np.uint8)
        data[np.repeat(starts + len(prefix) - before, lengths) + own] = self.data[
            np.repeat(self.starts - before, lengths) + own
        ]
        data[starts[:, None] + np.arange(len(prefix))] = np.frombuffer(prefix, np.uint8)
        return Texts(data, starts, lengths + len(prefix))

    def equal(self, other: "Texts") -> npt.NDArray[np.bool_]:
        """Return which names equal those of `other` at the same place. Both have the same number of names."""
        lengths = self.lengths.astype(np.int64)
        same = lengths == other.lengths
        for index in np.flatnonzero(same & (lengths > _LONG)).tolist():
            same[index] = self[index] == other[index]
        which, mine, others, offset = (
            np.flatnonzero(same & (lengths <= _LONG) & (lengths > 0)),
            self.words,
            other.words,
            0,
        )
        while len(which):
            left = lengths[which] - offset
            differ = mine[self.starts[which] + offset] ^ others[other.starts[which] + offset]
            differ <<= (8 * np.clip(8 - left, 0, 7)).astype(np.uint64)  # drops the bytes after the end of the name
            same[which[differ != 0]] = False
            which = which[(differ == 0) & (left > 8)]
            offset += 8
        return same


def encoded(names: Iterable[Any]) -> list[bytes]:
    """Return names, bytes or str, as bytes: str in UTF-8.

    Raises:
        ConfigError: one is neither, or has no UTF-8.
    """
    given = names if isinstance(names, list) else list(names)
    if not set(map(type, given)) - {bytes}:
        return given
    try:
        given = [name.encode() if isinstance(name, str) else name for name in given]
    except UnicodeEncodeError as error:
        raise ConfigError(f"vocabulary: name {error.object!r} cannot be saved in UTF-8. Give its bytes.") from None
    for name in given:
        if not isinstance(name, bytes):
            raise ConfigError(f"vocabulary: a name must be str or bytes, got {name!r}, a {type(name).__name__}.")
    return given


def _starts_of(lengths: _Integers) -> _Integers:
    """Return where each name begins, if they follow each other."""
    return np.cumsum(lengths) - lengths
