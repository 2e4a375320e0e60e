"""The sorted string table of a bundle's index: LevelDB's format without compression.

A file consists of blocks and a footer. A block has entries (varint shared, varint rest, varint value size, key rest,
value), the offsets of the entries that share nothing with their predecessor, and their count; then a compression byte
and a masked CRC of both. The index block maps the last key of every data block to its place.

Source: https://github.com/google/leveldb/blob/main/doc/table_format.md, tensorflow/core/lib/io/table_builder.cc.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import google_crc32c

from tpuembed.formats.protobuf import MalformedError, UnsupportedError, read_varint, shown, varint

__all__ = ["mask", "read_table", "unmask", "write_table"]

_MASK_DELTA: Final = 0xA282EAD8
_MAGIC: Final = 0xDB4775248B80FB57
_FOOTER_BYTES: Final = 48
_TRAILER_BYTES: Final = 5
_RESTART_INTERVAL: Final = 16
_BLOCK_BYTES: Final = 1 << 18
_MAX_BLOCK_BYTES: Final = 1 << 28
_COMPRESSIONS: Final = {1: "snappy", 2: "zstd"}
_MAX_KEY_EXPANSION: Final = 64
"""The limit of the memory of a block's keys, in block sizes. With restarts every 16 entries it stays below 16."""


def mask(crc: int) -> int:
    """Return the stored form of `crc`: rotated and shifted, so that a CRC over bytes that contain CRCs stays strong."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def unmask(masked: int) -> int:
    """Return the CRC whose stored form is `masked`."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def read_table(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (key, value) pairs of the table in `file`, block by block, in strictly ascending order of keys.

    Raises:
        MalformedError: a CRC, an offset, a count or the order of keys is wrong.
        UnsupportedError: a block is compressed.
    """
    size = file.seek(0, os.SEEK_END)
    if size < _FOOTER_BYTES:
        raise MalformedError(f"it has {size} bytes, fewer than the {_FOOTER_BYTES} of the footer")
    footer = _read(file, size - _FOOTER_BYTES, _FOOTER_BYTES)
    if int.from_bytes(footer[40:], "little") != _MAGIC:
        raise MalformedError("it does not end in the magic number of a table")
    position = 0
    for _ in range(2):  # the handle of the meta index, which is empty in tensor bundles
        _, position = read_varint(footer[:40], position)
    last: bytes | None = None
    for _, handle in _entries(_block(file, size, footer[position:40])):
        for key, value in _entries(_block(file, size, handle)):
            if last is not None and key <= last:
                raise MalformedError(f"key {shown(key)} comes after {shown(last)}")
            last = key
            yield key, value


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise MalformedError(f"it ends at byte {offset + len(data)}, inside a block")
    return data


def _block(file: BinaryIO, file_size: int, handle: bytes) -> bytes:
    """Return the block at `handle` (varint offset, varint size), with its CRC checked."""
    offset, position = read_varint(handle, 0)
    size, _ = read_varint(handle, position)
    end = offset + size + _TRAILER_BYTES
    if end > file_size - _FOOTER_BYTES or size > _MAX_BLOCK_BYTES:
        raise MalformedError(f"a block should be at bytes [{offset}, {end}) of {file_size}")
    data = _read(file, offset, size + _TRAILER_BYTES)
    stored = int.from_bytes(data[-4:], "little")
    actual = mask(google_crc32c.value(data[:-4]))
    if stored != actual:
        raise MalformedError(f"the block at byte {offset} has CRC {actual:#010x}, but its trailer has {stored:#010x}")
    compression = data[-_TRAILER_BYTES]
    if compression:
        name = _COMPRESSIONS.get(compression, f"number {compression}")
        raise UnsupportedError(f"its blocks are compressed ({name})")
    return data[:-_TRAILER_BYTES]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise MalformedError(f"a block of {len(block)} bytes claims {restarts} restarts")
    position, key, budget = 0, b"", _MAX_KEY_EXPANSION * len(block)
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        size, position = read_varint(block, position)
        if shared > len(key) or rest + size > end - position:
            raise MalformedError(f"an entry of a block reaches past its end (byte {position} of {end})")
        key = key[:shared] + block[position : position + rest]
        budget -= len(key)
        if budget < 0:
            raise MalformedError("the keys of a block are absurdly long")
        yield key, block[position + rest : position + rest + size]
        position += rest + size


def write_table(file: BinaryIO, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Write `items`, sorted by key, as a table into the empty `file`."""
    index: list[tuple[bytes, bytes]] = []
    pending: list[tuple[bytes, bytes]] = []
    size = 0
    for item in items:
        pending.append(item)
        size += len(item[0]) + len(item[1])
        if size >= _BLOCK_BYTES:
            index.append((pending[-1][0], _write_block(file, pending)))
            pending, size = [], 0
    if pending:
        index.append((pending[-1][0], _write_block(file, pending)))
    handles = _write_block(file, []) + _write_block(file, index)
    file.write(handles.ljust(_FOOTER_BYTES - 8, b"\0") + _MAGIC.to_bytes(8, "little"))


def _write_block(file: BinaryIO, items: list[tuple[bytes, bytes]]) -> bytes:
    """Append a block and return its handle (varint offset, varint size)."""
    out, restarts, last = bytearray(), [], b""
    for index, (key, value) in enumerate(items):
        shared, pairs = 0, zip(last, key, strict=False)
        if index % _RESTART_INTERVAL:
            shared = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(last), len(key)))
        else:
            restarts.append(len(out))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    block = bytes(out) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    offset, typed = file.tell(), block + b"\0"
    file.write(typed + struct.pack("<I", mask(google_crc32c.value(typed))))
    return varint(offset) + varint(len(block))
