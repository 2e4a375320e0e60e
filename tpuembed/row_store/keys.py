"""The keys of rows. A row is one value, so that its length can be checked.

A key is `{TAG}MODEL:ARRAY:ROW`, such as `{01f}rec:9c0e6b1d2f3a8b1c:00000004d2`. Redis Cluster chooses the slot by the text in
braces.

- A table in one slot would be on one node. Without braces, each row would have a slot of its own, and a request would have a
  command for each row. So the rows of every array are spread over 64 tags, and a request has one command for each tag.
- A row's tag is a hash of its number. Neither neighbours nor rows at a fixed distance share a tag.
- ARRAY is a digest of the array's content. So two versions share the rows of a table that did not change, and a key always has
  the same value.
"""

import binascii
import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["RowKeys", "check_model", "hash_of"]

_Bytes = npt.NDArray[np.uint8]

_TAG_COUNT: Final = 64
"""It bounds the commands of a request. With 12 masters, the fullest one has an eighth more rows than the average."""
_SLOTS: Final = 16384
_MODEL: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_HASH: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: Knuth, The Art of Computer Programming, volume 3, 6.4."""
_ROW_BYTES: Final = 5
"""Bytes of a row's number in a key, as twice as many hexadecimal digits."""
_HEX: Final = np.frombuffer(b"".join(b"%02x" % value for value in range(256)), "<u2")


def _tags() -> _Bytes:
    """Return the first tag for each 64th of the slots. A slot is the CRC16 of the tag: see the cluster specification."""
    found: dict[int, bytes] = {}
    for number in range(16**3):
        tag = b"%03x" % number
        found.setdefault(binascii.crc_hqx(tag, 0) % _SLOTS * _TAG_COUNT // _SLOTS, tag)
    tags = b"".join(b"{%s}" % found[place] for place in range(_TAG_COUNT))
    return np.frombuffer(tags, np.uint8).reshape(_TAG_COUNT, -1)


_TAGS: Final = _tags()


def check_model(name: str) -> str:
    """Return the name of a model. Raises ConfigError if it cannot be a part of a key."""
    if not _MODEL.fullmatch(name):
        raise ConfigError(
            f"name {name!r}: the name of a model in Redis has up to 100 letters, digits, '_', '.' and '-'. Give another name."
        )
    return name


def hash_of(model: str) -> str:
    """Return the key of the hash that says what is published of a model.

    Its field `publisher` has the token of the publish that began last. `array:ID` has how many rows of an array there are, and how
    many of them are written. `version:N` has when version N was published, and its arrays.
    """
    return f"tpuembed:{model}"


@dataclasses.dataclass(frozen=True)
class RowKeys:
    """The keys of n rows.

    Attributes:
        names: uint8 [n, length].
        tags: the number of each key's tag [n].
    """

    names: _Bytes
    tags: _Bytes

    @classmethod
    def of(cls, model: str, rows: Iterable[tuple[str, npt.NDArray[np.int64]]]) -> Self:
        """Return the keys of `rows`, int64 [n] by the text of their array, after each other."""
        parts = [_keys(f"{model}:{array}:", numbers) for array, numbers in rows]
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def texts(self, order: Any = ...) -> list[bytes]:
        """Return the keys in this order. A key has no zero byte, at which numpy would cut it."""
        texts: list[bytes] = self.names[order].view(f"S{self.names.shape[1]}")[:, 0].tolist()
        return texts


def _keys(middle: str, rows: npt.NDArray[np.int64]) -> tuple[_Bytes, _Bytes]:
    tags = ((rows.astype(np.uint64) * _HASH) >> np.uint64(58)).astype(np.uint8)
    text = np.frombuffer(middle.encode(), np.uint8)
    last = np.ascontiguousarray(rows, ">i8").view(np.uint8).reshape(-1, 8)[:, -_ROW_BYTES:]
    digits = _HEX[last].view(np.uint8).reshape(len(rows), 2 * _ROW_BYTES)
    return np.concatenate([_TAGS[tags], np.broadcast_to(text, (len(rows), len(text))), digits], axis=1), tags
