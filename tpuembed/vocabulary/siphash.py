"""The keyed hash of unknown names: SipHash-2-4, as `tf.strings.to_hash_bucket_strong` has it.

Without the key nobody can choose names of one bucket. Source of the algorithm: Aumasson and Bernstein, "SipHash: a fast
short-input PRF", section 2. All names are hashed together, in numpy.
"""

import numpy as np
import numpy.typing as npt

from tpuembed.vocabulary.text import Texts

__all__ = ["keyed_hashes"]

_Words = npt.NDArray[np.uint64]

_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def keyed_hashes(names: Texts, key: tuple[int, int]) -> _Words:
    """Return the hash of each name, uint64 [n]. `key` is two integers of 64 bits."""
    found, lengths = np.empty(len(names), np.uint64), names.lengths.astype(np.int64)
    for words in np.unique(lengths // 8).tolist():
        which = np.flatnonzero(lengths // 8 == words)
        found[which] = _of_words(names.words, names.starts[which], lengths[which], words, key)
    return found


def _of_words(
    read: _Words, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], words: int, key: tuple[int, int]
) -> _Words:
    """Return the hashes of names that all have so many whole words of 8 bytes, and up to 7 bytes more."""
    v = [np.full(len(starts), start ^ (key[at % 2] % 2**64), np.uint64) for at, start in enumerate(_START)]
    with np.errstate(over="ignore"):
        for at in range(words + 1):
            word = read[starts + 8 * at]
            if at == words:  # what is left of the name, and the last byte of its length
                size = lengths.astype(np.uint64)
                word = word & ((np.uint64(1) << (size % 8 * 8)) - np.uint64(1)) | size << np.uint64(56)
            v[3] ^= word
            _round(v)
            _round(v)
            v[0] ^= word
        v[2] ^= np.uint64(0xFF)
        for _ in range(4):
            _round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _round(v: list[_Words]) -> None:
    """Change the state by one SipRound."""
    for one, other, bits, turned in ((0, 1, 13, 32), (2, 3, 16, 0), (0, 3, 21, 0), (2, 1, 17, 32)):
        v[one] += v[other]
        v[other] = _rotate(v[other], bits) ^ v[one]
        v[one] = _rotate(v[one], turned) if turned else v[one]


def _rotate(value: _Words, bits: int) -> _Words:
    return value << np.uint64(bits) | value >> np.uint64(64 - bits)
