"""`Vocabulary`: the names of a table's rows."""

import collections
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, ConfigError, reason
from tpuembed.vocabulary.keras_lookups import read_lookup
from tpuembed.vocabulary.names import DType, Names, array_of, integers_in, names_in, names_of_element
from tpuembed.vocabulary.saved import MOST_NAMES, OPTIONS, VocabularyHeader, check_version, parse, saved_form

__all__ = ["UNKNOWN", "Vocabulary"]

_Integers = npt.NDArray[np.int64]

UNKNOWN: Final = -2
"""The row of a name that is not in a vocabulary. It is outside of every table."""


class Vocabulary:
    """The names of a table's rows, in the order of the rows.

    The first `oov_buckets` rows are for unknown names, and the names have the rows after them, as in Keras' StringLookup and
    IntegerLookup. A million strings of 12 bytes take 56 MB, and twice as much once names are looked up in Python.

    A vocabulary stays as it was made. A layer that is restored has the names of the restored rows: see its `vocabularies`.

    Attributes:
        dtype: "string" for names of any bytes, or "int64".
        oov_buckets: number of rows for unknown names.
        all_names: the names by their numbers, [n]: bytes in an array of dtype object, or int64.
    """

    def __init__(self, names: Iterable[Any] = (), *, dtype: DType = "string", oov_buckets: int = 0) -> None:
        """Give `names` the rows after the buckets.

        Args:
            names: str or bytes, or integers, all different. str is kept as UTF-8.
            dtype: of the names.
            oov_buckets: number of rows for unknown names.

        Raises:
            ConfigError: a name is listed twice or has another type, or an option is wrong.
        """
        if dtype not in ("string", "int64"):
            raise ConfigError(f'vocabulary: dtype must be "string" or "int64", got {dtype!r}.')
        _check_count("oov_buckets", oov_buckets, 0, MOST_NAMES)
        self.dtype: DType = dtype
        self.oov_buckets = int(oov_buckets)
        try:
            is_list = not isinstance(names, str | bytes) and iter(names) is not None
        except TypeError:
            is_list = False
        if not is_list:
            raise ConfigError(
                f"vocabulary: names must be a list of names, got {names!r}. Vocabulary.from_file reads the names of a file."
            )
        self._with(array_of(names if isinstance(names, np.ndarray) else list(names), dtype))

    @classmethod
    def from_file(cls, path: str | Path, *, dtype: DType = "string", oov_buckets: int = 0) -> "Vocabulary":
        """Return the vocabulary of a text file with one name a line, or, for int64, of a .npy file.

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
        counts = collections.Counter[Any]()
        for names in data:
            counts.update(array_of(names_of_element(names), dtype).ravel().tolist())
        return found._with(array_of([name for name, count in counts.most_common() if count >= min_count], dtype))

    @classmethod
    def from_keras(cls, source: Any, layer: str = "", *, oov_buckets: int | None = None) -> "Vocabulary":
        """Return the vocabulary of a Keras StringLookup or IntegerLookup. The rows are the numbers that the layer gives.

        A table that was trained with the layer's numbers keeps its rows.

        Args:
            source: the layer, the path or URL of a `.keras` file, or the path of a SavedModel.
            layer: the name of the layer in the file; in a SavedModel, which has no such names, the place of its hash table, as
                the error lists them. It may be left out if there is one lookup layer.
            oov_buckets: the layer's `num_oov_indices`. A SavedModel needs it, because it does not say. It does not say either
                whether the layer has a `mask_token`, which takes row 0, or a `salt` or another `oov_method`, by which unknown
                names have other rows. If it may have one, pass the layer itself, which is compared.

        Raises:
            ConfigError: the layer gives other numbers than a Vocabulary can, has no vocabulary, or is not there; or a SavedModel's
                oov_buckets is missing or wrong.
            CheckpointNotFoundError: there is no such file.
            CheckpointCorruptError: the file is damaged.
            MissingExtraError: a SavedModel needs TensorFlow, which is not installed.
        """
        if oov_buckets is not None:
            _check_count("oov_buckets", oov_buckets, 0, MOST_NAMES)
        found = read_lookup(source, layer, oov_buckets)
        try:
            names = list(map(int, found.names)) if found.is_file and found.dtype == "int64" else found.names
            return cls(names, dtype=found.dtype, oov_buckets=found.oov_buckets)
        except (ConfigError, ValueError) as error:
            if not found.is_file:
                raise
            raise CheckpointCorruptError(
                f"{found.where}: its vocabulary cannot be read: {reason(error)} Restore it from another copy."
            ) from None

    def _with(self, names: Names) -> "Vocabulary":
        """Return it, with `names` as its own. Only its maker may call this."""
        if names.ndim != 1:
            raise ConfigError(f"vocabulary: names must be a list of names, got an array {list(names.shape)}.")
        if len(names) > MOST_NAMES:
            raise ConfigError(f"vocabulary: {len(names)} names are more than {MOST_NAMES}. Use several tables.")
        # Equal names have equal hashes, which need a fourth of the memory that a set of names takes.
        hashes = np.fromiter(map(hash, names.tolist()), np.int64, len(names)) if names.dtype == object else names
        if len(np.unique(hashes)) < len(names):
            seen: dict[Any, int] = {}
            for place, name in enumerate(names.tolist()):
                if seen.setdefault(name, place) != place:
                    raise ConfigError(f"vocabulary: name {name!r} is at {seen[name]} and at {place}. Remove one.")
        self.all_names = names
        return self

    # Both are made when names are looked up, because they take as much memory as the names.

    @functools.cached_property
    def _numbers(self) -> Mapping[bytes, int]:
        return {name: number for number, name in enumerate(self.all_names.tolist())}

    @functools.cached_property
    def _order(self) -> _Integers:
        return np.argsort(self.all_names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.all_names)

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets included: the least size of a table."""
        return self.oov_buckets + len(self)

    def lookup(self, names: Any) -> _Integers:
        """Return the row of each name: an int64 array of the shape of `names`, which may be an array or nested lists.

        An unknown name is UNKNOWN, also if there are buckets: the graph of a layer chooses its bucket, see
        `TPUEmbedding.names_to_rows`.

        Raises:
            ConfigError: a name has another type.
        """
        asked = array_of(names, self.dtype)
        return self._rows_of(asked.ravel()).reshape(asked.shape)

    def _rows_of(self, names: Names) -> _Integers:
        if not len(self):
            return np.full(len(names), UNKNOWN)
        if names.dtype == object:
            found = np.fromiter((self._numbers.get(name, -1) for name in names.tolist()), np.int64, len(names))
        else:
            places = np.searchsorted(self.all_names, names, sorter=self._order)
            near = self._order[np.minimum(places, len(self) - 1)]
            found = np.where(self.all_names[near] == names, near, -1)
        return np.where(found < 0, UNKNOWN, found + self.oov_buckets)

    # ---- beside another vocabulary

    def rows_in(self, other: "Vocabulary") -> _Integers:
        """Return the row that `other` gives the name of each row, int64 [rows]; UNKNOWN for a name that it lacks.

        Buckets have the same row if both have the same number of them. Otherwise they are UNKNOWN.

        Raises:
            ConfigError: the names have another dtype.
        """
        if other.dtype != self.dtype:
            raise ConfigError(f"vocabulary: names of {self.dtype} are not in a vocabulary of {other.dtype}.")
        rows = np.full(self.rows, UNKNOWN, np.int64)
        if other.oov_buckets == self.oov_buckets:
            rows[: self.oov_buckets] = np.arange(self.oov_buckets)
        rows[self.oov_buckets :] = other._rows_of(self.all_names)
        return rows

    def moved_in(self, other: "Vocabulary") -> _Integers:
        """Return the rows, int64 [n], whose name has another row in `other`, or none. See `rows_in`."""
        rows = self.rows_in(other)
        return np.flatnonzero(rows != np.arange(len(rows)))

    def same_names(self, other: "Vocabulary") -> bool:
        """Return True if both have the same names at the same rows."""
        return not self.unlike(other) and np.array_equal(self.all_names, other.all_names)

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
        wanted = np.asarray(rows, np.int64).ravel()
        outside = (wanted < 0) | (wanted >= self.rows)
        if outside.any():
            raise ConfigError(f"vocabulary: row {wanted[outside][0]} is outside of its {self.rows} rows.")
        known, numbers = self.all_names, (wanted - self.oov_buckets).tolist()
        return [known.item(number) if number >= 0 else None for number in numbers]

    def get_vocabulary(self) -> list[Any]:
        """Return the names of all rows as Keras does: str or int, buckets included.

        Raises:
            ConfigError: a name is not UTF-8, so that it is no str.
        """
        unknown: Any = "[UNK]" if self.dtype == "string" else -1
        try:
            names = [name.decode() if isinstance(name, bytes) else name for name in self.all_names.tolist()]
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"vocabulary: name {error.object!r} is not UTF-8, so it is no str. Use names(range(vocabulary.rows))."
            ) from None
        return [unknown] * self.oov_buckets + names

    def has(self, name: Any) -> bool:
        """Return True if `name` is one of the names."""
        return bool((self.all_names == array_of([name], self.dtype)).any())  # numpy cuts NULs from a name alone

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
        return saved_form(self.options(), self.all_names)

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "Vocabulary":
        """Return the vocabulary that `to_bytes` wrote, with its options. `where` begins the messages of errors.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
            CheckpointFormatError: it was written by a later release.
        """
        check_version(content, where)
        try:
            header, names = parse(content)
            dtype: Any = header.dtype
            return cls(dtype=dtype, oov_buckets=header.oov_buckets)._with(names)
        except (ValueError, TypeError) as error:
            why = str(error).removeprefix("vocabulary: ").partition(". ")[0].removesuffix(".")
            raise CheckpointCorruptError(f"{where}: cannot be read: {why}. Restore it from a copy.") from None


def _check_count(what: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"vocabulary: {what} must be an integer of {least} or more, got {value!r}.")
    if most is not None and value > most:
        raise ConfigError(f"vocabulary: {what} must be at most {most}, got {value}.")
