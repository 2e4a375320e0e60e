"""The entry of one tensor in a bundle's index, and its protocol buffers.

Source: tensorflow/core/protobuf/tensor_bundle.proto, tensor_shape.proto, tensor_slice.proto.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from tpuembed.formats.dtypes import OPAQUE, STRING, dtype_name, dtype_number, numpy_dtype
from tpuembed.formats.protobuf import (
    MalformedError,
    Message,
    UnsupportedError,
    bytes_field,
    fixed32_field,
    varint_field,
)
from tpuembed.formats.tensor_bundle import crc

__all__ = [
    "FULL_EXTENT",
    "Entry",
    "Region",
    "Slice",
    "decode_entry",
    "decode_header",
    "encode_entries",
    "encode_header",
    "encode_signed",
    "slice_key",
]

_VERSION: Final = 1
_BIG_ENDIAN: Final = 1
_MAX_BYTES: Final = 1 << 62
_MAX_DIMS: Final = 32
"""The most dimensions that every numpy version supports."""
FULL_EXTENT: Final = -1
"""The length that stands for "the whole dimension"."""
_ESCAPES: Final = {0x00: b"\x00\xff", 0xFF: b"\xff\x00"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A box of a tensor and the place of its bytes.

    Attributes:
        start, shape: the box, one number per dimension.
        shard, offset, size: `size` bytes at `offset` of data file number `shard`, row-major, little-endian.
        crc32c: of those bytes, unmasked.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor.

    Attributes:
        dtype: as numpy or ml_dtypes spell it; or "string".
        shape: of the whole tensor.
        shard, offset, size, crc32c: as in Slice; all 0 if the tensor has slices.
        slices: the boxes that tile the tensor; empty for a tensor in one piece.
        holes: the reason why it cannot be read, if its slices cover only a part of it; else empty. TensorFlow 1 writes
            such tensors: the slots of partitioned variables whose optimizer was created in a variable_scope.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc32c: int = 0
    slices: tuple[Slice, ...] = ()
    holes: str = ""

    def parts(self) -> tuple[Slice, ...]:
        """Return the slices; for a tensor in one piece, one slice that covers it."""
        if self.slices:
            return self.slices
        start, place = (0,) * len(self.shape), {"shard": self.shard, "offset": self.offset, "size": self.size}
        return (Slice(start=start, shape=self.shape, crc32c=self.crc32c, **place),)


class Region(NamedTuple):
    """A slice as the tensor's own entry lists it: the key of its entry, and its box."""

    key: bytes
    start: tuple[int, ...]
    shape: tuple[int, ...]


def slice_key(name: bytes, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Return the index key of the slice [starts, starts + lengths) of tensor `name`.

    Keys sort in the order of what they encode: a zero, the name with 00 and ff escaped and the terminator 00 01, the rank after
    the number of its bytes, and the box.

    Source: tensorflow/core/lib/strings/ordered_code.h, and EncodeTensorNameSlice in
    tensorflow/core/util/saved_tensor_slice_util.cc.
    """
    escaped = b"".join(_ESCAPES.get(byte, bytes([byte])) for byte in name)
    rank = bytes([1, len(starts)]) if starts else b"\0"
    dims = b"".join(encode_signed(start) + encode_signed(length) for start, length in zip(starts, lengths, strict=True))
    return b"\0" + escaped + b"\0\1" + rank + dims


def encode_signed(value: int) -> bytes:
    """Encode an int64. n bytes have 7n - 1 bits; the n - 1 bits after the sign encode n, inverted for negatives."""
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // 7 + 1
    header = ((1 << size) - 1) << (7 * size)  # n ones in front of 7n bits: the sign bit, flipped, and the length
    return ((value & ((1 << 8 * size) - 1)) ^ header).to_bytes(size, "big")


def decode_header(data: bytes) -> int:
    """Return the number of data files in a BundleHeaderProto."""
    header = Message(data)
    if header.integer(2) == _BIG_ENDIAN:
        raise UnsupportedError("its tensors are big-endian")
    if header.message(3).signed(2) > _VERSION:
        raise UnsupportedError(
            f"it needs a reader of bundle version {header.message(3).signed(2)}, but this reader supports version 1"
        )
    if header.signed(1) < 1:
        raise MalformedError(f"it claims {header.signed(1)} data files")
    return header.signed(1)


def encode_header(num_shards: int) -> bytes:
    """Return a BundleHeaderProto with its fields in order: num_shards, (little-endian), version.producer."""
    return varint_field(1, num_shards) + bytes_field(3, varint_field(1, _VERSION))


def decode_entry(key: bytes, data: bytes) -> tuple[Entry, tuple[Region, ...]]:
    """Return the entry of a BundleEntryProto at `key`, its size checked against dtype and shape, and its slices."""
    proto = Message(data)
    dtype, of_shape, slices = dtype_name(proto.integer(1)), proto.message(2), proto.messages(7)
    if of_shape.integer(3):
        raise MalformedError("its rank is unknown")
    dims = of_shape.messages(2)
    if len(dims) > _MAX_DIMS:
        raise UnsupportedError(f"it has {len(dims)} dimensions (the most is {_MAX_DIMS})")
    shape, shard, offset, size = tuple(dim.signed(1) for dim in dims), *(proto.signed(number) for number in (3, 4, 5))
    if min(shard, offset, size, *shape) < 0:
        raise MalformedError(
            f"it has a negative number: shape {list(shape)}, data file {shard}, offset {offset}, size {size}"
        )
    if slices and size:
        raise MalformedError(f"it lists slices and {size} bytes of its own")
    if dtype != STRING and dtype not in OPAQUE:
        item_bytes = numpy_dtype(dtype).itemsize
        if math.prod(max(length, 1) for length in shape) * item_bytes > _MAX_BYTES:
            raise MalformedError(f"{dtype} {list(shape)} takes more than {_MAX_BYTES} bytes")
        expected = math.prod(shape) * item_bytes
        if not slices and size != expected:
            raise MalformedError(f"{dtype} {list(shape)} takes {expected} bytes, but the index has {size}")
    crc32c = 0 if slices else crc.unmask(proto.integer(6) & 0xFFFFFFFF)
    entry = Entry(dtype=dtype, shape=shape, shard=shard, offset=offset, size=size, crc32c=crc32c)
    return entry, tuple(_decode_region(key, shape, message) for message in slices)


def _decode_region(key: bytes, shape: tuple[int, ...], proto: Message) -> Region:
    extents = proto.messages(1)
    if len(extents) != len(shape):
        raise MalformedError(f"a slice has {len(extents)} dimensions, but the tensor has {len(shape)}")
    starts = tuple(extent.signed(1) for extent in extents)
    lengths = tuple(extent.signed(2) if extent.has(2) else FULL_EXTENT for extent in extents)
    box = tuple(size if length == FULL_EXTENT else length for size, length in zip(shape, lengths, strict=True))
    for size, start, length in zip(shape, starts, box, strict=True):
        if start < 0 or length < 0 or start + length > size:
            raise MalformedError(f"a slice [{start}, {start + length}) is outside its dimension of {size}")
    return Region(slice_key(key, starts, lengths), starts, box)


def encode_entries(name: str, entry: Entry) -> dict[bytes, bytes]:
    """Return the index keys and BundleEntryProtos of one tensor: its own and one per slice."""
    key = name.encode()
    for piece in entry.parts():
        # TensorFlow reads one that covers the whole tensor only as a tensor in one piece.
        if piece.shape == entry.shape:
            return {key: _encode_entry(entry.dtype, entry.shape, piece)}
    regions, encoded = b"", {}
    for piece in entry.slices:
        region = b""
        # As TensorFlow writes it: a whole dimension has no length.
        lengths = [FULL_EXTENT if own == size else own for size, own in zip(entry.shape, piece.shape, strict=True)]
        for start, length in zip(piece.start, lengths, strict=True):
            # Field 2 is a oneof: it is written even if it is 0.
            extent = b"" if length == FULL_EXTENT else varint_field(1, start) + (varint_field(2, length) or b"\x10\x00")
            region += bytes_field(1, extent)
        regions += bytes_field(7, region)
        encoded[slice_key(key, piece.start, lengths)] = _encode_entry(entry.dtype, piece.shape, piece)
    return {key: _encode_entry(entry.dtype, entry.shape, None) + regions, **encoded}


def _encode_entry(dtype: str, shape: tuple[int, ...], piece: Slice | None) -> bytes:
    dims = b"".join(bytes_field(2, varint_field(1, size)) for size in shape)
    out = varint_field(1, dtype_number(dtype)) + bytes_field(2, dims)
    if piece is not None:
        out += varint_field(3, piece.shard) + varint_field(4, piece.offset) + varint_field(5, piece.size)
        out += fixed32_field(6, crc.mask(piece.crc32c))
    return out
