"""The CRC32C of pieces met in any order, against that of google-crc32c over the whole."""

import itertools

import google_crc32c
import numpy as np
import pytest

from tpuembed.formats.tensor_bundle import crc
from tpuembed.formats.tensor_bundle.crc import sum_of_pieces


@pytest.mark.parametrize("cuts", [0, 1, 7, 500])
def test_shuffled_pieces_have_the_crc_of_the_whole(cuts: int) -> None:
    rng = np.random.default_rng(cuts)
    data = rng.bytes(70_001)
    places = [0, *sorted(rng.integers(0, len(data) + 1, cuts).tolist()), len(data)]
    pieces = [(data[begin:end], len(data) - end) for begin, end in itertools.pairwise(places)]
    checksums = np.array([google_crc32c.value(piece) for piece, _ in pieces], np.uint32)
    after = np.array([size for _, size in pieces], np.int64)
    order = rng.permutation(len(pieces))
    half = len(order) // 2
    parts = [sum_of_pieces(checksums[chosen], after[chosen]) for chosen in (order[:half], order[half:])]
    assert parts[0] ^ parts[1] == google_crc32c.value(data)


def test_places_past_four_terabytes() -> None:
    """Against products of polynomials, bit by bit."""
    checksums, after = np.array([0xDEADBEEF, 7], np.uint32), np.array([2**42 + 12345, 2**43 - 1], np.int64)
    expected = [shifted(value, size) for value, size in zip(checksums.tolist(), after.tolist(), strict=True)]
    assert sum_of_pieces(checksums, after) == expected[0] ^ expected[1]
    assert crc.combine(0xDEADBEEF, 7, 2**42 + 12345) == expected[0] ^ 7


def shifted(value: int, count: int) -> int:
    """Return `value` times x^(8 count) modulo Castagnoli's polynomial, bit-reflected (RFC 3720 appendix B)."""
    square = 1 << 23
    while count:
        value = times(value, square) if count & 1 else value
        square = times(square, square)
        count >>= 1
    return value


def times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (0x82F63B78 if b & 1 else 0)
    return product


def test_no_pieces_have_the_sum_0() -> None:
    assert sum_of_pieces(np.empty(0, np.uint32), np.empty(0, np.int64)) == 0
