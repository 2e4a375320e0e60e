"""The keys of rows. A row is one value, so that its length can be checked.

A key is `{TAG}MODEL:ARRAY:ROW`, such as `{01f}rec:9c0e6b1d2f3a:00000004d2`. Redis Cluster chooses the slot by the text in braces.

- A table in one slot would be on one node. Without braces, each row would have a slot of its own, and a request would have a
  command for each row. So the rows of every array are spread over 256 tags. Their slots divide all 16,384 evenly.
- The tags are the same for all arrays. Rows of several tables with one tag are read by one command.
- A row's tag is a hash of its number. Neither neighbours nor rows at a fixed distance share a tag.
- ARRAY is derived from the content of the array. So two versions share the rows of a table that did not change, and a key
  always has the same value.
"""

import binascii
import re
from typing import Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["BUCKETS", "TAGS", "ArrayKeys", "buckets_of", "check_model"]

_Bytes = npt.NDArray[np.uint8]

BUCKETS: Final = 256
"""The number of tags. It bounds the masters that share a table evenly, and the commands of one request."""
_SLOTS: Final = 16384
"""Slots of Redis Cluster."""
_MODEL: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_HASH: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: Knuth, The Art of Computer Programming, volume 3, 6.4."""
_ROW_BYTES: Final = 5
"""Bytes of a row's number in a key, as twice as many hexadecimal digits."""
_HEX: Final = np.frombuffer(b"".join(b"%02x" % value for value in range(256)), "<u2")


def _tags() -> tuple[bytes, ...]:
    """Return the first tag for each 256th of the slots. A slot is the CRC16 of the tag: see the cluster specification."""
    found: dict[int, bytes] = {}
    for number in range(16**3):
        tag = b"%03x" % number
        found.setdefault(binascii.crc_hqx(tag, 0) % _SLOTS * BUCKETS // _SLOTS, tag)
    return tuple(b"{%s}" % found[bucket] for bucket in range(BUCKETS))


TAGS: Final = _tags()
"""The start of the keys of each bucket."""
_TAG_TABLE: Final = np.frombuffer(b"".join(TAGS), np.uint8).reshape(BUCKETS, -1)


def check_model(name: str) -> str:
    """Return the name of a model.

    Raises:
        ConfigError: it cannot be a part of a key.
    """
    if not _MODEL.fullmatch(name):
        raise ConfigError(
            f"name {name!r}: the name of a model in Redis has up to 100 letters, digits, '_', '.' and '-'. Give another name."
        )
    return name


def buckets_of(rows: npt.NDArray[np.int64]) -> _Bytes:
    """Return the bucket [n] of each of `rows` [n]."""
    return (rows.astype(np.uint64) * _HASH >> np.uint64(56)).astype(np.uint8)


class ArrayKeys:
    """The keys of one array."""

    def __init__(self, model: str, array: str) -> None:
        self._middle = np.frombuffer(f"{model}:{array}:".encode(), np.uint8)

    def of(self, rows: npt.NDArray[np.int64]) -> _Bytes:
        """Return the keys [n, length] of `rows` [n]. All keys of arrays of one model have one length."""
        tags = _TAG_TABLE[buckets_of(rows)]
        middle = np.broadcast_to(self._middle, (len(rows), len(self._middle)))
        last = np.ascontiguousarray(rows, ">i8").view(np.uint8).reshape(-1, 8)[:, -_ROW_BYTES:]
        return np.concatenate([tags, middle, _HEX[last].view(np.uint8).reshape(len(rows), 2 * _ROW_BYTES)], axis=1)
