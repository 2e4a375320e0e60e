"""CRC32C as the tensor bundle stores it, and the CRC of a concatenation from the CRCs of its parts.

Source: tensorflow/core/lib/hash/crc32c.h (the mask); RFC 3720 appendix B (the polynomial).
"""

from typing import Any, Final

import google_crc32c
import numpy as np

__all__ = ["combine", "extend", "mask", "unmask", "value"]

_MASK_DELTA: Final = 0xA282EAD8
_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli, bit-reflected: bit 31 is the coefficient of x^0
_ONE: Final = 1 << 31
_X_TO_THE_8: Final = 1 << 23


def mask(crc: int) -> int:
    """Return the stored form of `crc`: rotated and shifted, so that a CRC over bytes that contain CRCs stays strong."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def unmask(masked: int) -> int:
    """Return the CRC whose stored form is `masked`."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


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
    """Return the CRC32C of A + B, given `crc1` of A, `crc2` of B and B's length in bytes. O(log len2).

    Source: a CRC is the message as a polynomial modulo P, so A shifts by x^(8 len2) and the parts add; the initial
    value and the
    final inversion cancel.
    """
    return _multiply(crc1, _power_of_x8(len2)) ^ crc2


def _multiply(a: int, b: int) -> int:
    """Return a times b modulo P over GF(2)."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x8(exponent: int) -> int:
    """Return x^(8 exponent) modulo P, by repeated squaring."""
    result, square = _ONE, _X_TO_THE_8
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
