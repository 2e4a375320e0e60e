"""The names of a vocabulary by their numbers: texts or 64-bit integers, in arrays.

A batch is many names at once: `Texts`, or int64 [n].
"""

import abc
from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.vocabulary.fingerprint import fingerprints, hashes
from tpuembed.vocabulary.text import SLACK, GrowingArray, Texts

__all__ = ["Batch", "DType", "IntegerNames", "NameStore", "TextNames", "names_of"]

_Integers = npt.NDArray[np.int64]
Batch = Any
DType = Literal["string", "int64"]

_MOST_BYTES: Final = 2**32 - 1
"""The longest name."""
_COMPACT_BYTES: Final = 1 << 16


class NameStore(abc.ABC):
    """The names of numbers 0, 1, 2 and so on. Some numbers may have none.

    Attributes:
        oov_name: what Keras' `get_vocabulary` calls a bucket.
    """

    oov_name: Any

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return one more than the highest number."""

    @abc.abstractmethod
    def batch(self, names: Iterable[Any]) -> Batch:
        """Return the names of an iterable. Raises ConfigError for another type."""

    @abc.abstractmethod
    def flat(self, names: Any) -> tuple[tuple[int, ...], Batch]:
        """Return the shape and the names of an array, or of nested lists. Raises ConfigError for another type."""

    @abc.abstractmethod
    def take(self, batch: Batch, indices: _Integers) -> Batch:
        """Return the names at `indices` of a batch."""

    @abc.abstractmethod
    def is_padding(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which names are "" or -1."""

    @abc.abstractmethod
    def keys(self, batch: Batch, salt: bytes) -> _Integers:
        """Return what finds the names in the index: integers themselves, and the fingerprints of texts."""

    @abc.abstractmethod
    def buckets(self, batch: Batch, count: int) -> _Integers:
        """Return the bucket of each name, as Keras chooses it."""

    @abc.abstractmethod
    def item(self, batch: Batch, index: int) -> bytes | int:
        """Return one name of a batch."""

    @abc.abstractmethod
    def get(self, numbers: _Integers | slice) -> Batch:
        """Return the names of `numbers`."""

    @abc.abstractmethod
    def equal(self, batch: Batch, other: Batch) -> npt.NDArray[np.bool_]:
        """Return which names of a batch equal those of another at the same place, if their keys are equal."""

    @abc.abstractmethod
    def put(self, numbers: _Integers, batch: Batch, size: int = 0) -> None:
        """Give names to `numbers` without one. There are `size` numbers then, or as many as these need."""

    @abc.abstractmethod
    def drop(self, numbers: _Integers) -> None:
        """Leave `numbers` without a name."""

    @abc.abstractmethod
    def replace(self, batch: Batch) -> None:
        """Take the names of a batch in the place of all. Its arrays may be kept."""


class TextNames(NameStore):
    """Names of any bytes: 12 bytes a name, and its own.

    The bytes of names that are dropped stay until they are half of all.
    """

    oov_name = "[UNK]"

    def __init__(self) -> None:
        self._data, self._starts = GrowingArray(np.uint8), GrowingArray(np.int64)
        self._lengths = GrowingArray(np.uint32)

    def __len__(self) -> int:
        """Return one more than the highest number."""
        return len(self._starts)

    def batch(self, names: Iterable[Any]) -> Texts:
        """Return the names of an iterable of bytes or str."""
        return Texts.of(names)

    def flat(self, names: Any) -> tuple[tuple[int, ...], Texts]:
        """Return the shape and the names of an array, or of nested lists, of bytes or str."""
        array = names if isinstance(names, np.ndarray) else np.array(names, object)
        return array.shape, Texts.of(array.ravel().tolist())

    def take(self, batch: Texts, indices: _Integers) -> Texts:
        """Return the names at `indices`. Their bytes are not copied."""
        return batch.take(indices)

    def is_padding(self, batch: Texts) -> npt.NDArray[np.bool_]:
        """Return which names are ""."""
        return batch.lengths == 0

    def keys(self, batch: Texts, salt: bytes) -> _Integers:
        """Return the fingerprint of each name."""
        return fingerprints(batch, salt)

    def buckets(self, batch: Texts, count: int) -> _Integers:
        """Return the bucket of each name, its hash modulo `count`."""
        return (hashes(batch) % np.uint64(count)).astype(np.int64)

    def item(self, batch: Texts, index: int) -> bytes:
        """Return one name of a batch, bytes."""
        return batch[index]

    def get(self, numbers: _Integers | slice) -> Texts:
        """Return the names of `numbers`. Their bytes are not copied."""
        return Texts(self._data.padded, self._starts.values[numbers], self._lengths.values[numbers])

    def equal(self, batch: Texts, other: Texts) -> npt.NDArray[np.bool_]:
        """Return which names have the same bytes."""
        return batch.equal(other)

    def put(self, numbers: _Integers, batch: Texts, size: int = 0) -> None:
        """Give names to `numbers`. Their bytes are appended."""
        size = max(size, int(numbers.max(initial=-1)) + 1)
        self._starts.extend(size, 0)
        self._lengths.extend(size, 0)
        done = 0
        for piece in batch.pieces():
            packed, which = piece.packed(), numbers[done : done + len(piece)]
            _check_lengths(packed.lengths)
            self._starts.values[which] = packed.starts + len(self._data)
            self._lengths.values[which] = packed.lengths
            self._data.append(packed.data[: len(packed.data) - SLACK])
            done += len(piece)

    def drop(self, numbers: _Integers) -> None:
        """Leave `numbers` without a name."""
        self._starts.values[numbers], self._lengths.values[numbers] = 0, 0
        if len(self._data) > 2 * int(self._lengths.values.sum(dtype=np.int64)) + _COMPACT_BYTES:
            kept, self._data = self.get(slice(None)), GrowingArray(np.uint8)
            self.put(np.arange(len(self)), kept)

    def replace(self, batch: Texts) -> None:
        """Take the names of a batch in the place of all. Its arrays are kept."""
        _check_lengths(batch.lengths)
        self._data.replace(batch.data, len(batch.data) - SLACK)
        self._starts.replace(batch.starts, len(batch))
        self._lengths.replace(batch.lengths, len(batch))


class IntegerNames(NameStore):
    """Names that are int64."""

    oov_name = -1

    def __init__(self) -> None:
        self._values = GrowingArray(np.int64)

    def __len__(self) -> int:
        """Return one more than the highest number."""
        return len(self._values)

    def batch(self, names: Iterable[Any]) -> _Integers:
        """Return the integers of an iterable."""
        given = list(names)
        for name in given:
            if isinstance(name, bool) or not isinstance(name, int | np.integer) or not -(2**63) <= name < 2**63:
                raise ConfigError(f"vocabulary: a name must be an int64, got {name!r}, a {type(name).__name__}.")
        return np.array(given, np.int64)

    def flat(self, names: Any) -> tuple[tuple[int, ...], _Integers]:
        """Return the shape and the values of an array, or of nested lists, of integers."""
        array = np.asarray(names)
        if array.size and array.dtype.kind not in "iu":
            raise ConfigError(f"vocabulary: names must be integers, got an array of {array.dtype}.")
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise ConfigError(f"vocabulary: names must be int64, got {array.max()}, a uint64.")
        return array.shape, array.astype(np.int64).ravel()

    def take(self, batch: _Integers, indices: _Integers) -> _Integers:
        """Return the integers at `indices`."""
        return batch[indices]

    def is_padding(self, batch: _Integers) -> npt.NDArray[np.bool_]:
        """Return which integers are -1."""
        return batch == -1

    def keys(self, batch: _Integers, salt: bytes) -> _Integers:  # noqa: ARG002 - integers are their own keys
        """Return the integers themselves."""
        return batch

    def buckets(self, batch: _Integers, count: int) -> _Integers:
        """Return the bucket of each integer, itself modulo `count`."""
        return batch % np.int64(count)

    def item(self, batch: _Integers, index: int) -> int:
        """Return one integer of a batch."""
        return int(batch[index])

    def get(self, numbers: _Integers | slice) -> _Integers:
        """Return the integers of `numbers`."""
        return self._values.values[numbers]

    def equal(self, batch: _Integers, other: _Integers) -> npt.NDArray[np.bool_]:
        """Return which integers are equal."""
        return batch == other

    def put(self, numbers: _Integers, batch: _Integers, size: int = 0) -> None:
        """Give integers to `numbers`."""
        self._values.extend(max(size, int(numbers.max(initial=-1)) + 1), 0)
        self._values.values[numbers] = batch

    def drop(self, numbers: _Integers) -> None:
        """Leave `numbers` without an integer, which is 0 then."""
        self._values.values[numbers] = 0

    def replace(self, batch: _Integers) -> None:
        """Take the integers of a batch in the place of all. The array is kept."""
        self._values.replace(batch, len(batch))


def names_of(dtype: DType) -> NameStore:
    """Return no names yet, of this type."""
    return TextNames() if dtype == "string" else IntegerNames()


def _check_lengths(lengths: npt.NDArray[Any]) -> None:
    if lengths.dtype != np.uint32 and len(lengths) and lengths.max() > _MOST_BYTES:
        raise ConfigError(f"vocabulary: a name has {lengths.max()} bytes. {_MOST_BYTES} are the most. Shorten it.")
