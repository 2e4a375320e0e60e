"""The two types of names: texts and 64-bit integers, in arrays.

A batch is many names at once: `Texts`, or int64 [n].
"""

import abc
from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.vocabulary.fingerprint import fingerprints, hashes
from tpuembed.vocabulary.text import Texts, encoded

__all__ = ["Batch", "DType", "NameType", "name_type"]

_Integers = npt.NDArray[np.int64]
Batch = Any
DType = Literal["string", "int64"]

_MOST_BYTES: Final = 2**32 - 1
"""The longest name."""


class NameType(abc.ABC):
    """What depends on the type of names.

    Attributes:
        oov_name: what Keras' `get_vocabulary` calls a bucket.
    """

    oov_name: Any

    @abc.abstractmethod
    def batch(self, names: Iterable[Any]) -> Batch:
        """Return the names of an iterable. Raises ConfigError for another type."""

    @abc.abstractmethod
    def flat(self, names: Any) -> tuple[tuple[int, ...], Batch]:
        """Return the shape and the names of an array, or of nested lists. Raises ConfigError for another type."""

    @abc.abstractmethod
    def items(self, names: Any) -> list[Any]:
        """Return the names of an array, or of nested lists, as bytes or int. Raises ConfigError for another type."""

    @abc.abstractmethod
    def kept(self, batch: Batch) -> Batch:
        """Return a batch in the form that a vocabulary keeps. Raises ConfigError if a name is too long."""

    @abc.abstractmethod
    def take(self, batch: Batch, indices: _Integers) -> Batch:
        """Return the names at `indices` of a batch."""

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
    def equal(self, batch: Batch, other: Batch) -> npt.NDArray[np.bool_]:
        """Return which names of a batch equal those of another at the same place, if their keys are equal."""


class _TextNames(NameType):
    """Names of any bytes: 12 bytes a name, and its own."""

    oov_name = "[UNK]"

    def batch(self, names: Iterable[Any]) -> Texts:
        return Texts.of(names)

    def flat(self, names: Any) -> tuple[tuple[int, ...], Texts]:
        array = names if isinstance(names, np.ndarray) else np.array(names, object)
        return array.shape, Texts.of(array.ravel().tolist())

    def items(self, names: Any) -> list[bytes]:
        return encoded(np.asarray(names, object).ravel().tolist())

    def kept(self, batch: Texts) -> Texts:
        if len(batch) and batch.lengths.max() > _MOST_BYTES:
            raise ConfigError(
                f"vocabulary: a name has {batch.lengths.max()} bytes. {_MOST_BYTES} are the most. Shorten it."
            )
        return Texts(batch.data, batch.starts, batch.lengths.astype(np.uint32, copy=False))

    def take(self, batch: Texts, indices: _Integers) -> Texts:
        return batch.take(indices)

    def keys(self, batch: Texts, salt: bytes) -> _Integers:
        return fingerprints(batch, salt)

    def buckets(self, batch: Texts, count: int) -> _Integers:
        return (hashes(batch) % np.uint64(count)).astype(np.int64)

    def item(self, batch: Texts, index: int) -> bytes:
        return batch[index]

    def equal(self, batch: Texts, other: Texts) -> npt.NDArray[np.bool_]:
        return batch.equal(other)


class _IntegerNames(NameType):
    """Names that are int64."""

    oov_name = -1

    def batch(self, names: Iterable[Any]) -> _Integers:
        given = list(names)
        for name in given:
            if isinstance(name, bool) or not isinstance(name, int | np.integer) or not -(2**63) <= name < 2**63:
                raise ConfigError(f"vocabulary: a name must be an int64, got {name!r}, a {type(name).__name__}.")
        return np.array(given, np.int64)

    def flat(self, names: Any) -> tuple[tuple[int, ...], _Integers]:
        array = np.asarray(names)
        if array.size and array.dtype.kind not in "iu":
            raise ConfigError(f"vocabulary: names must be integers, got an array of {array.dtype}.")
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise ConfigError(f"vocabulary: names must be int64, got {array.max()}, a uint64.")
        return array.shape, array.astype(np.int64).ravel()

    def items(self, names: Any) -> list[int]:
        found: list[int] = self.flat(names)[1].tolist()
        return found

    def kept(self, batch: _Integers) -> _Integers:
        return batch

    def take(self, batch: _Integers, indices: _Integers) -> _Integers:
        return batch[indices]

    def keys(self, batch: _Integers, salt: bytes) -> _Integers:  # noqa: ARG002 - integers are their own keys
        return batch

    def buckets(self, batch: _Integers, count: int) -> _Integers:
        return batch % np.int64(count)

    def item(self, batch: _Integers, index: int) -> int:
        return int(batch[index])

    def equal(self, batch: _Integers, other: _Integers) -> npt.NDArray[np.bool_]:
        return batch == other


def name_type(dtype: DType) -> NameType:
    """Return the type of names that `dtype` says."""
    return _TextNames() if dtype == "string" else _IntegerNames()
