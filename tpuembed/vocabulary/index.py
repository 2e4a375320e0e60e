"""A hash table of int64 keys in arrays, so that a graph can look names up in mapped files with stock operations.

It is a bucketed cuckoo table: a key lies in one of two buckets, each with room for four. The form was measured
against others; see docs/performance.md.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["MIX", "NONE", "WAYS", "Index", "second_bucket"]

_Integers = npt.NDArray[np.int64]
_Rows = npt.NDArray[np.int32]

WAYS: Final = 4
"""Keys in a bucket."""
NONE: Final = -1
"""The row of a key that is not in the table."""
_FILL: Final = 0.9
MIX: Final = -7046029254386353131
"""What a key is multiplied by for its second bucket."""
_LEAST_BUCKETS: Final = 17
_SMALL_FACTORS: Final = 2 * 3 * 5 * 7 * 11 * 13
"""No number of buckets has one of them, so that keys which are all multiples of one still use all buckets."""
_MOST_ROUNDS: Final = 500
_MOST_TIMES: Final = 32
"""A table that is not placed in as many times the buckets that it needs has keys that were made to collide."""
_AT_ONCE: Final = 1 << 20
_MOST_TRIES: Final = 40
"""How often a key is tried, on the average of many, before the table is taken to be too full."""


class Index:
    """Finds the rows of keys, which are all different.

    Attributes:
        keys: int64 [buckets, WAYS]. The keys of a bucket stand before its empty places.
        rows: int32 [buckets, WAYS], the row of each key, at the same place.
        empty: what a place without a key has in `keys`. Its row is NONE. It is no key.
    """

    def __init__(self, keys: _Integers | None = None) -> None:
        """Give `keys`, int64 [n], the rows 0, 1, 2 and so on."""
        self.empty = NONE
        self.keys = np.full((_LEAST_BUCKETS, WAYS), NONE, np.int64)
        self.rows = np.full((_LEAST_BUCKETS, WAYS), NONE, np.int32)
        self._count = 0
        if keys is not None and len(keys):
            self.add(keys, np.arange(len(keys), dtype=np.int32))

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def find(self, keys: _Integers) -> _Integers:
        """Return the row of each key, int64 [n]; NONE for one that is not in the table."""
        found = np.empty(len(keys), np.int64)
        rows = self.rows.reshape(-1)
        for start in range(0, len(keys), _AT_ONCE):
            places = self._places(keys[start : start + _AT_ONCE])
            found[start : start + _AT_ONCE] = np.where(places < 0, NONE, rows[places])
        return found

    def add(self, keys: _Integers, rows: _Rows) -> None:
        """Add keys that are not in the table. A table that becomes too full is made anew, twice as large.

        Raises:
            ConfigError: the keys were made to collide.
        """
        if (keys == self.empty).any():
            self._choose_empty(keys)
        count = self._count + len(keys)
        if count <= self.keys.size * _FILL:
            keys, rows = self._place(keys, rows)
        if len(keys):
            self._make(keys, rows, max(count, 2 * self._count))
        self._count = count

    def remove(self, keys: _Integers) -> None:
        """Remove keys that are in the table, and different."""
        buckets, ways = np.divmod(self._places(keys), WAYS)
        self.keys[buckets, ways], self.rows[buckets, ways] = self.empty, NONE
        buckets = np.unique(buckets)
        order = np.argsort(self.keys[buckets] == self.empty, 1, kind="stable")
        self.keys[buckets] = np.take_along_axis(self.keys[buckets], order, 1)
        self.rows[buckets] = np.take_along_axis(self.rows[buckets], order, 1)
        self._count -= len(keys)

    def _places(self, keys: _Integers) -> _Integers:
        """Return the place of each key in the flat arrays, or -1."""
        places = self._places_in(self._first(keys), keys)
        rest = np.flatnonzero(places < 0)
        places[rest] = self._places_in(self._second(keys[rest]), keys[rest])
        return places

    def _places_in(self, buckets: _Integers, keys: _Integers) -> _Integers:
        hits = _four_flags(self.keys[buckets] == keys[:, None])
        way = (hits > 0xFF).view(np.int8) + (hits > 0xFFFF).view(np.int8) + (hits > 0xFFFFFF).view(np.int8)
        return np.where(hits == 0, np.int64(-1), buckets * WAYS + way)

    def _choose_empty(self, keys: _Integers) -> None:
        before, below, count = self.empty, self.empty - 1, 1 << 10
        while self.empty == before:
            taken = np.zeros(count, bool)
            for some in (self.keys.reshape(-1), keys):
                taken[below - some[(some <= below) & (some > below - count)]] = True
            free = np.flatnonzero(~taken)
            if len(free):
                self.empty = below - int(free[0])
            below, count = below - count, 2 * count
        self.keys[self.rows == NONE] = self.empty

    def _make(self, keys: _Integers, rows: _Rows, room: int) -> None:
        """Make the table anew, with what it has and `keys`."""
        parts = [(self.keys.reshape(-1), self.rows.reshape(-1)), (keys, rows)]
        buckets = max(_LEAST_BUCKETS, int(room / WAYS / _FILL) + 1)
        most = _MOST_TIMES * buckets
        while buckets <= most:
            while math.gcd(buckets, _SMALL_FACTORS) > 1:
                buckets += 1
            self.keys = np.full((buckets, WAYS), self.empty, np.int64)
            self.rows = np.full((buckets, WAYS), NONE, np.int32)
            if self._place_all(parts):
                return
            buckets += buckets // 8
        raise ConfigError("vocabulary: its keys were made to collide, so that some find no place. Hash the names.")

    def _place_all(self, parts: list[tuple[_Integers, _Rows]]) -> bool:
        for keys, rows in parts:
            for start in range(0, len(keys), _AT_ONCE):
                some, of_some = keys[start : start + _AT_ONCE], rows[start : start + _AT_ONCE]
                taken = of_some != NONE
                if len(self._place_some(some[taken], of_some[taken])[0]):
                    return False
        return True

    def _first(self, keys: _Integers) -> _Integers:
        return keys % len(self.keys)

    def _second(self, keys: _Integers) -> _Integers:
        return second_bucket(keys, len(self.keys))

    def _place(self, keys: _Integers, rows: _Rows) -> tuple[_Integers, _Rows]:
        """Place all keys. Returns those without a place; they may be others, which were in the table."""
        for start in range(0, len(keys), _AT_ONCE):
            stop = start + _AT_ONCE
            left = self._place_some(keys[start:stop], rows[start:stop])
            if len(left[0]):
                return np.concatenate([left[0], keys[stop:]]), np.concatenate([left[1], rows[stop:]])
        return keys[:0], rows[:0]

    def _place_some(self, keys: _Integers, rows: _Rows) -> tuple[_Integers, _Rows]:
        """Place keys, all at once. Returns as `_place`.

        A key that finds both of its buckets full takes the place of another, which goes on to its other bucket.
        """
        random, tries = np.random.default_rng(0), _MOST_TRIES * len(keys) + _AT_ONCE
        is_second, failures = np.zeros(len(keys), bool), np.zeros(len(keys), np.int8)
        for _ in range(_MOST_ROUNDS):
            tries -= len(keys)
            if not len(keys) or tries < 0:
                break
            at = np.where(is_second, self._second(keys), self._first(keys))
            order = np.argsort(at, kind="stable")
            at, keys, rows = at[order], keys[order], rows[order]
            is_second, failures = is_second[order], failures[order]
            used = (_four_flags(self.keys[at] != self.empty) * np.uint32(0x01010101)) >> np.uint32(24)
            place = used + np.arange(len(at)) - np.searchsorted(at, at)
            fits = place < WAYS
            self.keys[at[fits], place[fits]], self.rows[at[fits], place[fits]] = keys[fits], rows[fits]
            at, keys, rows, is_second = at[~fits], keys[~fits], rows[~fits], ~is_second[~fits]
            failures = np.minimum(failures[~fits] + np.int8(1), np.int8(2))
            stuck = np.flatnonzero(failures == 2)
            if not len(stuck):
                continue
            buckets, first = np.unique(at[stuck], return_index=True)
            stuck = stuck[first]
            victim = random.integers(0, WAYS, len(buckets))
            out_keys, out_rows = self.keys[buckets, victim].copy(), self.rows[buckets, victim].copy()
            self.keys[buckets, victim], self.rows[buckets, victim] = keys[stuck], rows[stuck]
            left = np.ones(len(keys), bool)
            left[stuck] = False
            keys = np.concatenate([keys[left], out_keys])
            rows = np.concatenate([rows[left], out_rows])
            is_second = np.concatenate([is_second[left], self._first(out_keys) == buckets])
            failures = np.concatenate([np.minimum(failures[left], 1), np.ones(len(out_keys), np.int8)])
        return keys, rows


def _four_flags(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Return flags, bool [n, WAYS], as the bytes of integers, uint32 [n]."""
    return np.ascontiguousarray(flags).view("<u4")[:, 0]


def second_bucket(keys: _Integers, buckets: int) -> _Integers:
    """Return the second bucket of each key."""
    with np.errstate(over="ignore"):
        mixed = ((keys * np.int64(MIX)) >> np.int64(1)) & np.int64(2**63 - 1)
    return mixed % buckets
