"""Finds a chunk of a matrix in its store, and reads its bytes by range.

The need is that of `chunk_stream`: TensorStore's arrays do not return the stored bytes of a chunk, only all of its values.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import google_crc32c

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointCorruptError, CheckpointError

__all__ = ["ChunkForm", "StoredValue", "chunk_form", "key_parts"]

_ENTRY: Final = struct.Struct("<QQ")
"""An entry of a shard's index: where a chunk begins, and its number of bytes (zarr v3, sharding codec)."""
_CRC_BYTES: Final = 4
_ABSENT: Final = (1 << 64) - 1
_OUT_OF_RANGE: Final = "OUT_OF_RANGE"
"""TensorStore's status code for a range that is not inside a value."""


@dataclasses.dataclass(frozen=True)
class ChunkForm:
    """The storage of a matrix' chunks: row after row, little endian, uncompressed or as one frame of zstd.

    Attributes:
        prefix, separator: of a chunk's key.
        level: of zstd; None: not compressed.
        shard: number of chunks in one value, [down, across]; None: each chunk has its own.
    """

    prefix: str
    separator: str
    level: int | None
    shard: tuple[int, int] | None

    def find(self, leaf: Leaf, kvstore: Any, row: int, column: int, size: int) -> "StoredValue | None":
        """Return the stored bytes of the chunk of these numbers, `size` bytes when decoded; None if it is not stored.

        Raises:
            CheckpointCorruptError: it is larger than it can be, or its shard's index is damaged.
        """
        most = size if self.level is None else size + size // 64 + 4096  # compression makes it this much larger
        down, across = self.shard or (1, 1)
        chunks = down * across
        bound = most if self.shard is None else chunks * most + chunks * _ENTRY.size + _CRC_BYTES
        key = f"{self.prefix}{row // down}{self.separator}{column // across}"
        value = StoredValue.find(leaf, kvstore, key, bound)
        if value is None or self.shard is None:
            return value
        return value.chunk(chunks, row % down * across + column % across)


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """Some bytes of a store: `size` of them from `start` on in the value `key`.

    Attributes:
        generation: TensorStore's version of the value, which changes when it is rewritten.
    """

    leaf: Leaf
    kvstore: Any
    key: str
    start: int
    size: int
    generation: bytes

    @classmethod
    def find(cls, leaf: Leaf, kvstore: Any, key: str, bound: int) -> Self | None:
        """Return the whole value, of at most `bound` bytes, or None if it does not exist.

        TensorStore does not report a size. It is found with empty ranges, which are refused beyond the end.
        """
        first = kvstore.read(key, byte_range=slice(0, 0)).result()
        if first.state == "missing":
            return None
        low, high = 0, bound + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _reaches(kvstore, key, middle) else (low, middle - 1)
        value = cls(leaf, kvstore, key, 0, low, first.stamp.generation)
        if low > bound:
            value.fail(f"has more bytes than the {bound} that it can have")
        return value

    def read(self, start: int, stop: int) -> bytes:
        """Return the existing bytes [start, stop).

        Raises:
            CheckpointError: the value was rewritten after it was found.
        """
        where = slice(self.start + start, self.start + stop)
        result = self.kvstore.read(self.key, byte_range=where, staleness_bound=-math.inf).result()
        if result.stamp.generation != self.generation or len(result.value) != stop - start:
            raise CheckpointError(
                f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown}: chunk {self.key!r} changed while "
                "it was read. Read the checkpoint when no program writes to it."
            )
        data: bytes = result.value
        return data

    def chunk(self, chunks: int, number: int) -> "StoredValue | None":
        """Return one chunk of a shard of `chunks` chunks, or None if it is not stored.

        Source: zarr v3, codec sharding_indexed, with its index at the end and a CRC32C of it.
        """
        index_bytes = chunks * _ENTRY.size + _CRC_BYTES
        if self.size < index_bytes:
            self.fail(f"has {self.size} bytes, but its index alone needs {index_bytes}")
        index = self.read(self.size - index_bytes, self.size)
        if google_crc32c.value(index[:-_CRC_BYTES]) != int.from_bytes(index[-_CRC_BYTES:], "little"):
            self.fail("has an index with a wrong checksum")
        start, size = _ENTRY.unpack_from(index, number * _ENTRY.size)
        if start == size == _ABSENT:
            return None
        if start + size > self.size:
            self.fail(f"has {self.size} bytes, but its index refers to [{start}, {start + size})")
        return dataclasses.replace(self, start=start, size=size)

    def fail(self, problem: str) -> NoReturn:
        """Raise CheckpointCorruptError: the chunk `problem`."""
        raise CheckpointCorruptError.of(
            f"checkpoint {self.leaf.item.folder}: array {self.leaf.shown}: chunk {self.key!r} {problem}"
        )


def _reaches(kvstore: Any, key: str, size: int) -> bool:
    """Returns True if the value has at least `size` bytes."""
    try:
        kvstore.read(key, byte_range=slice(size, size)).result()
    except ValueError as error:
        if str(error).startswith(_OUT_OF_RANGE):
            return False
        raise
    return True


def chunk_form(leaf: Leaf, handle: Any) -> ChunkForm | None:
    """Return the form of the opened array's chunks; None if it is not supported here, or not a matrix on a disk."""
    if len(handle.shape) != 2 or not isinstance(leaf.item.folder, Path):
        return None
    metadata = handle.spec().to_json()["metadata"]
    return _zarr3(metadata) if "codecs" in metadata else _zarr2(metadata)


def key_parts(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return the prefix of the keys of an array's chunks, and the separator of the numbers in them."""
    if "chunk_key_encoding" not in metadata:
        return "", metadata["dimension_separator"]
    encoding = metadata["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    return f"c{separator}" if is_default else "", separator


def _zarr2(metadata: Mapping[str, Any]) -> ChunkForm | None:
    compressor = metadata["compressor"]
    if metadata["order"] != "C" or metadata["filters"] is not None or not isinstance(metadata["dtype"], str):
        return None
    if compressor is not None and compressor["id"] != "zstd":
        return None
    level = None if compressor is None else int(compressor.get("level", 0))
    return ChunkForm(*key_parts(metadata), level, None)


def _zarr3(metadata: Mapping[str, Any]) -> ChunkForm | None:
    codecs, shard = metadata["codecs"], None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        how = codecs[0]["configuration"]
        sizes = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        shard = (sizes[0] // how["chunk_shape"][0], sizes[1] // how["chunk_shape"][1])
        if how["index_location"] != "end" or [codec["name"] for codec in how["index_codecs"]] != ["bytes", "crc32c"]:
            return None
        if not _is_little(how["index_codecs"][0]):
            return None
        codecs = how["codecs"]
    if not codecs or not _is_little(codecs[0]) or [codec["name"] for codec in codecs[1:]] not in ([], ["zstd"]):
        return None
    level = int(codecs[1]["configuration"].get("level", 0)) if codecs[1:] else None
    return ChunkForm(*key_parts(metadata), level, shard)


def _is_little(codec: Mapping[str, Any]) -> bool:
    return codec["name"] == "bytes" and codec.get("configuration", {}).get("endian") == "little"
