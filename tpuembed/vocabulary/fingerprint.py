"""The hash of names that graphs compute too: FarmHash's Fingerprint64, as `tf.strings.to_hash_bucket_fast` has it.

All names are hashed together, in numpy. Source of the algorithm: farmhashna::Hash64 in github.com/google/farmhash.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from tpuembed.vocabulary.text import Texts

__all__ = ["BUCKETS", "fingerprints", "hashes"]

_Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]
_Pair = tuple[_Words, _Words]

BUCKETS: Final = 2**63 - 1
"""A fingerprint is a hash modulo this number, so that it is an int64 of 0 or more."""

_K0, _K1, _K2 = np.uint64(0xC3A5C85C97CB3127), np.uint64(0xB492B66FBE98F273), np.uint64(0x9AE16A3B2F90404F)


def fingerprints(names: Texts, salt: bytes = b"") -> npt.NDArray[np.int64]:
    """Return the fingerprint of each name with `salt` before it, int64 [n]. Two names may have the same one."""
    found = hashes(names, salt)
    found %= np.uint64(BUCKETS)
    return found.view(np.int64)


def hashes(names: Texts, salt: bytes = b"") -> _Words:
    """Return the hash of each name with `salt` before it, uint64 [n], in bounded memory beside the names."""
    found, start = np.empty(len(names), np.uint64), 0
    for piece in names.pieces():
        found[start : start + len(piece)] = _hashes(piece.packed(salt) if salt else piece)
        start += len(piece)
    return found


def _hashes(names: Texts) -> _Words:
    # The short forms read up to 8 bytes beyond a name's end, and the result drops them.
    read, lengths, found = (
        _Memory(names.data, names.words),
        names.lengths.astype(np.int64),
        np.empty(len(names), np.uint64),
    )
    with np.errstate(over="ignore"):
        for lowest, highest, function in _FORMS:
            which = np.flatnonzero((lengths >= lowest) & (lengths <= highest))
            if len(which):
                found[which] = function(read, names.starts[which], lengths[which])
    return found


class _Memory:
    """Reads little-endian words at any place."""

    def __init__(self, data: npt.NDArray[np.uint8], words: _Words) -> None:
        self._data, self._words = data, words

    def word(self, places: _Places) -> _Words:
        """Return the 64 bits at each place."""
        return self._words[places]

    def half(self, places: _Places) -> _Words:
        """Return the 32 bits at each place."""
        return self.word(places) & np.uint64(0xFFFFFFFF)

    def byte(self, places: _Places) -> _Words:
        """Return the byte at each place."""
        return self._data[places].astype(np.uint64)


def _rotate(value: _Words, bits: int) -> _Words:
    return (value >> np.uint64(bits)) | (value << np.uint64(64 - bits))


def _mix(value: _Words) -> _Words:
    return value ^ (value >> np.uint64(47))


def _of_two(one: _Words, other: _Words, factor: _Words) -> _Words:
    mixed = _mix((one ^ other) * factor)
    return _mix((other ^ mixed) * factor) * factor


def _factor(lengths: _Places) -> _Words:
    return _K2 + lengths.astype(np.uint64) * np.uint64(2)


def _of_1_to_3(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    first, middle, last = (read.byte(starts + at) for at in (0, lengths >> 1, lengths - 1))
    low = first + (middle << np.uint64(8))
    high = lengths.astype(np.uint64) + (last << np.uint64(2))
    return _mix(low * _K2 ^ high * _K0) * _K2


def _of_4_to_7(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    first = lengths.astype(np.uint64) + (read.half(starts) << np.uint64(3))
    return _of_two(first, read.half(starts + lengths - 4), _factor(lengths))


def _of_8_to_16(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    factor = _factor(lengths)
    a, b = read.word(starts) + _K2, read.word(starts + lengths - 8)
    return _of_two(_rotate(b, 37) * factor + a, (_rotate(a, 25) + b) * factor, factor)


def _of_17_to_32(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    factor, ends = _factor(lengths), starts + lengths
    a, b = read.word(starts) * _K1, read.word(starts + 8)
    c, d = read.word(ends - 8) * factor, read.word(ends - 16) * _K2
    return _of_two(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, factor)


def _of_33_to_64(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    factor, ends = _factor(lengths), starts + lengths
    a, b = read.word(starts) * _K2, read.word(starts + 8)
    c, d = read.word(ends - 8) * factor, read.word(ends - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _of_two(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = read.word(starts + 16) * factor, read.word(starts + 24)
    g, h = (y + read.word(ends - 32)) * factor, (z + read.word(ends - 24)) * factor
    return _of_two(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


def _weak(read: _Memory, places: _Places, a: _Words, b: _Words) -> _Pair:
    w, x, y, z = (read.word(places + at) for at in (0, 8, 16, 24))
    a = a + w
    b = _rotate(b + a + z, 21)
    c = a
    a = a + x + y
    return a + z, b + _rotate(a, 44) + c


def _of_65_and_more(read: _Memory, starts: _Places, lengths: _Places) -> _Words:
    """Names of as many blocks of 64 bytes are hashed together."""
    found = np.empty(len(starts), np.uint64)
    blocks = (lengths - 1) // 64
    for count in np.unique(blocks):
        which = np.flatnonzero(blocks == count)
        found[which] = _of_blocks(read, starts[which], lengths[which], int(count))
    return found


def _of_blocks(read: _Memory, starts: _Places, lengths: _Places, blocks: int) -> _Words:
    count = len(starts)
    y = np.full(count, np.uint64(81) * _K1 + np.uint64(113))
    z = _mix(y * _K2 + np.uint64(113)) * _K2
    v, w = ((np.zeros(count, np.uint64),) * 2 for _ in range(2))
    x = np.full(count, np.uint64(81)) * _K2 + read.word(starts)
    place = starts
    for _ in range(blocks):
        x, y, z, v, w = _round(read, place, (x, y, z, v, w), _K1, np.uint64(1), np.uint64(1))
        place = place + 64
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    rest = ((lengths - 1) & 63).astype(np.uint64)
    place = place + ((lengths - 1) & 63) - 63
    w = (w[0] + rest, w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _round(read, place, (x, y, z, v, w), factor, np.uint64(9), np.uint64(9))
    return _of_two(_of_two(v[0], w[0], factor) + _mix(y) * _K0 + z, _of_two(v[1], w[1], factor) + x, factor)


def _round(
    read: _Memory,
    place: _Places,
    state: tuple[_Words, _Words, _Words, _Pair, _Pair],
    factor: _Words | np.uint64,
    of_w: np.uint64,
    of_v: np.uint64,
) -> tuple[_Words, _Words, _Words, _Pair, _Pair]:
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + read.word(place + 8), 37) * factor
    y = _rotate(y + v[1] + read.word(place + 48), 42) * factor
    x = x ^ (w[1] * of_w)
    y = y + v[0] * of_v + read.word(place + 40)
    z = _rotate(z + w[0], 33) * factor
    v = _weak(read, place, v[1] * factor, x + w[0])
    w = _weak(read, place + 32, z + w[1], y + read.word(place + 16))
    return z, y, x, v, w


_FORMS: Final = (
    (0, 0, lambda _, starts, __: np.full(len(starts), _K2)),
    (1, 3, _of_1_to_3),
    (4, 7, _of_4_to_7),
    (8, 16, _of_8_to_16),
    (17, 32, _of_17_to_32),
    (33, 64, _of_33_to_64),
    (65, 2**62, _of_65_and_more),
)
