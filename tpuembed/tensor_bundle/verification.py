"""Computes the checksums of everything in a bundle, piece by piece in bounded memory."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import BinaryIO, Final

import numpy as np

from tpuembed.files import open_stream
from tpuembed.protobuf import MalformedError, read_varint
from tpuembed.tensor_bundle import crc
from tpuembed.tensor_bundle.dtypes import STRING
from tpuembed.tensor_bundle.entries import Entry, Slice
from tpuembed.tensor_bundle.reader import Bundle

__all__ = ["Damage", "damaged_parts", "stream_crc", "strings_crc", "unchecked_keys"]

_PIECE_BYTES: Final = 16 << 20
_CHECKSUM_BYTES: Final = 4
_MAX_VARINT_BYTES: Final = 10
_VARIANT: Final = "variant"

OnRead = Callable[[int], None]
"""Called with the number of bytes just read."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """A tensor, or one of its slices, whose bytes do not match their checksum.

    Attributes:
        name: of the tensor.
        file: its data file.
        reason: the fault, in one line.
    """

    name: str
    file: str
    reason: str


def unchecked_keys(bundle: Bundle) -> list[str]:
    """Return the tensors whose kind of checksum is not supported."""
    return sorted(key for key, entry in bundle.entries.items() if entry.dtype == _VARIANT)


def damaged_parts(bundle: Bundle, on_read: OnRead, without: Container[str] = ()) -> Iterator[Damage]:
    """Read every data file once, except for the tensors `without`, and yield what does not match its checksum."""
    parts = [
        (part.shard, part.offset, key, entry, part)
        for key, entry in bundle.entries.items()
        if entry.dtype != _VARIANT and key not in without
        for part in entry.parts()
    ]
    for shard, group in itertools.groupby(sorted(parts, key=lambda item: item[:3]), key=lambda item: item[0]):
        path = bundle.data_path(shard)
        try:
            file = open_stream(path)
        except OSError as error:
            yield from (Damage(key, str(path), f"cannot be read: {error.strerror}") for _, _, key, _, _ in group)
            continue
        with file:
            for _, _, key, entry, part in group:
                reason = _damage(file, entry, part, on_read)
                if reason is not None:
                    yield Damage(key, str(path), reason)


def _damage(file: BinaryIO, entry: Entry, part: Slice, on_read: OnRead) -> str | None:
    place = f"bytes [{part.offset}, {part.offset + part.size})"
    try:
        pieces = _pieces(file, part.offset, part.size, on_read)
        if entry.dtype == STRING:
            actual = strings_crc((piece.tobytes() for piece in pieces), math.prod(part.shape), part.size)
        else:
            actual = _crc(pieces)
    except (MalformedError, EOFError) as error:
        return f"{place}: {error}"
    except OSError as error:
        return f"{place} cannot be read: {error.strerror}"
    if actual == part.crc32c:
        return None
    return f"{place} have CRC32C {actual:#010x}, but the index has {part.crc32c:#010x}"


def stream_crc(file: BinaryIO, offset: int, size: int, on_read: OnRead) -> int:
    """Return the CRC32C of `size` bytes at `offset`. Raises EOFError if the file ends before."""
    return _crc(_pieces(file, offset, size, on_read))


def _crc(pieces: Iterable[memoryview]) -> int:
    actual = 0
    for piece in pieces:
        actual = crc.extend(actual, piece)
    return actual


def _pieces(file: BinaryIO, offset: int, size: int, on_read: OnRead) -> Iterator[memoryview]:
    """Yield the bytes at `offset`. Each piece is valid until the next."""
    file.seek(offset)
    buffer = np.empty(min(size, _PIECE_BYTES), np.uint8).data
    for done in range(0, size, _PIECE_BYTES):
        piece = buffer[: size - done]
        count = file.readinto(piece)  # type: ignore[attr-defined]
        if count != len(piece):
            raise EOFError(f"the file ends at byte {offset + done + count}")
        on_read(count)
        yield piece


def strings_crc(payload: Iterable[bytes], count: int, size: int) -> int:
    """Return the CRC32C that an entry records for a string tensor of `count` strings, whose `size` bytes come in
    pieces.

    Raises:
        MalformedError: the lengths do not fill the payload, or their own CRC is wrong.
    """
    pieces = iter(payload)
    lengths_crc, rest, used, total = _lengths(pieces, count)
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


def _lengths(pieces: Iterator[bytes], count: int) -> tuple[int, bytes, int, int]:
    """Read `count` lengths. Return their CRC, the rest of the last piece, the bytes they take, and their sum."""
    checksum = used = total = 0
    rest, position = b"", 0
    for _ in range(count):
        while len(rest) - position < _MAX_VARINT_BYTES and (piece := next(pieces, b"")):
            rest, position = rest[position:] + piece, 0
        before = position
        length, position = read_varint(rest, position)
        used, total = used + position - before, total + length
        checksum = crc.extend(checksum, length.to_bytes(4 if length < 1 << 32 else 8, "little"))
    return checksum, rest[position:], used, total
