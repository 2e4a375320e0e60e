"""String tensors: their bytes in a data file and their CRC.

A string tensor is stored as varint lengths, the masked CRC of the lengths, and the strings. Both CRCs are computed with
each length as four little-endian bytes (eight if necessary) instead of the varint.

Source: WriteStringTensor in tensorflow/core/util/tensor_bundle/tensor_bundle.cc.
"""

import itertools
from collections.abc import Iterable
from typing import Final

from tpuembed.formats.protobuf import MalformedError, read_varint
from tpuembed.formats.tensor_bundle import crc

__all__ = ["decode_strings", "strings_crc"]

_CHECKSUM_BYTES: Final = 4
_MAX_VARINT_BYTES: Final = 10


def decode_strings(payload: bytes, count: int, crc32c: int) -> list[bytes]:
    """Return the `count` strings of `payload`. Raises MalformedError if lengths or a CRC are wrong; `crc32c` is the entry's."""
    if strings_crc([payload], count, len(payload)) != crc32c:
        raise MalformedError("its CRC is wrong")
    lengths, position = [], 0
    for _ in range(count):
        length, position = read_varint(payload, position)
        lengths.append(length)
    ends = itertools.accumulate(lengths, initial=position + _CHECKSUM_BYTES)
    return [payload[start:end] for start, end in itertools.pairwise(ends)]


def strings_crc(payload: Iterable[bytes], count: int, size: int) -> int:
    """Return the CRC32C that an entry records for a string tensor of `count` strings, whose `size` bytes come in
    pieces.

    Raises:
        MalformedError: the lengths do not fill the payload, or their own CRC is wrong.
    """
    pieces = iter(payload)
    lengths_crc, used, total, rest, position = 0, 0, 0, b"", 0
    for _ in range(count):
        while len(rest) - position < _MAX_VARINT_BYTES and (piece := next(pieces, b"")):
            rest, position = rest[position:] + piece, 0
        length, after = read_varint(rest, position)
        used, total, position = used + after - position, total + length, after
        lengths_crc = crc.extend(lengths_crc, length.to_bytes(4 if length < 1 << 32 else 8, "little"))
    rest = rest[position:]
    while len(rest) < _CHECKSUM_BYTES and (piece := next(pieces, b"")):
        rest += piece
    if used + _CHECKSUM_BYTES + total != size:
        raise MalformedError(f"{count} strings take {used + _CHECKSUM_BYTES + total} bytes, but the index has {size}")
    if rest[:_CHECKSUM_BYTES] != crc.mask(lengths_crc).to_bytes(_CHECKSUM_BYTES, "little"):
        raise MalformedError("the CRC of its lengths is wrong")
    actual = crc.extend(lengths_crc, rest)
    for piece in pieces:
        actual = crc.extend(actual, piece)
    return actual
