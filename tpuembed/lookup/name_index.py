"""The index of a vocabulary: a hash table in arrays, so that a graph can look names up in mapped files with stock operations.

It is a bucketed cuckoo table of int64 keys: integers are their own keys, and strings have fingerprints. A key lies in one of two
buckets, each with room for four. The form was measured against others; see docs/performance.md.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.vocabulary import Vocabulary

__all__ = ["BUCKETS", "MIX", "NONE", "WAYS", "Index", "NameIndex", "salt_text"]

_Integers = npt.NDArray[np.int64]
_Rows = npt.NDArray[np.int32]

BUCKETS: Final = 2**63 - 1
"""A fingerprint is a hash modulo this number, so that it is an int64 of 0 or more."""
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
_MOST_SALTS: Final = 100
_MOST_TRIES: Final = 40
"""How often a key is tried, on the average of many, before the table is taken to be too full."""


class NameIndex:
    """Finds the names of a vocabulary in a graph.

    Attributes:
        salt: the number that `salt_text` makes of, what is put before each string when it is hashed. It is chosen so that no two
            names have one fingerprint.
        keys: int64 [buckets, WAYS], see `Index`.
        numbers: int32 [buckets, WAYS], at the same places the numbers of the names, -1 if there is none. The row of a name is
            `oov_buckets` more than its number.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Index the names of `vocabulary`. Raises ConfigError if they, or their hashes, were made to collide."""
        names = vocabulary.all_names
        for self.salt in range(_MOST_SALTS):
            keys = names if vocabulary.dtype == "int64" else fingerprints(names, salt_text(self.salt))
            if len(np.unique(keys)) == len(keys):
                break
        else:
            raise ConfigError("vocabulary: its names were made to have equal hashes. Use integers of your own hash.")
        index = Index(keys)
        self.keys, self.numbers = index.keys, index.rows


def salt_text(number: int) -> bytes:
    """Return the text before each name when it is hashed, of a salt's number. Number 0 has none."""
    return str(number).encode() + b"\0" if number else b""


def fingerprints(names: npt.NDArray[Any], salt: bytes) -> _Integers:
    """Return the fingerprint of each string with `salt` before it, int64 [n]. Two strings may have the same one."""
    found = np.empty(len(names), np.int64)
    with tf.init_scope(), tf.device("CPU"):
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE].tolist()
            given = tf.constant([salt + name for name in some] if salt else some, tf.string)
            found[start : start + len(some)] = tf.strings.to_hash_bucket_fast(given, BUCKETS).numpy()
    return found


class Index:
    """Finds the rows of keys, which are all different.

    Attributes:
        keys: int64 [buckets, WAYS]. The keys of a bucket stand before its empty places.
        rows: int32 [buckets, WAYS], the row of each key, at the same place.
        empty: what a place without a key has in `keys`. Its row is NONE. It is no key.
    """

    def __init__(self, keys: _Integers) -> None:
        """Give `keys`, int64 [n], the rows 0, 1, 2 and so on. Raises ConfigError if they were made to collide."""
        self.empty = _not_among(keys)
        buckets = max(_LEAST_BUCKETS, int(len(keys) / WAYS / _FILL) + 1)
        most = _MOST_TIMES * buckets
        while buckets <= most:
            while math.gcd(buckets, _SMALL_FACTORS) > 1:
                buckets += 1
            self.keys = np.full((buckets, WAYS), self.empty, np.int64)
            self.rows = np.full((buckets, WAYS), NONE, np.int32)
            rows, pieces = np.arange(len(keys), dtype=np.int32), range(0, len(keys), _AT_ONCE)
            if all(self._place(keys[at : at + _AT_ONCE], rows[at : at + _AT_ONCE]) for at in pieces):
                return
            buckets += buckets // 8
        raise ConfigError("vocabulary: its keys were made to collide, so that some find no place. Hash the names.")

    def _first(self, keys: _Integers) -> _Integers:
        return keys % len(self.keys)

    def _second(self, keys: _Integers) -> _Integers:
        with np.errstate(over="ignore"):
            mixed = ((keys * np.int64(MIX)) >> np.int64(1)) & np.int64(2**63 - 1)
        return mixed % len(self.keys)

    def _place(self, keys: _Integers, rows: _Rows) -> bool:
        """Place keys, all at once. Returns False if there is no place for one of them.

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
            used = np.count_nonzero(self.keys[at] != self.empty, axis=1)
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
        return not len(keys)


def _not_among(keys: _Integers) -> int:
    """Return NONE, or the highest number below it that is no key."""
    if not (keys == NONE).any():
        return NONE
    below, count = NONE - 1, 1 << 10
    while True:
        taken = np.zeros(count, bool)
        taken[below - keys[(keys <= below) & (keys > below - count)]] = True
        free = np.flatnonzero(~taken)
        if len(free):
            return below - int(free[0])
        below, count = below - count, 2 * count
