"""The layers that use a vocabulary, and what their tables allow."""

import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["Follower", "Followers"]

_Integers = npt.NDArray[np.int64]


class Follower(Protocol):
    """What uses a vocabulary, such as a layer."""

    def names_changed(self, table: str, freed: _Integers) -> None:
        """Follow a change of the names of `table`. `freed` are rows, int64 [n], whose names were evicted."""

    def names_replaced(self, table: str, before: bytes) -> None:
        """Follow the restore of another follower, by which names have other rows than those of `table`.

        `before` are the names until then, as `to_bytes` returns them.
        """

    def names_grew(self, table: str) -> None:
        """Follow training that gave names of `table` rows."""


class _Followed(NamedTuple):
    """A follower, its table, the table's rows, and those of them that unknown names have."""

    follower: "weakref.ref[Follower]"
    table: str
    rows: int
    reserved: tuple[int, ...]


class Followers:
    """The followers of one vocabulary. It does not keep them in memory."""

    def __init__(self) -> None:
        self._all: list[_Followed] = []

    def add(self, follower: Follower, table: str, rows: int, reserved: Collection[int]) -> None:
        """Add a follower; see `Vocabulary.watch`."""
        self._all = [*self._living(), _Followed(weakref.ref(follower), table, rows, tuple(reserved))]

    def _living(self) -> list[_Followed]:
        return [each for each in self._all if each.follower() is not None]

    def living(self) -> list[tuple[Follower, str]]:
        """Return the followers, each with its table."""
        found = [(each.follower(), each.table) for each in self._all]
        return [(follower, table) for follower, table in found if follower is not None]

    def tell(self, freed: _Integers) -> None:
        """Call `names_changed` of all."""
        for follower, table in self.living():
            follower.names_changed(table, freed)

    def least_rows(self, most: int) -> int:
        """Return the rows of the smallest table, or `most` if that is less."""
        return min([most, *(each.rows for each in self._living())])

    def check_size(self, rows: int) -> None:
        """Raise ConfigError if a table has fewer rows."""
        for each in self._living():
            if rows > each.rows:
                raise ConfigError(
                    f"vocabulary: the other one needs {rows} rows, and table {each.table!r} of a layer has {each.rows}. Make "
                    "vocabulary_size larger."
                )

    def reserved(self) -> list[int]:
        """Return the rows of unknown names that are no buckets."""
        return [row for each in self._living() for row in each.reserved]

    def check_new(self, rows: Iterable[int] | _Integers) -> None:
        """Raise ConfigError if new names would get `rows`, of which unknown names have one."""
        for row in self.reserved():
            if row in rows:
                raise ConfigError(
                    f"vocabulary: a new name would get row {row}, which unknown names have by out_of_vocabulary={row}. Build the "
                    "vocabulary and the layer with oov_buckets=1 instead."
                )
