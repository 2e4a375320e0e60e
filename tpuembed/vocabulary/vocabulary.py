"""`Vocabulary`: the names of a table's rows."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, ConfigError, reason
from tpuembed.vocabulary.fingerprint import fingerprints, hashes
from tpuembed.vocabulary.index import NONE, Index
from tpuembed.vocabulary.text import GrowingArray, Texts

__all__ = ["PADDING", "UNKNOWN", "Vocabulary"]

_Integers = npt.NDArray[np.int64]
DType = Literal["string", "int64"]

PADDING: Final = -1
"""The row of padding in a list."""
UNKNOWN: Final = -2
"""The row of a name that is not in a vocabulary without buckets. It is outside of every table."""
_UNKNOWN_NAME: Final = "[UNK]"
"""What Keras' StringLookup calls a bucket. Its IntegerLookup calls it -1."""
_MAGIC: Final = b"tpuembed vocabulary 1\n"
_PIECE_BYTES: Final = 64 << 20
_MOST_NAMES: Final = 2**31 - 1


class Vocabulary:
    """The names of a table's rows, in the order of the rows.

    The first `oov_buckets` rows are for unknown names, and the names have the rows after them, as in Keras' StringLookup and
    IntegerLookup. A name keeps its row for ever, and new names get the next rows. Names are kept in arrays: a million names of
    12 bytes take 40 MB.

    Attributes:
        dtype: "string" for names of any bytes, or "int64".
        oov_buckets: number of rows for unknown names.
        grows: True if training gives new names a row.
    """

    def __init__(
        self, names: Iterable[Any] = (), *, dtype: DType = "string", oov_buckets: int = 0, grows: bool = False
    ) -> None:
        """Give `names` the rows after the buckets.

        Args:
            names: str or bytes, or integers, all different. str is kept as UTF-8.
            dtype: of the names.
            oov_buckets: number of rows for unknown names. Without buckets they are UNKNOWN.
            grows: give new names the next rows of the table, while it has room, in calls of a layer with `training=True`.

        Raises:
            ConfigError: a name is listed twice or has another type, or an option is wrong.
        """
        if dtype not in ("string", "int64"):
            raise ConfigError(f'vocabulary: dtype must be "string" or "int64", got {dtype!r}.')
        _check_count("oov_buckets", oov_buckets, 0)
        if not isinstance(grows, bool):
            raise ConfigError(f"vocabulary: grows must be True or False, got {grows!r}.")
        self.dtype: DType = dtype
        self.oov_buckets = int(oov_buckets)
        self.grows = grows
        self._values = GrowingArray(np.uint8 if dtype == "string" else np.int64)
        self._starts = GrowingArray(np.int64)
        self._starts.append(np.zeros(1, np.int64))
        self._index = Index()
        self._salt = 0
        given = self._encoded(names)
        self._refuse_repeated(given)
        self._append(given)

    @classmethod
    def from_file(
        cls, path: str | Path, *, dtype: DType = "string", oov_buckets: int = 0, grows: bool = False
    ) -> "Vocabulary":
        """Return the vocabulary of a text file with one name a line, or, for int64, of a .npy file.

        No Python object is made for a name.

        Raises:
            ConfigError: the file cannot be read, or has a name twice.
        """
        found = cls(dtype=dtype, oov_buckets=oov_buckets, grows=grows)
        try:
            names = _integers_in(Path(path)) if dtype == "int64" else _lines_of(Path(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"vocabulary {path}: cannot be read: {reason(error)}.") from None
        found._refuse_repeated(names)
        found._append(names)
        return found

    @classmethod
    def adapt(
        cls,
        data: Iterable[Any],
        *,
        dtype: DType = "string",
        oov_buckets: int = 0,
        grows: bool = False,
        min_count: int = 1,
    ) -> "Vocabulary":
        """Return the vocabulary of the names in `data`, the most frequent first. Names of one frequency keep their order.

        Args:
            data: arrays of names, such as a batched `tf.data.Dataset`. They are read once, one after the other.
            dtype, oov_buckets, grows: see the constructor.
            min_count: leave out names that occur less often.
        """
        _check_count("min_count", min_count, 1)
        seen, counts = cls(dtype=dtype), np.zeros(0, np.int64)
        for names in data.as_numpy_iterator() if hasattr(data, "as_numpy_iterator") else data:
            rows = seen.add(names).ravel()
            more = np.zeros(len(seen), np.int64)
            more[: len(counts)] = counts
            counts = more + np.bincount(rows, minlength=len(seen))
        chosen = np.argsort(-counts, kind="stable")
        chosen = chosen[counts[chosen] >= min_count]
        found = cls(dtype=dtype, oov_buckets=oov_buckets, grows=grows)
        found._append(_taken(seen._names, chosen))
        return found

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._index)

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets included: the least size of a table."""
        return self.oov_buckets + len(self)

    def lookup(self, names: Any, *, padded: bool = False) -> _Integers:
        """Return the row of each name: an int64 array of the shape of `names`.

        The result is exact: hashes only find a name, and all of its bytes are compared.

        Args:
            names: an array, or nested lists, of names.
            padded: "" and the integer -1 are padding. Their row is PADDING.

        Returns:
            Rows. An unknown name has the row of its bucket, or UNKNOWN if there are no buckets.

        Raises:
            ConfigError: a name has another type.
        """
        shape, given = self._flat(names)
        found = self._find(given)
        unknown = np.flatnonzero(found == NONE)
        found += self.oov_buckets
        found[unknown] = self._buckets_of(_taken(given, unknown)) if self.oov_buckets else UNKNOWN
        if padded:
            found[given.lengths == 0 if isinstance(given, Texts) else given == -1] = PADDING
        return found.reshape(shape)

    def add(self, names: Any) -> _Integers:
        """Return the row of each name, as `lookup` does. Unknown names get the next rows, in the order of their first place."""
        shape, given = self._flat(names)
        found = self._find(given)
        unknown = np.flatnonzero(found == NONE)
        if len(unknown):
            missing = _taken(given, unknown)
            numbers, first = _numbered(missing)
            found[unknown] = len(self) + numbers
            self._append(_taken(missing, first))
        return (found + self.oov_buckets).reshape(shape)

    def names(self, rows: Any) -> list[Any]:
        """Return the names of rows: bytes or int. The name of a bucket is None.

        Raises:
            ConfigError: a row has no name.
        """
        wanted = np.asarray(rows, np.int64).ravel()
        outside = (wanted < 0) | (wanted >= self.rows)
        if outside.any():
            raise ConfigError(f"vocabulary: row {wanted[outside][0]} is outside of its {self.rows} rows.")
        return [None if row < self.oov_buckets else self._name(row - self.oov_buckets) for row in wanted.tolist()]

    def get_vocabulary(self) -> list[Any]:
        """Return the names of all rows as Keras does: str or int, buckets included.

        Raises:
            ConfigError: a name is not UTF-8, so that it is no str.
        """
        bucket = _UNKNOWN_NAME if self.dtype == "string" else -1
        return [bucket] * self.oov_buckets + [self._text(index) for index in range(len(self))]

    def has(self, name: Any) -> bool:
        """Return True if `name` is one of the names."""
        return bool(self._find(self._encoded([name]))[0] != NONE)

    def same_names(self, other: "Vocabulary") -> bool:
        """Return True if both have the same names in the same order."""
        mine, others = self._names, other._names
        if len(mine) != len(others):
            return False
        if isinstance(mine, Texts) or isinstance(others, Texts):
            return isinstance(mine, Texts) and isinstance(others, Texts) and bool(mine.equal(others).all())
        return bool((mine == others).all())

    # ---- for graphs

    @property
    def salt(self) -> bytes:
        """Return what is put before each name when it is hashed. It is chosen so that no two names have one fingerprint."""
        return str(self._salt).encode() + b"\0" if self._salt else b""

    @property
    def keys(self) -> _Integers:
        """Return the keys of the index, int64 [buckets, WAYS]. The result is no copy."""
        return self._index.keys

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """Return the number of the name at each place of `keys`, int32 [buckets, WAYS]; -1 if there is none. It is no copy.

        The row of a name is `oov_buckets` more than its number.
        """
        return self._index.rows

    def options(self) -> dict[str, Any]:
        """Return all but the names, as JSON values: what configs say of a vocabulary."""
        return {"dtype": self.dtype, "oov_buckets": self.oov_buckets, **({"grows": True} if self.grows else {})}

    @classmethod
    def from_options(cls, options: Mapping[str, Any], where: str) -> "Vocabulary":
        """Return the vocabulary of `options()`: without names, or with those of the file that `file` names.

        Args:
            options: dtype, oov_buckets, grows and file.
            where: begins the messages of errors.

        Raises:
            ConfigError: an option is unknown or wrong, or the file cannot be read.
        """
        unknown = set(options) - {"dtype", "oov_buckets", "grows", "file"}
        if unknown:
            raise ConfigError(f"{where}: vocabulary has no option {min(map(str, unknown))!r}. Remove it.")
        fields = {key: value for key, value in options.items() if key != "file"}
        return cls(**fields) if "file" not in options else cls.from_file(options["file"], **fields)

    # ---- saving

    def to_bytes(self) -> bytes:
        """Return the vocabulary as `from_bytes` reads it, with a checksum."""
        names = self._names
        parts = [names.lengths.astype("<u4"), names.data] if isinstance(names, Texts) else [names.astype("<i8")]
        fields = {"dtype": self.dtype, "oov_buckets": self.oov_buckets, "names": len(self)}
        header = json.dumps(fields).encode()
        content = b"".join([_MAGIC, struct.pack("<I", len(header)), header, *(part.tobytes() for part in parts)])
        return content + struct.pack("<I", google_crc32c.value(content))

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "Vocabulary":
        """Return the vocabulary that `to_bytes` wrote. `where` begins the messages of errors.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
        """
        try:
            if not content.startswith(_MAGIC) or len(content) < len(_MAGIC) + 8:
                raise ValueError("it is no vocabulary")
            (checksum,) = struct.unpack("<I", content[-4:])
            if google_crc32c.value(content[:-4]) != checksum:
                raise ValueError("its checksum is wrong")
            start = len(_MAGIC) + 4
            (size,) = struct.unpack("<I", content[start - 4 : start])
            fields = json.loads(content[start : start + size])
            body, count = memoryview(content)[start + size : -4], fields["names"]
            found = cls(dtype=fields["dtype"], oov_buckets=fields["oov_buckets"])
            if found.dtype == "string":
                lengths = np.frombuffer(body[: 4 * count], "<u4").astype(np.int64)
                starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
                data = np.frombuffer(body[4 * count :], np.uint8)
                if len(data) != starts[-1]:
                    raise ValueError(f"its names have {len(data)} bytes, and their lengths add up to {starts[-1]}")
                found._append(Texts(data, starts))
            else:
                found._append(np.frombuffer(body, "<i8", count).astype(np.int64))
        except (ValueError, KeyError, TypeError, struct.error, ConfigError) as error:
            raise CheckpointCorruptError(f"{where}: cannot be read: {reason(error)}. Restore it from a copy.") from None
        return found

    # ---- names as arrays

    @property
    def _names(self) -> Texts | _Integers:
        return Texts(self._values.values, self._starts.values) if self.dtype == "string" else self._values.values

    def _encoded(self, names: Iterable[Any]) -> Texts | _Integers:
        if self.dtype == "string":
            return Texts.of(names)
        given = list(names)
        for name in given:
            if isinstance(name, bool) or not isinstance(name, int | np.integer) or not -(2**63) <= name < 2**63:
                raise ConfigError(f"vocabulary: a name must be an int64, got {name!r}, a {type(name).__name__}.")
        return np.array(given, np.int64)

    def _flat(self, names: Any) -> tuple[tuple[int, ...], Texts | _Integers]:
        if self.dtype == "string":
            array = names if isinstance(names, np.ndarray) else np.array(names, object)
            return array.shape, Texts.of(array.ravel().tolist())
        array = np.asarray(names)
        if array.size and array.dtype.kind not in "iu":
            raise ConfigError(f"vocabulary: names must be integers, got an array of {array.dtype}.")
        return array.shape, array.astype(np.int64).ravel()

    def _keys(self, names: Texts | _Integers) -> _Integers:
        """Return what finds the names in the index: integers themselves, and the fingerprints of texts."""
        if not isinstance(names, Texts):
            return names
        return fingerprints(names.with_prefix(self.salt) if self.salt else names)

    def _find(self, names: Texts | _Integers) -> _Integers:
        """Return the number of each name; NONE if it is unknown."""
        found = self._index.find(self._keys(names))
        own = self._names
        if isinstance(names, Texts) and isinstance(own, Texts):
            hits = np.flatnonzero(found != NONE)
            same = names.take(hits).equal(own.take(found[hits]))
            found[hits[~same]] = NONE
        return found

    def _append(self, names: Texts | _Integers) -> None:
        """Add names that are new and all different."""
        count = len(self)
        if count + len(names) > _MOST_NAMES:
            raise ConfigError(
                f"vocabulary: {count + len(names)} names are more than {_MOST_NAMES}. Use several tables."
            )
        if isinstance(names, Texts):
            self._starts.append(names.starts[1:] + len(self._values.values))
            self._values.append(names.data)
        else:
            self._values.append(names)
        keys = self._keys(names)
        if (self._index.find(keys) != NONE).any() or len(np.unique(keys)) < len(keys):
            self._choose_salt()
        else:
            self._index.add(keys, np.arange(count, count + len(names), dtype=np.int32))

    def _choose_salt(self) -> None:
        """Make the index anew with other fingerprints: two names had the same one."""
        while True:
            self._salt += 1
            keys = self._keys(self._names)
            if len(np.unique(keys)) == len(keys):
                self._index = Index(keys)
                return

    def _refuse_repeated(self, names: Texts | _Integers) -> None:
        numbers, first = _numbered(names)
        if len(first) < len(numbers):
            place = int(np.flatnonzero(np.bincount(numbers) > 1)[0])
            one, other = np.flatnonzero(numbers == place)[:2]
            name = names[int(one)] if isinstance(names, Texts) else int(names[one])
            raise ConfigError(f"vocabulary: name {name!r} is at {one} and at {other}. Remove one.")

    def _buckets_of(self, names: Texts | _Integers) -> _Integers:
        """Return the bucket of each name, as Keras chooses it."""
        numbers = hashes(names) if isinstance(names, Texts) else names
        return (numbers % numbers.dtype.type(self.oov_buckets)).astype(np.int64)

    def _name(self, index: int) -> Any:
        name = self._names[index]
        return name if isinstance(name, bytes) else int(name)

    def _text(self, index: int) -> Any:
        name = self._name(index)
        if not isinstance(name, bytes):
            return name
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"vocabulary: name {name!r} is not UTF-8, so it is no str. Use `names`.") from None


def _check_count(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"vocabulary: {what} must be an integer of {least} or more, got {value!r}.")


def _taken(names: Texts | _Integers, indices: _Integers) -> Texts | _Integers:
    return names.take(indices) if isinstance(names, Texts) else names[indices]


def _numbered(names: Texts | _Integers) -> tuple[_Integers, _Integers]:
    """Return the number of each name among the different ones, by first place, and that first place of each."""
    if isinstance(names, Texts):
        keys = fingerprints(names)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        if not names.equal(names.take(first[inverse])).all():  # two names with one hash
            seen: dict[bytes, int] = {}
            keys = np.array([seen.setdefault(names[index], len(seen)) for index in range(len(names))], np.int64)
    else:
        keys = names
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse.ravel()], first[order]


def _integers_in(path: Path) -> _Integers:
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it has an array of {array.dtype} {list(array.shape)}, not of integers [n]")
        return array.astype(np.int64)
    lines = _lines_of(path)
    return np.array([int(lines[index]) for index in range(len(lines))], np.int64)


def _lines_of(path: Path) -> Texts:
    """Return the lines of a file without their ends. A last line without an end counts."""
    data = np.fromfile(path, np.uint8)
    ends = np.concatenate(
        [np.flatnonzero(piece == 10) + start for start, piece in _pieces(data)] or [np.zeros(0, np.int64)]
    )
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        ends = np.append(ends, len(data))
    keep = np.ones(len(data), bool)
    keep[ends[ends < len(data)]] = False
    starts = np.concatenate([[0], ends - np.arange(len(ends))]).astype(np.int64)
    return Texts(data[keep], starts)


def _pieces(data: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield start, data[start : start + _PIECE_BYTES]
