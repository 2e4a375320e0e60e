"""Names with numbers, and the index that finds them."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.vocabulary.index import NONE, Index
from tpuembed.vocabulary.name_arrays import Batch, NameType
from tpuembed.vocabulary.saved import MOST_NAMES

__all__ = ["NumberedNames", "salt_text"]

_Integers = npt.NDArray[np.int64]

_MOST_SALTS: Final = 100


class NumberedNames:
    """Names by their numbers, 0, 1, 2 and so on. They never change.

    Attributes:
        type: of the names.
        names: the names, in the order of their numbers.
        index: finds a number by the key of its name.
        salt: the number that `salt_text` makes of, what is put before each text when it is hashed.
    """

    def __init__(self, name_type: NameType, batch: Batch) -> None:
        """Give the names of `batch`, which are all different, the numbers 0, 1, 2 and so on.

        Raises:
            ConfigError: a name is there twice, or there are too many.
        """
        if len(batch) > MOST_NAMES:
            raise ConfigError(f"vocabulary: {len(batch)} names are more than {MOST_NAMES}. Use several tables.")
        self.type, self.names, self.salt = name_type, name_type.kept(batch), 0
        keys = self.type.keys(self.names, b"")
        twice = _repeated(keys)
        if len(twice):
            self._refuse_repeated(np.flatnonzero(np.isin(keys, twice)))
            keys = self._choose_salt()
        self.index = Index(keys)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.names)

    def find(self, batch: Batch) -> _Integers:
        """Return the number of each name of a batch; NONE if it is unknown. All bytes are compared."""
        found = self.index.find(self.type.keys(batch, salt_text(self.salt)))
        hits = np.flatnonzero(found != NONE)
        same = self.type.equal(self.type.take(batch, hits), self.type.take(self.names, found[hits]))
        found[hits[~same]] = NONE
        return found

    def _refuse_repeated(self, places: _Integers) -> None:
        """Raise ConfigError if two of the names at `places` are the same."""
        seen: dict[Any, int] = {}
        for place in places.tolist():
            name = self.type.item(self.names, place)
            if name in seen:
                raise ConfigError(f"vocabulary: name {name!r} is at {seen[name]} and at {place}. Remove one.")
            seen[name] = place

    def _choose_salt(self) -> _Integers:
        """Choose other fingerprints, because two names have the same one. Returns the keys of all names."""
        for salt in range(1, _MOST_SALTS):
            self.salt = salt
            keys = self.type.keys(self.names, salt_text(salt))
            if not len(_repeated(keys)):
                return keys
        raise ConfigError("vocabulary: its names were made to have equal hashes. Use integers of your own hash.")


def salt_text(number: int) -> bytes:
    """Return the text before each name when it is hashed, of a salt's number. Number 0 has none."""
    return str(number).encode() + b"\0" if number else b""


def _repeated(keys: _Integers) -> _Integers:
    """Return the keys that are there twice or more."""
    ordered = np.sort(keys)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
