"""`Vocabulary`: the names of a table's rows."""

import contextlib
import copy
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, ConfigError, reason
from tpuembed.vocabulary.counted_names import CountedNames
from tpuembed.vocabulary.files import integers_in, names_in, names_of_element
from tpuembed.vocabulary.followers import Follower, Followers
from tpuembed.vocabulary.index import NONE
from tpuembed.vocabulary.name_arrays import Batch, DType
from tpuembed.vocabulary.numbered_names import salt_text
from tpuembed.vocabulary.saved import (
    IDENTITY,
    MAGIC,
    MOST_NAMES,
    OPTIONS,
    VocabularyHeader,
    check_version,
    chunks,
    parse,
)
from tpuembed.vocabulary.sightings import MOST_UPDATE, NEVER
from tpuembed.vocabulary.sketch import MOST
from tpuembed.vocabulary.text import GrowingArray

__all__ = ["PADDING", "UNKNOWN", "Vocabulary"]

_Integers = npt.NDArray[np.int64]

PADDING: Final = -1
"""The row of padding in a list."""
UNKNOWN: Final = -2
"""The row of a name that is not in a vocabulary without buckets. It is outside of every table."""
_NAMES_AT_ONCE: Final = 1 << 18


class Vocabulary:
    """The names of a table's rows, in the order of the rows.

    The first `oov_buckets` rows are for unknown names, and the names have the rows after them, as in Keras' StringLookup and
    IntegerLookup. A name keeps its row until it is evicted, and new names get the next rows. Names are kept in arrays: a
    million names of 12 bytes take 40 MB.

    A vocabulary that `grows` knows how often each name was seen in training, and in which update it was last seen, in 8
    bytes more. `evict` removes names that are old or rare. Their rows are free until new names get them.

    Its methods may be called from several threads.

    Attributes:
        dtype: "string" for names of any bytes, or "int64".
        oov_buckets: number of rows for unknown names.
        grows: True if training gives new names a row.
        min_count: how often training has to see a name before it gets a row.
    """

    def __init__(
        self,
        names: Iterable[Any] = (),
        *,
        dtype: DType = "string",
        oov_buckets: int = 0,
        grows: bool = False,
        min_count: int = 1,
    ) -> None:
        """Give `names` the rows after the buckets.

        Args:
            names: str or bytes, or integers, all different. str is kept as UTF-8.
            dtype: of the names.
            oov_buckets: number of rows for unknown names. Without buckets they are UNKNOWN.
            grows: give new names the next rows of the table, while it has room, in calls of a layer with `training=True`.
            min_count: with `grows`, how often a new name has to be seen before it gets a row, at most 255. Names without a row
                are counted by a sketch of 16 MiB, which may take a rare name for a more frequent one. It is not saved: after a
                restart names without a row are counted from zero.

        Raises:
            ConfigError: a name is listed twice or has another type, or an option is wrong.
        """
        if dtype not in ("string", "int64"):
            raise ConfigError(f'vocabulary: dtype must be "string" or "int64", got {dtype!r}.')
        _check_count("oov_buckets", oov_buckets, 0, MOST_NAMES)
        if not isinstance(grows, bool):
            raise ConfigError(f"vocabulary: grows must be True or False, got {grows!r}.")
        _check_count("min_count", min_count, 1, MOST)
        if min_count > 1 and not grows:
            raise ConfigError(f"vocabulary: min_count={min_count} is for new names in training. Pass grows=True too.")
        self.dtype: DType = dtype
        self.oov_buckets = int(oov_buckets)
        self.grows = grows
        self.min_count = int(min_count)
        self._lock = threading.RLock()
        self._followers = Followers()
        self._clear()
        try:
            is_list = not isinstance(names, str | bytes) and iter(names) is not None
        except TypeError:
            is_list = False
        if not is_list:
            raise ConfigError(
                f"vocabulary: names must be a list of names, got {names!r}. Vocabulary.from_file reads the names of a file."
            )
        self._names.fill(self._names.store.batch(names))

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        dtype: DType = "string",
        oov_buckets: int = 0,
        grows: bool = False,
        min_count: int = 1,
    ) -> "Vocabulary":
        """Return the vocabulary of a text file with one name a line, or, for int64, of a .npy file.

        Names are read as arrays, without a Python object for each. At its peak this takes twice the memory of the vocabulary.

        Raises:
            ConfigError: the file cannot be read, or has a name twice.
        """
        found = cls(dtype=dtype, oov_buckets=oov_buckets, grows=grows, min_count=min_count)
        try:
            names = integers_in(Path(path)) if dtype == "int64" else names_in(Path(path))
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"vocabulary {path}: cannot be read: {reason(error)}.") from None
        found._names.fill(names)
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
            data: arrays of names, such as a batched `tf.data.Dataset`, also of ragged and sparse tensors. They are read once, one
                after the other.
            dtype, oov_buckets, grows: see the constructor.
            min_count: leave out names that occur less often. It holds for new names in training too, if it `grows`.

        Raises:
            ConfigError: a name has another type, an element of `data` is no array, or an option is wrong.
        """
        found = cls(dtype=dtype, oov_buckets=oov_buckets, grows=grows, min_count=min_count if grows else 1)
        _check_count("min_count", min_count, 1)
        seen, counts = cls(dtype=dtype), GrowingArray(np.int64)
        for names in data:
            rows = seen.add(names_of_element(names)).ravel()
            counts.extend(len(seen), 0)
            np.add.at(counts.values, rows, 1)
        chosen = np.argsort(-counts.values, kind="stable")
        chosen = chosen[counts.values[chosen] >= min_count]
        found._names.fill(seen._names.store.get(chosen), np.arange(len(chosen)))
        return found

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets and free ones included: the least size of a table."""
        return self.oov_buckets + self._names.size

    @property
    def free_rows(self) -> _Integers:
        """Return the rows that `evict` has left without a name, int64, ascending."""
        return self._names.free + self.oov_buckets

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
        shape, batch = self._names.store.flat(names)
        with self._lock:
            found = self._names.find(batch, self._names.keys(batch))
        return self._rows(batch, found, padded).reshape(shape)

    def add(self, names: Any) -> _Integers:
        """Return the row of each name, as `lookup` does. Unknown names get free rows, and then the next rows.

        They get them in the order of their first place.

        Raises:
            ConfigError: a name has another type, the names are more than the rows of a layer's table, or one would get a row that
                a layer's `out_of_vocabulary` has for unknown names. None is added then.
        """
        shape, batch = self._names.store.flat(names)
        with self._lock:
            keys = self._names.keys(batch)
            found = self._names.find(batch, keys)
            missing, room = np.flatnonzero(found == NONE), self._room(MOST_NAMES)
            new = (
                len(self._names.different(self._names.store.take(batch, missing), keys[missing])[1])
                if len(missing)
                else 0
            )
            if len(self) + new > room:
                raise ConfigError(
                    f"vocabulary: {new} new names and {len(self)} others are more than the {room} rows that names can have in the "
                    "table. Make vocabulary_size larger, or evict names."
                )
            self._followers.check_new(self._names.unused(new, room) + self.oov_buckets)
            self._names.admit(batch, keys, found, missing, room=room, least=1)
        self._followers.tell(np.zeros(0, np.int64))
        return (found + self.oov_buckets).reshape(shape)

    def grow(self, names: Any, *, room: int, update: int, padded: bool = False) -> _Integers:
        """Return the row of each name, as `lookup` does, after giving rows to new names. All are counted as seen.

        New names that were seen `min_count` times get free rows, and then the next rows, in the order of their first place.
        When all rows have names, new names are unknown.

        Args:
            names: an array, or nested lists, of names.
            room: the rows of the table, those of buckets included.
            update: the number of the training's update.
            padded: "" and the integer -1 are padding. Their row is PADDING, and they are not counted.

        Raises:
            ConfigError: the vocabulary does not grow, or a name has another type.
        """
        self._check_grows("grow")
        _check_count("room", room, 0)
        _check_count("update", update, 0, MOST_UPDATE)
        shape, batch = self._names.store.flat(names)
        with self._lock:
            keys = self._names.keys(batch)
            found, is_name = self._names.find(batch, keys), np.ones(len(keys), bool)
            if padded:
                is_name = ~self._names.store.is_padding(batch)
            missing, before = np.flatnonzero(is_name & (found == NONE)), len(self)
            most = self._room(room - self.oov_buckets)
            self._names.admit(batch, keys, found, missing, room=most, least=self.min_count)
            self._names.sightings.mark(found[is_name & (found != NONE)], update)
            has_grown = len(self) > before
        if has_grown:
            for follower, table in self._followers.living():
                follower.names_grew(table)
        return self._rows(batch, found, padded).reshape(shape)

    # ---- how often, and when, names were seen

    def seen(self, rows: Any, *, update: int) -> None:
        """Count the names of `rows` as seen in `update`, once for each time that a row is there.

        Rows of buckets, PADDING, UNKNOWN, and free rows are not counted.

        Raises:
            ConfigError: the vocabulary does not grow, or has no such row.
        """
        self._check_grows("seen")
        _check_count("update", update, 0, MOST_UPDATE)
        with self._lock:
            numbers = np.asarray(rows, np.int64).ravel() - self.oov_buckets
            numbers = numbers[numbers >= 0]
            if len(numbers) and numbers.max() >= self._names.size:
                raise ConfigError(
                    f"vocabulary: row {numbers.max() + self.oov_buckets} is outside of its {self.rows} rows."
                )
            self._names.sightings.mark(numbers[~np.isin(numbers, self._names.free)], update)

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """Return how often the name of each row was seen in training, uint32 [rows]; 0 for buckets and free rows.

        Raises:
            ConfigError: the vocabulary does not grow.
        """
        self._check_grows("counts")
        with self._lock:
            return np.concatenate([np.zeros(self.oov_buckets, np.uint32), self._names.sightings.counts])

    @property
    def last_seen(self) -> npt.NDArray[np.int32]:
        """Return the update in which the name of each row was last seen, int32 [rows]; -1 for buckets and free rows.

        A name that training has not seen has the update that was the latest when it was added. If none was known, it has the one
        before the first that is.

        Raises:
            ConfigError: the vocabulary does not grow.
        """
        self._check_grows("last_seen")
        with self._lock:
            return np.concatenate([np.full(self.oov_buckets, NEVER, np.int32), self._names.sightings.last_seen])

    def continue_counts(self, old: "Vocabulary", update: int) -> None:
        """Take the counts and last updates of names from `old`, whose rows they got. A new name was last seen in `update`.

        Nothing changes if the vocabulary does not grow. If `old` did not, its names too were last seen in `update`.
        """
        if not self.grows:
            return
        with _locked(self, old):
            rows = old.rows_in(self)
            kept = np.flatnonzero(rows >= self.oov_buckets)
            kept = kept[kept >= old.oov_buckets]
            self._names.sightings.start_at(max(int(update), old._names.sightings.update))
            if old.grows:
                self._names.sightings.put(rows[kept] - self.oov_buckets, old.counts[kept], old.last_seen[kept])

    def count_updates_from(self, update: int) -> None:
        """Renumber the updates, so that the latest one is `update`. No name is older than the first update then.

        Nothing changes if the vocabulary does not grow.
        """
        if not self.grows:
            return
        with self._lock:
            self._names.sightings.renumber(update)

    def first_row(self, start: int, stop: int) -> int | None:
        """Return the first row of [start, stop) that has a name, or None."""
        rows = np.arange(max(start, self.oov_buckets), min(stop, self.rows))
        named = rows[~np.isin(rows, self.free_rows)]
        return int(named[0]) if len(named) else None

    def evict(
        self, *, not_seen_for: int | None = None, min_count: int | None = None, update: int | None = None
    ) -> _Integers:
        """Remove names that are old, or rare, or, if both are given, old and rare. Returns their rows, int64, ascending.

        The rows are free until `grow` or `add` gives them to new names. Layers that use the vocabulary give these rows, and their
        slots, the values of a new table now. A removed name that comes back is a new name, and what
        was counted of names without a row is forgotten. Call it between runs: graphs and batches that were made before have
        the old rows.

        Args:
            not_seen_for: remove names that were not seen in the last `not_seen_for` updates.
            min_count: remove names that were seen less often.
            update: the number of the last update. None for the latest that was seen.

        Raises:
            ConfigError: the vocabulary does not grow, or an argument is wrong.
        """
        self._check_grows("evict")
        if not_seen_for is None and min_count is None:
            raise ConfigError("vocabulary: evict needs not_seen_for or min_count. Pass one of them.")
        for what, value, least in (
            ("not_seen_for", not_seen_for, 1),
            ("min_count", min_count, 1),
            ("update", update, 0),
        ):
            if value is not None:
                _check_count(what, value, least)
        with self._lock:
            numbers = self._names.sightings.chosen(not_seen_for, min_count, update)
            self._names.drop(numbers)
        self._followers.tell(numbers + self.oov_buckets)
        return numbers + self.oov_buckets

    def remove(self, names: Any) -> _Integers:
        """Remove `names`, which may be an array or nested lists. Returns their rows, int64, ascending.

        What `evict` says of the rows, of names without a row, and of graphs that were made before, holds here too.

        Raises:
            ConfigError: a name has another type, or is not in the vocabulary. None is removed then.
        """
        _, batch = self._names.store.flat(names)
        with self._lock:
            found = self._names.find(batch, self._names.keys(batch))
            unknown = np.flatnonzero(found == NONE)
            if len(unknown):
                name = self._names.store.item(batch, int(unknown[0]))
                raise ConfigError(
                    f"vocabulary: name {name!r} is not among its {len(self)} names, so it cannot be removed."
                )
            numbers = np.unique(found)
            self._names.drop(numbers)
        self._followers.tell(numbers + self.oov_buckets)
        return numbers + self.oov_buckets

    def rows_in(self, other: "Vocabulary") -> _Integers:
        """Return the row that `other` gives the name of each row, int64 [rows]; UNKNOWN for a name that it lacks.

        Buckets have the same row if both have the same number of them. Otherwise they are UNKNOWN, as free rows are.

        Raises:
            ConfigError: the names have another dtype.
        """
        if other.dtype != self.dtype:
            raise ConfigError(f"vocabulary: names of {self.dtype} are not in a vocabulary of {other.dtype}.")
        with _locked(self, other):
            rows, free = np.full(self.rows, UNKNOWN, np.int64), self.free_rows
            if other.oov_buckets == self.oov_buckets:
                rows[: self.oov_buckets] = np.arange(self.oov_buckets)
            for start in range(0, self._names.size, _NAMES_AT_ONCE):
                batch = self._names.store.get(np.arange(start, min(start + _NAMES_AT_ONCE, self._names.size)))
                found = other._names.find(batch, other._names.keys(batch))
                piece = rows[self.oov_buckets + start :][: len(found)]
                piece[...] = np.where(found == NONE, UNKNOWN, found + other.oov_buckets)
            rows[free] = UNKNOWN
        return rows

    # ---- names of rows

    def names(self, rows: Any) -> list[Any]:
        """Return the names of rows: bytes or int. The name of a bucket, and that of a free row, is None.

        Raises:
            ConfigError: there is no such row.
        """
        wanted = np.asarray(rows, np.int64).ravel()
        with self._lock:
            outside = (wanted < 0) | (wanted >= self.rows)
            if outside.any():
                raise ConfigError(f"vocabulary: row {wanted[outside][0]} is outside of its {self.rows} rows.")
            numbers = wanted - self.oov_buckets
            is_name = (numbers >= 0) & ~np.isin(numbers, self._names.free)
            batch = self._names.store.get(np.where(is_name, numbers, 0)) if is_name.any() else None
        return [self._names.store.item(batch, at) if named else None for at, named in enumerate(is_name.tolist())]

    def get_vocabulary(self) -> list[Any]:
        """Return the names of all rows as Keras does: str or int, buckets included. A free row has None.

        Raises:
            ConfigError: a name is not UTF-8, so that it is no str.
        """
        names = self.names(np.arange(self.oov_buckets, self.rows))
        return [self._names.store.oov_name] * self.oov_buckets + [_text(name) for name in names]

    def has(self, name: Any) -> bool:
        """Return True if `name` is one of the names."""
        return bool(self.lookup([name])[0] >= self.oov_buckets)

    def same_names(self, other: "Vocabulary") -> bool:
        """Return True if both have the same names at the same rows."""
        if other is self:
            return True
        if other.unlike(self):
            return False
        with _locked(self, other):
            if (self.rows, len(self)) != (other.rows, len(other)):
                return False
            if not np.array_equal(self.free_rows, other.free_rows):
                return False
            for start in range(0, self._names.size, _NAMES_AT_ONCE):
                numbers = np.arange(start, min(start + _NAMES_AT_ONCE, self._names.size))
                same = self._names.store.equal(self._names.store.get(numbers), other._names.store.get(numbers))
                if not (same | np.isin(numbers, self._names.free)).all():
                    return False
        return True

    # ---- for graphs

    @property
    def salt(self) -> bytes:
        """Return what is put before each name when it is hashed. It is chosen so that no two names have one fingerprint."""
        return salt_text(self._names.salt)

    @property
    def salt_number(self) -> int:
        """Return the number that `salt_text` makes `salt` of."""
        return self._names.salt

    @property
    def keys(self) -> _Integers:
        """Return the keys of the index, int64 [buckets, WAYS]. The result is no copy."""
        return self._names.index.keys

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """Return the number of the name at each place of `keys`, int32 [buckets, WAYS]; -1 if there is none. It is no copy.

        The row of a name is `oov_buckets` more than its number.
        """
        return self._names.index.rows

    def snapshot(self) -> tuple[int, _Integers, npt.NDArray[np.int32]]:
        """Return salt_number, keys and numbers of one moment. The arrays are copies."""
        with self._lock:
            return self._names.salt, self._names.index.keys.copy(), self._names.index.rows.copy()

    def watch(self, follower: "Follower", table: str, rows: int, reserved: Collection[int] = ()) -> None:
        """Call `follower` after names were added, evicted or replaced. The vocabulary does not keep it in memory.

        Names get no rows beyond the `rows` of its table, and `add` gives them none of the `reserved` ones.
        """
        with self._lock:
            self._followers.add(follower, table, rows, reserved)

    def _room(self, most: int) -> int:
        """Return how many names may have rows: `most`, or fewer, if a follower's table is smaller."""
        return min(most, MOST_NAMES, self._followers.least_rows(self.oov_buckets + MOST_NAMES) - self.oov_buckets)

    def unlike(
        self, other: "Vocabulary | VocabularyHeader", options: Sequence[str] = IDENTITY
    ) -> tuple[str, str, str] | None:
        """Return the first of `options` in which `other` has another value, and both values for messages, or None."""
        for option in options:
            own, its = getattr(self, option), getattr(other, option)
            if own != its:
                return option, repr(own), repr(its)
        return None

    def check_padding(self, where: str) -> None:
        """Raise ConfigError if a name is the padding of lists: "" or -1. `where` begins the message."""
        padding: Any = b"" if self.dtype == "string" else -1
        if self.lookup([padding])[0] >= self.oov_buckets:
            shown = '""' if self.dtype == "string" else -1
            raise ConfigError(
                f"{where}: its vocabulary has the name {shown}, which is padding in lists. Remove it with `remove`, or "
                "give the feature one name per row."
            )

    def options(self) -> dict[str, Any]:
        """Return all but the names, as JSON values: what configs say of a vocabulary."""
        growth = {"grows": True} if self.grows else {}
        admission = {"min_count": self.min_count} if self.min_count > 1 else {}
        return {"dtype": self.dtype, "oov_buckets": self.oov_buckets, **growth, **admission}

    @classmethod
    def from_options(cls, options: Mapping[str, Any], where: str) -> "Vocabulary":
        """Return the vocabulary of `options()`: without names, or with those of the file that `file` names.

        Args:
            options: dtype, oov_buckets, grows, min_count and file.
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

    def write_to(self, file: BinaryIO) -> None:
        """Write what `to_bytes` returns, some megabytes at a time."""
        self._save(file.write)

    def digest(self) -> str:
        """Return a SHA-256 of what `to_bytes` returns, in hexadecimal digits."""
        found = hashlib.sha256()
        self._save(found.update)
        return found.hexdigest()

    def _save(self, take: Callable[[bytes], object]) -> None:
        with self._lock:
            for chunk in chunks(self._names.save(self.options())):
                take(chunk)

    @staticmethod
    def is_saved(start: bytes) -> bool:
        """Return True if `start`, the first bytes of a file, is that of what `to_bytes` wrote."""
        return start.startswith(MAGIC)

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "Vocabulary":
        """Return the vocabulary that `to_bytes` wrote, with its options. `where` begins the messages of errors.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
            CheckpointFormatError: it was written by a later release.
        """
        check_version(content, where)
        try:
            saved = parse(content)
            found = cls.from_options(saved.options, "vocabulary")
            found._names.load(saved, is_own=True)
        except (ValueError, TypeError) as error:
            why = str(error).removeprefix("vocabulary: ").partition(". ")[0].removesuffix(".")
            raise CheckpointCorruptError(f"{where}: cannot be read: {why}. Restore it from a copy.") from None
        return found

    def assign(self, other: "Vocabulary", *, by: "Follower | None" = None) -> None:
        """Take the names and the rows of `other`, all that is counted included, in the place of its own. Its options stay.

        Args:
            other: the vocabulary whose names it takes.
            by: the follower whose table was restored with these names. If a name has another row now, other followers, whose
                tables have the rows of before, are told that.

        Raises:
            ConfigError: `other` has names of another type, or other buckets; or, without `by`, a layer's table has the rows of
                before and a name would have another one, or a row that `add` would refuse. Nothing has changed then.
        """
        if unlike := self.unlike(other):
            option, own, its = unlike
            raise ConfigError(
                f"vocabulary: its {option} is {own}, and that of the other {its}. Make both with the same {option}."
            )
        with _locked(self, other):
            saved = other._names.save(other.options(), copy=True)
            others = [each for each in self._followers.living() if each[0] is not by]
            moves = bool(others) and self._moves_in(other)
            if by is None:
                self._followers.check_size(other.rows)
                reserved = self._followers.reserved()
                self._followers.check_new(
                    [row for row in reserved if other._has_name_at(row) and not self._has_name_at(row)]
                )
                if moves:
                    raise ConfigError(
                        f"vocabulary: names would have other rows than in table {others[0][1]!r} of a layer that uses it. Build a "
                        "layer with these names, and restore its tables with by='name'."
                    )
            before = self.to_bytes() if moves else None
            self._clear()
            self._names.load(saved, is_own=False)
        if before is not None:
            for follower, table in others:
                follower.names_replaced(table, before)
        self._followers.tell(np.zeros(0, np.int64))

    def _has_name_at(self, row: int) -> bool:
        return self.oov_buckets <= row < self.rows and self.names([row])[0] is not None

    def _moves_in(self, other: "Vocabulary") -> bool:
        """Return True if a name has another row in `other`, or none."""
        rows = np.arange(self.oov_buckets, self.rows)
        rows = rows[~np.isin(rows, self.free_rows)]
        return bool((self.rows_in(other)[rows] != rows).any())

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of its state of one moment: other threads may add names before it is written."""
        with self._lock:
            own = {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_followers")}
            return copy.deepcopy(own)

    def __copy__(self) -> "Vocabulary":
        """Return one whose names change apart from these."""
        found = type(self).__new__(type(self))
        found.__setstate__(self.__getstate__())
        return found

    def __deepcopy__(self, _: dict[int, Any]) -> "Vocabulary":
        return self.__copy__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _followers=Followers())

    # ---- numbers and rows

    def _clear(self) -> None:
        self._names = CountedNames(self.dtype, counted=self.grows)

    def _rows(self, batch: Batch, numbers: _Integers, padded: bool) -> _Integers:
        """Return the row of each name whose number is known or NONE."""
        unknown = np.flatnonzero(numbers == NONE)
        rows = numbers + self.oov_buckets
        rows[unknown] = UNKNOWN
        if self.oov_buckets and len(unknown):
            store = self._names.store
            rows[unknown] = store.buckets(store.take(batch, unknown), self.oov_buckets)
        if padded:
            rows[self._names.store.is_padding(batch)] = PADDING
        return rows

    def _check_grows(self, method: str) -> None:
        if not self.grows:
            raise ConfigError(f"vocabulary: {method} is for a vocabulary that grows. Make it with grows=True.")


@contextlib.contextmanager
def _locked(*vocabularies: Vocabulary) -> Iterator[None]:
    """Hold the locks of vocabularies. Any two threads take them in the same order, so that none waits for the other."""
    with contextlib.ExitStack() as stack:
        for each in sorted(vocabularies, key=id):
            stack.enter_context(each._lock)
        yield


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
