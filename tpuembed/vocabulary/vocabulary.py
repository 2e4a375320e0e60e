"""`Vocabulary`: the names of a table's rows."""

import collections
import copy
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, ConfigError, reason
from tpuembed.vocabulary.files import integers_in, names_in, names_of_element
from tpuembed.vocabulary.index import NONE
from tpuembed.vocabulary.name_arrays import Batch, DType, name_type
from tpuembed.vocabulary.numbered_names import NumberedNames
from tpuembed.vocabulary.saved import MOST_NAMES, OPTIONS, VocabularyHeader, check_version, chunks, parse

__all__ = ["UNKNOWN", "Vocabulary"]

_Integers = npt.NDArray[np.int64]

UNKNOWN: Final = -2
"""The row of a name that is not in a vocabulary without buckets. It is outside of every table."""
_NAMES_AT_ONCE: Final = 1 << 18


class Follower(Protocol):
    """What has to follow when the names of a vocabulary are replaced, such as a layer's table."""

    def names_replaced(self, before: "Vocabulary") -> None:
        """Follow the restore of a different follower, which replaced the names. They were `before`."""


class Vocabulary:
    """The names of a table's rows, in the order of the rows.

    The first `oov_buckets` rows are for unknown names, and the names have the rows after them, as in Keras' StringLookup and
    IntegerLookup. Names are kept in arrays: a million names of 12 bytes take 40 MB.

    A vocabulary stays as it was made, but a layer that is restored gives it the names of the restored rows. Its methods may be
    called from several threads.

    Attributes:
        dtype: "string" for names of any bytes, or "int64".
        oov_buckets: number of rows for unknown names.
    """

    def __init__(self, names: Iterable[Any] = (), *, dtype: DType = "string", oov_buckets: int = 0) -> None:
        """Give `names` the rows after the buckets.

        Args:
            names: str or bytes, or integers, all different. str is kept as UTF-8.
            dtype: of the names.
            oov_buckets: number of rows for unknown names. Without buckets they are UNKNOWN.

        Raises:
            ConfigError: a name is listed twice or has another type, or an option is wrong.
        """
        if dtype not in ("string", "int64"):
            raise ConfigError(f'vocabulary: dtype must be "string" or "int64", got {dtype!r}.')
        _check_count("oov_buckets", oov_buckets, 0, MOST_NAMES)
        self.dtype: DType = dtype
        self.oov_buckets = int(oov_buckets)
        self._lock = threading.Lock()
        self._followers: list[weakref.ref[Follower]] = []
        try:
            is_list = not isinstance(names, str | bytes) and iter(names) is not None
        except TypeError:
            is_list = False
        if not is_list:
            raise ConfigError(
                f"vocabulary: names must be a list of names, got {names!r}. Vocabulary.from_file reads the names of a file."
            )
        # Never changed in place, so that a method of another thread sees the names of one moment.
        self._names = NumberedNames(name_type(dtype), name_type(dtype).batch(names))

    @classmethod
    def from_file(cls, path: str | Path, *, dtype: DType = "string", oov_buckets: int = 0) -> "Vocabulary":
        """Return the vocabulary of a text file with one name a line, or, for int64, of a .npy file.

        Names are read as arrays, without a Python object for each. At its peak this takes twice the memory of the vocabulary.

        Raises:
            ConfigError: the file cannot be read, or has a name twice.
        """
        found = cls(dtype=dtype, oov_buckets=oov_buckets)
        try:
            names = integers_in(Path(path)) if dtype == "int64" else names_in(Path(path))
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"vocabulary {path}: cannot be read: {reason(error)}.") from None
        return found._with(names)

    @classmethod
    def adapt(
        cls, data: Iterable[Any], *, dtype: DType = "string", oov_buckets: int = 0, min_count: int = 1
    ) -> "Vocabulary":
        """Return the vocabulary of the names in `data`, the most frequent first. Names of one frequency keep their order.

        Args:
            data: arrays of names, such as a batched `tf.data.Dataset`, also of ragged and sparse tensors. They are read once, one
                after the other.
            dtype, oov_buckets: see the constructor.
            min_count: leave out names that occur less often.

        Raises:
            ConfigError: a name has another type, an element of `data` is no array, or an option is wrong.
        """
        found = cls(dtype=dtype, oov_buckets=oov_buckets)
        _check_count("min_count", min_count, 1)
        counts, of_type = collections.Counter[Any](), name_type(dtype)
        for names in data:
            counts.update(of_type.items(names_of_element(names)))
        return found._with(of_type.batch([name for name, count in counts.most_common() if count >= min_count]))

    def _with(self, batch: Batch) -> "Vocabulary":
        """Return it, with the names of `batch` in the place of its own. Only its maker may call this."""
        self._names = NumberedNames(self._names.type, batch)
        return self

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets included: the least size of a table."""
        return self.oov_buckets + len(self._names)

    def lookup(self, names: Any) -> _Integers:
        """Return the row of each name: an int64 array of the shape of `names`, which may be an array or nested lists.

        The result is exact: hashes only find a name, and all of its bytes are compared. An unknown name has the row of its
        bucket, or UNKNOWN if there are no buckets.

        Raises:
            ConfigError: a name has another type.
        """
        known = self._names
        shape, batch = known.type.flat(names)
        numbers = known.find(batch)
        unknown = np.flatnonzero(numbers == NONE)
        rows = numbers + self.oov_buckets
        rows[unknown] = UNKNOWN
        if self.oov_buckets and len(unknown):
            rows[unknown] = known.type.buckets(known.type.take(batch, unknown), self.oov_buckets)
        return rows.reshape(shape)

    # ---- beside another vocabulary

    def rows_in(self, other: "Vocabulary") -> _Integers:
        """Return the row that `other` gives the name of each row, int64 [rows]; UNKNOWN for a name that it lacks.

        Buckets have the same row if both have the same number of them. Otherwise they are UNKNOWN.

        Raises:
            ConfigError: the names have another dtype.
        """
        if other.dtype != self.dtype:
            raise ConfigError(f"vocabulary: names of {self.dtype} are not in a vocabulary of {other.dtype}.")
        own, others = self._names, other._names
        rows = np.full(self.oov_buckets + len(own), UNKNOWN, np.int64)
        if other.oov_buckets == self.oov_buckets:
            rows[: self.oov_buckets] = np.arange(self.oov_buckets)
        for start in range(0, len(own), _NAMES_AT_ONCE):
            found = others.find(own.type.take(own.names, np.arange(start, min(start + _NAMES_AT_ONCE, len(own)))))
            piece = rows[self.oov_buckets + start :][: len(found)]
            piece[...] = np.where(found == NONE, UNKNOWN, found + other.oov_buckets)
        return rows

    def moved_in(self, other: "Vocabulary") -> _Integers:
        """Return the rows, int64 [n], whose name has another row in `other`, or none. See `rows_in`."""
        rows = self.rows_in(other)
        return np.flatnonzero(rows != np.arange(len(rows)))

    def same_names(self, other: "Vocabulary") -> bool:
        """Return True if both have the same names at the same rows."""
        own, others = self._names, other._names
        if own is others:
            return not self.unlike(other)
        if self.unlike(other) or len(own) != len(others):
            return False
        for start in range(0, len(own), _NAMES_AT_ONCE):
            numbers = np.arange(start, min(start + _NAMES_AT_ONCE, len(own)))
            if not own.type.equal(own.type.take(own.names, numbers), own.type.take(others.names, numbers)).all():
                return False
        return True

    def unlike(self, other: "Vocabulary | VocabularyHeader") -> tuple[str, str, str] | None:
        """Return the first option in which `other` has another value, and both values for messages, or None."""
        for option in OPTIONS:
            own, its = getattr(self, option), getattr(other, option)
            if own != its:
                return option, repr(own), repr(its)
        return None

    # ---- names of rows

    def names(self, rows: Any) -> list[Any]:
        """Return the names of rows: bytes or int. The name of a bucket is None.

        Raises:
            ConfigError: there is no such row.
        """
        wanted, known = np.asarray(rows, np.int64).ravel(), self._names
        count = self.oov_buckets + len(known)
        outside = (wanted < 0) | (wanted >= count)
        if outside.any():
            raise ConfigError(f"vocabulary: row {wanted[outside][0]} is outside of its {count} rows.")
        numbers = (wanted - self.oov_buckets).tolist()
        return [known.type.item(known.names, number) if number >= 0 else None for number in numbers]

    def get_vocabulary(self) -> list[Any]:
        """Return the names of all rows as Keras does: str or int, buckets included.

        Raises:
            ConfigError: a name is not UTF-8, so that it is no str.
        """
        known = self._names
        names = [_text(known.type.item(known.names, number)) for number in range(len(known))]
        return [known.type.oov_name] * self.oov_buckets + names

    def has(self, name: Any) -> bool:
        """Return True if `name` is one of the names."""
        return bool(self.lookup([name])[0] >= self.oov_buckets)

    # ---- for graphs

    def snapshot(self) -> tuple[int, _Integers, npt.NDArray[np.int32]]:
        """Return what finds names in a graph. The arrays are no copies.

        Returns:
            The number of the salt (see `salt_text`), which is chosen so that no two names have one fingerprint; the keys of the
            index, int64 [buckets, WAYS]; and at the same places the numbers of their names, int32, -1 if there is none. The row
            of a name is `oov_buckets` more than its number.
        """
        known = self._names
        return known.salt, known.index.keys, known.index.rows

    def check_padding(self, where: str) -> None:
        """Raise ConfigError if a name is the padding of lists: "" or -1. `where` begins the message."""
        padding: Any = b"" if self.dtype == "string" else -1
        if self.has(padding):
            shown = '""' if self.dtype == "string" else -1
            raise ConfigError(
                f"{where}: its vocabulary has the name {shown}, which is padding in lists. Leave it out, or give the feature one "
                "name per row."
            )

    def options(self) -> dict[str, Any]:
        """Return all but the names, as JSON values: what configs say of a vocabulary."""
        return {option: getattr(self, option) for option in OPTIONS}

    @classmethod
    def from_options(cls, options: Mapping[str, Any], where: str) -> "Vocabulary":
        """Return the vocabulary of `options()`: without names, or with those of the file that `file` names.

        Args:
            options: dtype, oov_buckets and file.
            where: begins the messages of errors.

        Raises:
            ConfigError: an option is unknown or wrong, or the file cannot be read.
        """
        unknown = set(options) - {*OPTIONS, "file"}
        if unknown:
            raise ConfigError(f"{where}: vocabulary has no option {min(map(str, unknown))!r}. Remove it.")
        fields = {key: value for key, value in options.items() if key != "file"}
        if not isinstance(options.get("file", ""), str | Path):
            raise ConfigError(f"{where}: the file of its vocabulary must be a path, got {options['file']!r}.")
        return cls(**fields) if "file" not in options else cls.from_file(options["file"], **fields)

    # ---- saving

    def to_bytes(self) -> bytes:
        """Return the vocabulary as `from_bytes` reads it, with a checksum."""
        found: list[bytes] = []
        self._save(found.append)
        return b"".join(found)

    def digest(self) -> str:
        """Return a SHA-256 of what `to_bytes` returns, in hexadecimal digits."""
        found = hashlib.sha256()
        self._save(found.update)
        return found.hexdigest()

    def _save(self, take: Callable[[bytes], object]) -> None:
        for chunk in chunks(self.options(), self._names.names):
            take(chunk)

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "Vocabulary":
        """Return the vocabulary that `to_bytes` wrote, with its options. `where` begins the messages of errors.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
            CheckpointFormatError: it was written by a later release.
        """
        check_version(content, where)
        try:
            options, names = parse(content)
            return cls.from_options(options, "vocabulary")._with(names)
        except (ValueError, TypeError) as error:
            why = str(error).removeprefix("vocabulary: ").partition(". ")[0].removesuffix(".")
            raise CheckpointCorruptError(f"{where}: cannot be read: {why}. Restore it from a copy.") from None

    # ---- replaced by a restore

    def watch(self, follower: Follower) -> None:
        """Call `follower` after the names were replaced. The vocabulary does not keep it in memory."""
        with self._lock:
            self._followers = [*(each for each in self._followers if each() is not None), weakref.ref(follower)]

    def assign(self, other: "Vocabulary", by: Follower) -> None:
        """Take the names of `other`, which has the same options, because the rows of `by` are restored with them.

        All other followers, whose rows are those of before, are told that.
        """
        with self._lock:
            before, self._names = copy.copy(self), other._names
            for follower in [each() for each in self._followers]:
                if follower is not None and follower is not by:
                    follower.names_replaced(before)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has too. It has no followers, and its names are replaced apart from these."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_followers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _followers=[])


def _check_count(what: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"vocabulary: {what} must be an integer of {least} or more, got {value!r}.")
    if most is not None and value > most:
        raise ConfigError(f"vocabulary: {what} must be at most {most}, got {value}.")


def _text(name: Any) -> Any:
    if not isinstance(name, bytes):
        return name
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"vocabulary: name {name!r} is not UTF-8, so it is no str. Use names(range(vocabulary.rows))."
        ) from None
