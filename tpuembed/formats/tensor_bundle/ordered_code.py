"""Byte strings that sort in the order of the values they encode; the keys of tensor slices consist of them.

Source: tensorflow/core/lib/strings/ordered_code.h, and EncodeTensorNameSlice in
tensorflow/core/util/saved_tensor_slice_util.cc.
"""

from collections.abc import Sequence

__all__ = ["FULL_EXTENT", "encode_signed", "encode_string", "encode_unsigned", "slice_key"]

FULL_EXTENT = -1
"""The length that stands for "the whole dimension"."""

_ESCAPES = {0x00: b"\x00\xff", 0xFF: b"\xff\x00"}


def encode_unsigned(value: int) -> bytes:
    """Encode the number of bytes, and then the bytes, big-endian."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def encode_string(value: bytes) -> bytes:
    """Encode `value` with 00 and ff escaped, and the terminator 00 01."""
    return b"".join(_ESCAPES.get(byte, bytes([byte])) for byte in value) + b"\x00\x01"


def encode_signed(value: int) -> bytes:
    """Encode an int64. n bytes have 7n - 1 bits; the leading n - 1 bits after the sign bit encode n, inverted for
    negatives.
    """
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // 7 + 1
    header = ((1 << size) - 1) << (7 * size)  # n ones in front of 7n bits: the sign bit, flipped, and the length
    bits = 8 * size
    return ((value & ((1 << bits) - 1)) ^ header).to_bytes(size, "big")


def slice_key(name: bytes, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Return the index key of the slice [starts, starts + lengths) of tensor `name`; FULL_EXTENT is the whole
    dimension.
    """
    dims = b"".join(encode_signed(start) + encode_signed(length) for start, length in zip(starts, lengths, strict=True))
    return encode_unsigned(0) + encode_string(name) + encode_unsigned(len(starts)) + dims
