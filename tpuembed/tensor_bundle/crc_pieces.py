"""The CRC32C of bytes that are read in pieces, in any order.

`crc.combine` is linear: the CRC of a concatenation is the XOR of its pieces' CRCs, each multiplied by x^8 for every
byte after it. A piece's product does not depend on the other pieces. So each reader of pieces can add up its own, and
the sums can be added too.
"""

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.tensor_bundle import crc

__all__ = ["sum_of_pieces"]

_BYTES: Final = np.arange(256, dtype=np.uint32)


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
    tables = np.zeros((4, 256), np.uint32)
    for bit in range(32):
        column = np.uint32(crc.combine(1 << bit, 0, 1 << power))
        number, shift = divmod(bit, 8)
        tables[number] ^= np.where(_BYTES >> np.uint32(shift) & 1, column, np.uint32(0))
    return tables
