"""CRC32C as the tensor bundle stores it, and the CRC of a concatenation from the CRCs of its pieces.

The CRC of a concatenation is the XOR of its pieces' CRCs, each multiplied by x^8 for every byte after it, modulo P. A
piece's product does not depend on the other pieces. So each reader of pieces can add up its own, and the sums can be
added too.

Source: tensorflow/core/lib/hash/crc32c.h (the mask); RFC 3720 appendix B (the polynomial P).
"""

import functools
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from tpuembed.formats.sstable import mask, unmask

__all__ = ["combine", "extend", "mask", "sum_of_pieces", "unmask", "value"]


def extend(crc: int, data: bytes | bytearray | memoryview | np.ndarray[Any, Any]) -> int:
    """Return the CRC32C of bytes with CRC `crc` followed by `data`. `data` is contiguous and is not copied."""
    if not len(data):
        return crc
    # google_crc32c refuses writable buffers except arrays; an array over the buffer costs nothing.
    return int(google_crc32c.extend(crc, data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)))


def value(data: bytes | bytearray | memoryview | np.ndarray[Any, Any]) -> int:
    """Return the CRC32C of `data`."""
    return extend(0, data)


def combine(crc1: int, crc2: int, len2: int) -> int:
    """Return the CRC32C of A + B, given `crc1` of A, `crc2` of B and B's length in bytes. O(log len2)."""
    return sum_of_pieces(np.array([crc1, crc2]), np.array([len2, 0]))


def sum_of_pieces(checksums: npt.NDArray[Any], bytes_after: npt.NDArray[Any]) -> int:
    """Return the contribution of pieces to the CRC32C of the bytes they belong to; 0 for no pieces.

    The XOR of the contributions of all pieces is that CRC.

    Args:
        checksums: uint32 [n], of each piece.
        bytes_after: int64 [n], the number of bytes after it.
    """
    products, left = checksums.astype(np.uint32), bytes_after.astype(np.int64)
    power = 0
    while left.any():
        odd = np.flatnonzero(left & 1)
        products[odd] = _multiply(products[odd], power)
        left >>= 1
        power += 1
    return int(np.bitwise_xor.reduce(products)) if len(products) else 0


def _multiply(values: npt.NDArray[np.uint32], power: int) -> npt.NDArray[np.uint32]:
    """Return `values` times x^(8 * 2^power) modulo P, with four table look-ups per value."""
    tables = _tables(power)
    found = tables[0][values & 255]
    for number in (1, 2, 3):
        found ^= tables[number][values >> np.uint32(8 * number) & 255]
    return found


@functools.cache
def _tables(power: int) -> npt.NDArray[np.uint32]:
    """Return uint32 [4, 256]: for each byte of a word, the product of each value of that byte."""
    words = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])
    if power:
        return _multiply(_multiply(words, power - 1), power - 1)
    # A byte after a message multiplies its CRC by x^8. The CRC of the byte itself is added.
    zero = extend(0, b"\0")
    return np.array([[extend(word, b"\0") ^ zero for word in row] for row in words.tolist()], np.uint32)
