"""CRCs, varints, protocol buffers and ordered code against published vectors and byte literals."""

import io
import random

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.protobuf import tensor_bundle_pb2

from tests.support.checkpoint.strings import encode_strings
from tests.support.messages import refused
from tpuembed.formats.protobuf import (
    MalformedError,
    Message,
    UnsupportedError,
    bytes_field,
    read_varint,
    varint,
    varint_field,
)
from tpuembed.formats.sstable import read_table, write_table
from tpuembed.formats.tensor_bundle import crc
from tpuembed.formats.tensor_bundle.entries import (
    FULL_EXTENT,
    Entry,
    Slice,
    decode_entry,
    decode_header,
    encode_entries,
    encode_header,
    encode_signed,
    slice_key,
)
from tpuembed.formats.tensor_bundle.strings import decode_strings


def test_crc32c_vectors() -> None:
    """RFC 3720 appendix B.4, and the mask of LevelDB's crc32c_test: masking twice is not masking once."""
    assert crc.value(bytes(32)) == 0x8A9136AA
    assert crc.value(b"123456789") == 0xE3069283
    assert crc.extend(crc.value(b"1234"), bytearray(b"56789")) == 0xE3069283
    assert crc.extend(crc.value(b"1234"), memoryview(bytearray(b"56789"))) == 0xE3069283
    assert crc.value(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert crc.mask(0) == 0xA282EAD8
    assert crc.mask(0xE3069283) == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32
    assert crc.unmask(crc.mask(0xE3069283)) == 0xE3069283


@pytest.mark.parametrize("len1", [0, 1, 1000])
@pytest.mark.parametrize("len2", [0, 1, 7, 64, 4097, 1 << 20])
def test_combined_crc(len1: int, len2: int) -> None:
    data = random.Random(len2).randbytes(len1 + len2)
    first, second = google_crc32c.value(data[:len1]), google_crc32c.value(data[len1:])
    assert crc.combine(first, second, len2) == google_crc32c.value(data)


def test_combined_crc_of_huge_parts() -> None:
    """2^40 zero bytes, doubled step by step."""
    zeros, length = google_crc32c.value(b"\0"), 1
    for _ in range(40):
        zeros, length = crc.combine(zeros, zeros, length), 2 * length
    in_one = crc.combine(google_crc32c.value(b"\0" * 3), crc.combine(zeros, zeros, length), 2 * length)
    bytewise = crc.combine(crc.combine(google_crc32c.value(b"\0" * 3), zeros, length), zeros, length)
    assert in_one == bytewise


@pytest.mark.parametrize(
    ("value", "code"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (-1, "ff" * 9 + "01"), (2**63, "80" * 9 + "01")],
)
def test_varints(value: int, code: str) -> None:
    assert varint(value) == bytes.fromhex(code)
    assert read_varint(b"x" + varint(value) + b"y", 1) == (value % 2**64, 1 + len(varint(value)))


@pytest.mark.parametrize("code", ["", "80", "ff" * 9 + "02", "ff" * 10 + "01"])
def test_broken_varints(code: str) -> None:
    with pytest.raises(MalformedError):
        read_varint(bytes.fromhex(code), 0)


@pytest.mark.parametrize("code", ["0a", "0a05", "0d0000", "09000000", "0b", "0c", "0f"])
def test_broken_messages(code: str) -> None:
    with pytest.raises(MalformedError):
        Message(bytes.fromhex(code))


def test_fields_of_the_wrong_type() -> None:
    message = Message(bytes.fromhex("0801 120161"))
    assert (message.integer(1), message.text(2), message.integer(3), message.text(4)) == (1, "a", 0, "")
    for read in (lambda: message.data(1), lambda: message.integer(2), lambda: message.messages(1)):
        with refused(MalformedError):
            read()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "80"), (1, "81"), (63, "bf"), (64, "c040"), (8191, "dfff"), (8192, "e02000"), (300_000, "e493e0"),
        (-1, "7f"), (-64, "40"), (-65, "3fbf"), (-8192, "2000"), (-8193, "1fdfff"),
        (2**62 - 1, "ffbfffffffffffffff"), (2**63 - 1, "ffc07fffffffffffffff"), (-(2**63), "003f8000000000000000"),
    ],
)  # fmt: skip
def test_signed_ordered_code(value: int, code: str) -> None:
    assert encode_signed(value).hex() == code


def test_slice_keys() -> None:
    assert slice_key(b"a\x00\xffb", (), ()).hex() == "00" + "6100ffff0062" + "0001" + "00"
    assert slice_key(b"w", (0, 64), (3, FULL_EXTENT)).hex() == "00" + "770001" + "0102" + "8083" + "c0407f"


def test_string_tensors() -> None:
    payload, checksum = encode_strings([b"ab", b""])
    lengths = google_crc32c.value(bytes.fromhex("0200000000000000"))
    masked = (((lengths >> 15) | (lengths << 17)) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")
    assert payload == b"\x02\x00" + masked + b"ab"
    assert checksum == google_crc32c.value(bytes.fromhex("0200000000000000") + masked + b"ab")
    with refused(MalformedError):
        decode_strings(payload[:-1] + b"c", 2, checksum)
    with refused(MalformedError):
        decode_strings(payload[:2] + b"0000" + payload[6:], 2, checksum)
    with refused(MalformedError):
        decode_strings(payload, 1 << 32, checksum)


def test_entries_as_tensorflows_protos() -> None:
    """TensorFlow's own protobuf classes parse what is written, field for field."""
    piece = Slice(start=(2, 0), shape=(3, 5), shard=1, offset=40, size=60, crc32c=123)
    entry = Entry(dtype="float32", shape=(7, 5), slices=(piece,))
    encoded = encode_entries("w", entry)
    assert set(encoded) == {b"w", slice_key(b"w", (2, 0), (3, -1))}
    whole = tensor_bundle_pb2.BundleEntryProto.FromString(encoded[b"w"])
    assert (whole.dtype, [dim.size for dim in whole.shape.dim], whole.size) == (1, [7, 5], 0)
    [extents] = [region.extent for region in whole.slices]
    assert [(e.start, e.length, e.HasField("length")) for e in extents] == [(2, 3, True), (0, 0, False)]
    part = tensor_bundle_pb2.BundleEntryProto.FromString(encoded[slice_key(b"w", (2, 0), (3, -1))])
    assert (part.shard_id, part.offset, part.size, part.crc32c) == (1, 40, 60, crc.mask(123))
    assert whole.SerializeToString(deterministic=True) == encoded[b"w"]


def test_an_empty_slice_has_a_length() -> None:
    """Without one it would be the whole dimension."""
    places = {"shard": 0, "offset": 0, "size": 0, "crc32c": 0}
    pieces = tuple(Slice(start=(start,), shape=(size,), **places) for start, size in [(0, 3), (3, 0), (3, 4)])
    encoded = encode_entries("w", Entry(dtype="float32", shape=(7,), slices=pieces))
    whole = tensor_bundle_pb2.BundleEntryProto.FromString(encoded[b"w"])
    assert [(r.extent[0].start, r.extent[0].length) for r in whole.slices] == [(0, 3), (3, 0), (3, 4)]
    assert all(region.extent[0].HasField("length") for region in whole.slices)


def test_a_table_file_byte_by_byte() -> None:
    """Two keys that share "ab", in LevelDB's table format."""
    file = io.BytesIO()
    write_table(file, [(b"abc", b"1"), (b"abd", b"22")])
    data = "000301" + "616263" + "31" + "020102" + "64" + "3232" + "00000000" + "01000000"
    empty = "00000000" + "01000000"
    index = "000302" + "616264" + "0015" + "00000000" + "01000000"
    blocks = b""
    for block in (data, empty, index):
        typed = bytes.fromhex(block + "00")
        blocks += typed + crc.mask(google_crc32c.value(typed)).to_bytes(4, "little")
    footer = bytes.fromhex("1a08" + "2710").ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")
    assert file.getvalue() == blocks + footer


def test_every_sixteenth_key_is_whole() -> None:
    """So that a reader can start there: 40 keys have restarts before keys 0, 16 and 32."""
    file = io.BytesIO()
    write_table(file, [(f"key{number:02d}".encode(), b"") for number in range(40)])
    data = file.getvalue()
    block = data[: data.index(bytes.fromhex("03000000")) + 4]
    first, second, third = (int.from_bytes(block[start : start + 4], "little") for start in (-16, -12, -8))
    assert (first, block[:8], block[second : second + 8], block[third : third + 8]) == (
        0,
        b"\0\5\0key00",
        b"\0\5\0key16"[:8],
        b"\0\5\0key32"[:8],
    )
    assert list(read_table(file)) == [(f"key{number:02d}".encode(), b"") for number in range(40)]


def test_headers() -> None:
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=3)
    header.version.producer = 1
    assert encode_header(3) == header.SerializeToString(deterministic=True)
    assert decode_header(encode_header(3)) == 3
    header.endianness = tensor_bundle_pb2.BundleHeaderProto.BIG
    with refused(UnsupportedError):
        decode_header(header.SerializeToString())
    header.endianness = tensor_bundle_pb2.BundleHeaderProto.LITTLE
    header.version.min_consumer = 2
    with refused(UnsupportedError, match="bundle version 2"):
        decode_header(header.SerializeToString())


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 27},
        {"offset": -1, "size": 28},
        {"dtype": 99, "size": 28},
        {"dtype": 0, "size": 28},
    ],
)
def test_entries_that_contradict_themselves(fields: dict[str, int]) -> None:
    proto = tensor_bundle_pb2.BundleEntryProto(**{"dtype": 1, **fields})
    proto.shape.dim.add(size=7)
    with refused(MalformedError):
        decode_entry(b"x", proto.SerializeToString())


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_repeated_integers_packed_and_not(packed: list[int], loose: list[int]) -> None:
    """Source: "Packed Repeated Fields" of protobuf's encoding guide: parsers must accept both, even mixed."""
    tag = varint(6 << 3)
    data = bytes_field(6, b"".join(map(varint, packed))) + b"".join(tag + varint(value) for value in loose)
    message = Message(varint_field(5, 7) + data)
    assert message.signed_integers(6) == packed + loose
    assert message.signed_integers(5) == [7]
    assert message.signed_integers(4) == []
