"""Names with numbers, and the index that finds them."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.vocabulary.index import NONE, Index
from tpuembed.vocabulary.name_arrays import Batch, DType, NameStore, names_of
from tpuembed.vocabulary.saved import MOST_NAMES

__all__ = ["NumberedNames", "salt_text"]

_Integers = npt.NDArray[np.int64]

_MOST_SALTS: Final = 100


class NumberedNames:
    """Names by their numbers, 0, 1, 2 and so on. Numbers whose names were dropped are free.

    Attributes:
        store: the names.
        index: finds a number by the key of its name.
        salt: the number that `salt_text` makes of, what is put before each text when it is hashed.
        free: the free numbers, int64, ascending.
    """

    def __init__(self, dtype: DType) -> None:
        """Have no names."""
        self.store: NameStore = names_of(dtype)
        self.index = Index()
        self.salt = 0
        self.free: _Integers = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.index)

    @property
    def size(self) -> int:
        """Return one more than the highest number, be it free or not."""
        return len(self.store)

    def keys(self, batch: Batch) -> _Integers:
        """Return what finds each name of a batch in the index."""
        return self.store.keys(batch, salt_text(self.salt))

    def find(self, batch: Batch, keys: _Integers) -> _Integers:
        """Return the number of each name; NONE if it is unknown. All bytes are compared."""
        found = self.index.find(keys)
        hits = np.flatnonzero(found != NONE)
        other = hits[~self.store.equal(self.store.take(batch, hits), self.store.get(found[hits]))]
        found[other] = NONE
        return found

    def fill(self, batch: Batch, numbers: npt.NDArray[Any] | None = None, size: int = 0) -> int:
        """Give names the numbers 0, 1, 2 and so on, or `numbers` of `size` ones. There are no names yet.

        Without `numbers` the arrays of the batch are kept.

        Returns:
            How many numbers there are.

        Raises:
            ConfigError: a name is there twice, or there are too many.
        """
        count = len(batch) if numbers is None else max(len(batch), size)
        if count > MOST_NAMES:
            raise ConfigError(f"vocabulary: {count} names are more than {MOST_NAMES}. Use several tables.")
        keys = self.keys(batch)
        is_unique = self._refuse_repeated(batch, keys)
        if numbers is None:
            self.store.replace(batch)
            numbers = np.arange(count, dtype=np.int32)
        else:
            self.store.put(numbers, batch, count)
        if is_unique:
            self.index.add(keys, numbers.astype(np.int32, copy=False))
        else:
            self._choose_salt(numbers)
        return count

    def _refuse_repeated(self, batch: Batch, keys: _Integers) -> bool:
        """Return True if all keys are different. Raises ConfigError if a name is there twice."""
        twice = _repeated(keys)
        if not len(twice):
            return True
        places: dict[Any, int] = {}
        for place in np.flatnonzero(np.isin(keys, twice)).tolist():
            name = self.store.item(batch, place)
            if name in places:
                raise ConfigError(f"vocabulary: name {name!r} is at {places[name]} and at {place}. Remove one.")
            places[name] = place
        return False

    def different(self, batch: Batch, keys: _Integers) -> tuple[_Integers, _Integers]:
        """Return the place of each name among the different ones of a batch, in the order of their first place, and that place."""
        store = self.store
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        if not store.equal(batch, store.take(batch, first[inverse])).all():  # two names with one key
            seen: dict[Any, int] = {}
            keys = np.array(
                [seen.setdefault(store.item(batch, place), len(seen)) for place in range(len(keys))], np.int64
            )
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return rank[inverse], first[order]

    def has_room(self, room: int) -> bool:
        """Return True if a number below `room` has no name."""
        return self.size < room or bool(len(self.free) and self.free[0] < room)

    def unused(self, count: int, room: int) -> _Integers:
        """Return the next `count` numbers without a name, the free ones first; fewer if only fewer are below `room`."""
        free = self.free[: np.searchsorted(self.free, room)][:count]
        rest = min(count - len(free), max(room - self.size, 0))
        return np.concatenate([free, np.arange(self.size, self.size + rest)])

    def give(self, batch: Batch, keys: _Integers, numbers: _Integers) -> None:
        """Give `unused` numbers to names that are new and all different."""
        if not len(numbers):
            return
        self.free = self.free[~np.isin(self.free, numbers)]
        self.store.put(numbers, batch)
        if len(_repeated(keys)) or (self.index.find(keys) != NONE).any():
            before = self.index.rows[self.index.rows != NONE].astype(np.int64)
            self._choose_salt(np.union1d(before, numbers))
        else:
            self.index.add(keys, numbers.astype(np.int32))

    def drop(self, numbers: _Integers) -> None:
        """Free numbers, which have names and are ascending."""
        if len(numbers):
            self.index.remove(self.keys(self.store.get(numbers)))
            self.store.drop(numbers)
            self.free = np.union1d(self.free, numbers)

    def _choose_salt(self, numbers: npt.NDArray[Any]) -> None:
        """Make the index anew with other fingerprints: two names had the same one. `numbers` are all that have a name."""
        batch = self.store.get(numbers)
        for salt in range(self.salt + 1, self.salt + _MOST_SALTS):
            self.salt = salt
            keys = self.keys(batch)
            if not len(_repeated(keys)):
                self.index = Index()
                self.index.add(keys, numbers.astype(np.int32, copy=False))
                return
        raise ConfigError("vocabulary: its names were made to have equal hashes. Use integers of your own hash.")


def salt_text(number: int) -> bytes:
    """Return the text before each name when it is hashed, of a salt's number. Number 0 has none."""
    return str(number).encode() + b"\0" if number else b""


def _repeated(keys: _Integers) -> _Integers:
    """Return the keys that are there twice or more."""
    ordered = np.sort(keys)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
