"""String tensors: their bytes in a data file and their CRC.

A string tensor is stored as varint lengths, the masked CRC of the lengths, and the strings. Both CRCs are computed with
each length as four little-endian bytes (eight if necessary) instead of the varint.

Source: WriteStringTensor in tensorflow/core/util/tensor_bundle/tensor_bundle.cc.
"""

import itertools

from tpuembed.protobuf import MalformedError, read_varint
from tpuembed.tensor_bundle import crc

__all__ = ["decode_strings"]


def decode_strings(payload: bytes, count: int, crc32c: int) -> list[bytes]:
    """Return the `count` strings of `payload`.

    Raises:
        MalformedError: the lengths do not fill the payload, or a CRC is wrong; `crc32c` is the entry's.
    """
    if count > len(payload):
        raise MalformedError(f"{count} strings cannot fit in {len(payload)} bytes")
    lengths, position = [], 0
    for _ in range(count):
        length, position = read_varint(payload, position)
        lengths.append(length)
    if position + 4 + sum(lengths) != len(payload):
        raise MalformedError(
            f"{count} strings take {position + 4 + sum(lengths)} bytes, but the index has {len(payload)}"
        )
    lengths_crc = crc.value(b"".join(length.to_bytes(4 if length < 1 << 32 else 8, "little") for length in lengths))
    checksum = payload[position : position + 4]
    if checksum != crc.mask(lengths_crc).to_bytes(4, "little"):
        raise MalformedError("the CRC of its lengths is wrong")
    if crc.extend(crc.extend(lengths_crc, checksum), payload[position + 4 :]) != crc32c:
        raise MalformedError("its CRC is wrong")
    ends = itertools.accumulate(lengths, initial=position + 4)
    return [payload[start:end] for start, end in itertools.pairwise(ends)]
