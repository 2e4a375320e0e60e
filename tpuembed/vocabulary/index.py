"""A hash table of int64 keys in arrays, so that a graph can look names up in mapped files with stock operations.

It is a bucketed cuckoo table: a key lies in one of two buckets, each with room for four. The form was measured
against others; see docs/performance.md.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

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
_LEAST_BUCKETS: Final = 8
_MOST_ROUNDS: Final = 2000


class Index:
    """Finds the rows of keys, which are all different.

    Attributes:
        keys: int64 [buckets, WAYS].
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
        found = np.full(len(keys), NONE, np.int64)
        for buckets in (self._first(keys), self._second(keys)):
            hits = self.keys[buckets] == keys[:, None]
            which = np.flatnonzero(hits.any(1))
            found[which] = self.rows[buckets[which], hits[which].argmax(1)]
        return found

    def add(self, keys: _Integers, rows: _Rows) -> None:
        """Add keys that are not in the table. A table that becomes too full is made anew, twice as large."""
        if (keys == self.empty).any():
            self._choose_empty(keys)
        count = self._count + len(keys)
        if count <= self.keys.size * _FILL:
            keys, rows = self._place(keys, rows)
        if len(keys):
            taken = self.keys != self.empty
            keys, rows = np.concatenate([self.keys[taken], keys]), np.concatenate([self.rows[taken], rows])
            self._make(keys, rows, max(count, 2 * self._count))
        self._count = count

    def _choose_empty(self, keys: _Integers) -> None:
        taken, before = set(self.keys.ravel().tolist()) | set(keys.tolist()), self.empty
        while self.empty in taken:
            self.empty -= 1
        self.keys[self.keys == before] = self.empty

    def _make(self, keys: _Integers, rows: _Rows, room: int) -> None:
        buckets = max(_LEAST_BUCKETS, int(room / WAYS / _FILL) + 1)
        while True:
            self.keys = np.full((buckets, WAYS), self.empty, np.int64)
            self.rows = np.full((buckets, WAYS), NONE, np.int32)
            if not len(self._place(keys, rows)[0]):
                return
            buckets += buckets // 8

    def _first(self, keys: _Integers) -> _Integers:
        return keys % len(self.keys)

    def _second(self, keys: _Integers) -> _Integers:
        return second_bucket(keys, len(self.keys))

    def _place(self, keys: _Integers, rows: _Rows) -> tuple[_Integers, _Rows]:
        """Place all keys, many at once. Returns those without a place; they may be others, which were in the table.

        A key that finds both of its buckets full takes the place of another, which goes on to its other bucket.
        """
        random, used = np.random.default_rng(0), (self.keys != self.empty).sum(1)
        is_second, failures = np.zeros(len(keys), bool), np.zeros(len(keys), np.int8)
        for _ in range(_MOST_ROUNDS):
            if not len(keys):
                break
            at = np.where(is_second, self._second(keys), self._first(keys))
            order = np.argsort(at, kind="stable")
            at, keys, rows = at[order], keys[order], rows[order]
            is_second, failures = is_second[order], failures[order]
            place = used[at] + np.arange(len(at)) - np.searchsorted(at, at)
            fits = place < WAYS
            self.keys[at[fits], place[fits]], self.rows[at[fits], place[fits]] = keys[fits], rows[fits]
            np.add.at(used, at[fits], 1)
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


def second_bucket(keys: _Integers, buckets: int) -> _Integers:
    """Return the second bucket of each key."""
    with np.errstate(over="ignore"):
        mixed = ((keys * np.int64(MIX)) >> np.int64(1)) & np.int64(2**63 - 1)
    return mixed % buckets
