"""The entry of one tensor in a bundle's index, and its protocol buffers.

Source: tensorflow/core/protobuf/tensor_bundle.proto, tensor_shape.proto, tensor_slice.proto.
"""

import dataclasses
import math
from typing import Final

from tpuembed.formats.protobuf import (
    MalformedError,
    Message,
    UnsupportedError,
    bytes_field,
    fixed32_field,
    varint_field,
)
from tpuembed.formats.tensor_bundle import crc
from tpuembed.formats.tensor_bundle.dtypes import OPAQUE, STRING, dtype_name, dtype_number, numpy_dtype
from tpuembed.formats.tensor_bundle.ordered_code import FULL_EXTENT, slice_key

__all__ = ["Entry", "Slice", "SliceRegion", "decode_entry", "decode_header", "encode_entries", "encode_header"]

_VERSION: Final = 1
_BIG_ENDIAN: Final = 1
_MAX_BYTES: Final = 1 << 62
_MAX_DIMS: Final = 32
"""The most dimensions that every numpy version supports."""


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
        whole = Slice(
            start=(0,) * len(self.shape),
            shape=self.shape,
            shard=self.shard,
            offset=self.offset,
            size=self.size,
            crc32c=self.crc32c,
        )
        return (whole,)


@dataclasses.dataclass(frozen=True)
class SliceRegion:
    """A slice as the tensor's own entry lists it: a length may be FULL_EXTENT."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this box in a tensor of `shape`. Raises MalformedError if it is not inside."""
        if len(self.starts) != len(shape):
            raise MalformedError(f"a slice has {len(self.starts)} dimensions, but the tensor has {len(shape)}")
        lengths = tuple(
            size if length == FULL_EXTENT else length for size, length in zip(shape, self.lengths, strict=True)
        )
        for size, start, length in zip(shape, self.starts, lengths, strict=True):
            if start < 0 or length < 0 or start + length > size:
                raise MalformedError(f"a slice [{start}, {start + length}) is outside its dimension of {size}")
        return lengths


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


def decode_entry(data: bytes) -> tuple[Entry, tuple[SliceRegion, ...]]:
    """Return the entry of a BundleEntryProto, its size checked against dtype and shape, and the regions of its slices."""
    proto = Message(data)
    regions = tuple(_decode_region(message) for message in proto.messages(7))
    entry = Entry(
        dtype=dtype_name(proto.integer(1)),
        shape=_decode_shape(proto.message(2)),
        shard=proto.signed(3),
        offset=proto.signed(4),
        size=proto.signed(5),
        crc32c=0 if regions else crc.unmask(proto.integer(6) & 0xFFFFFFFF),
    )
    _check_bytes(entry, sliced=bool(regions))
    return entry, regions


def _check_bytes(entry: Entry, sliced: bool) -> None:
    if min(entry.shard, entry.offset, entry.size, *entry.shape) < 0:
        raise MalformedError(
            f"it has a negative number: shape {list(entry.shape)}, data file {entry.shard}, offset {entry.offset}, "
            f"size {entry.size}"
        )
    if sliced and entry.size:
        raise MalformedError(f"it lists slices and {entry.size} bytes of its own")
    if entry.dtype == STRING or entry.dtype in OPAQUE:
        return
    item_bytes = numpy_dtype(entry.dtype).itemsize
    if math.prod(max(size, 1) for size in entry.shape) * item_bytes > _MAX_BYTES:
        raise MalformedError(f"{entry.dtype} {list(entry.shape)} takes more than {_MAX_BYTES} bytes")
    expected = math.prod(entry.shape) * item_bytes
    if not sliced and entry.size != expected:
        raise MalformedError(
            f"{entry.dtype} {list(entry.shape)} takes {expected} bytes, but the index has {entry.size}"
        )


def _decode_shape(proto: Message) -> tuple[int, ...]:
    if proto.integer(3):
        raise MalformedError("its rank is unknown")
    dims = proto.messages(2)
    if len(dims) > _MAX_DIMS:
        raise UnsupportedError(f"it has {len(dims)} dimensions (the most is {_MAX_DIMS})")
    return tuple(dim.signed(1) for dim in dims)


def _decode_region(proto: Message) -> SliceRegion:
    extents = proto.messages(1)
    lengths = tuple(extent.signed(2) if extent.has(2) else FULL_EXTENT for extent in extents)
    return SliceRegion(starts=tuple(extent.signed(1) for extent in extents), lengths=lengths)


def encode_entries(name: str, entry: Entry) -> dict[bytes, bytes]:
    """Return the index keys and BundleEntryProtos of one tensor: its own and one per slice."""
    key = name.encode()
    for piece in entry.parts():
        if (
            piece.shape == entry.shape
        ):  # TensorFlow reads one that covers the whole tensor only as a tensor in one piece
            return {key: _encode_entry(entry.dtype, entry.shape, piece, [])}
    regions = [_region(entry.shape, piece) for piece in entry.slices]
    encoded = {key: _encode_entry(entry.dtype, entry.shape, None, regions)}
    for piece, region in zip(entry.slices, regions, strict=True):
        encoded[slice_key(key, region.starts, region.lengths)] = _encode_entry(entry.dtype, piece.shape, piece, [])
    return encoded


def _region(shape: tuple[int, ...], piece: Slice) -> SliceRegion:
    """Return the region as TensorFlow writes it: a whole dimension has no length."""
    lengths = tuple(FULL_EXTENT if have == size else have for size, have in zip(shape, piece.shape, strict=True))
    return SliceRegion(starts=piece.start, lengths=lengths)


def _encode_entry(dtype: str, shape: tuple[int, ...], piece: Slice | None, regions: list[SliceRegion]) -> bytes:
    dims = b"".join(bytes_field(2, varint_field(1, size)) for size in shape)
    out = varint_field(1, dtype_number(dtype)) + bytes_field(2, dims)
    if piece is not None:
        out += varint_field(3, piece.shard) + varint_field(4, piece.offset) + varint_field(5, piece.size)
        out += fixed32_field(6, crc.mask(piece.crc32c))
    return out + b"".join(bytes_field(7, _encode_region(region)) for region in regions)


def _encode_region(region: SliceRegion) -> bytes:
    encoded = b""
    for start, length in zip(region.starts, region.lengths, strict=True):
        # Field 2 is a oneof: it is written even if it is 0.
        extent = b"" if length == FULL_EXTENT else varint_field(1, start) + (varint_field(2, length) or b"\x10\x00")
        encoded += bytes_field(1, extent)
    return encoded
