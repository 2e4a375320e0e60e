"""The saved form of vocabularies: what is kept, and what damage does."""

import json
import struct
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.vocabulary import Vocabulary

HEAD = b"tpuembed vocabulary 1\n"


def with_checksum(content: bytes) -> bytes:
    return content + struct.pack("<I", google_crc32c.value(content))


def written(fields: dict[str, Any], *arrays: tuple[str, list[int]]) -> bytes:
    """The form as its module describes it, made without that module."""
    header = json.dumps(fields).encode()
    body = b"".join(np.array(values, dtype).tobytes() for dtype, values in arrays)
    return with_checksum(HEAD + struct.pack("<I", len(header)) + header + body)


def header_of(**changes: Any) -> dict[str, Any]:
    return {"dtype": "int64", "oov_buckets": 2, "names": 2, "bytes": 0} | changes


IDS = ("<i8", [70, 80])


def some(dtype: Any) -> Vocabulary:
    names: list[Any] = ["a", "bc", "", "ddd" * 9] if dtype == "string" else [1, -2, 3, 2**62]
    return Vocabulary(names, dtype=dtype, oov_buckets=2)


def test_the_form_is_as_described() -> None:
    content = written(header_of(), IDS)
    found = Vocabulary.from_bytes(content)
    assert found.get_vocabulary() == [-1, -1, 70, 80]
    assert found.to_bytes() == content
    content = written(header_of(dtype="string", bytes=3), ("<u4", [1, 2]), ("u1", [*b"abc"]))
    found = Vocabulary.from_bytes(content)
    assert found.get_vocabulary() == ["[UNK]", "[UNK]", "a", "bc"]
    assert found.to_bytes() == content


@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_a_vocabulary_without_names(dtype: Any) -> None:
    assert Vocabulary.from_bytes(Vocabulary(dtype=dtype).to_bytes()).rows == 0


CONTRADICTIONS = [
    written(header_of(names=3), IDS),
    written(header_of(names=2**47), IDS),
    written(header_of(names=-1), IDS),
    written(header_of(names=2.0), IDS),
    written(header_of(names=True), IDS),
    written(header_of(dtype="float"), IDS),
    written(header_of(dtype=["string"]), IDS),
    written(header_of(file="/etc/passwd"), IDS),
    written(header_of(oov_buckets=2**40), IDS),
    written(header_of(oov_buckets=None), IDS),
    written(header_of(), ("<i8", [70, 70])),
    written(header_of(), IDS, ("<u4", [1])),
    written(header_of(dtype="string", bytes=3), ("<u4", [1, 3]), ("u1", [1, 2, 3])),
    written(header_of(dtype="string", bytes=2), ("<u4", [1, 1]), ("u1", [1, 1])),
    written(header_of(dtype="string", bytes=2**32), ("<u4", [2**32 - 1, 1])),
    with_checksum(HEAD + struct.pack("<I", 2**31)),
    with_checksum(HEAD + struct.pack("<I", 60000) + b"[" * 60000),
    with_checksum(HEAD + struct.pack("<I", 2) + b"[]"),
    with_checksum(HEAD + struct.pack("<I", 2) + b"{}"),
]


@pytest.mark.parametrize("number", range(len(CONTRADICTIONS)))
def test_contradictions_are_refused(number: int) -> None:
    with refused(CheckpointCorruptError):
        Vocabulary.from_bytes(CONTRADICTIONS[number])


def test_another_version_is_refused() -> None:
    with refused(CheckpointFormatError):
        Vocabulary.from_bytes(with_checksum(HEAD.replace(b"1", b"2") + bytes(20)))


def sane(found: Vocabulary) -> None:
    """What must hold of anything that is read."""
    names = found.names(range(found.oov_buckets, found.rows)) if found.rows < 10_000 else []
    rows = [*range(found.oov_buckets, found.oov_buckets + len(names))]
    assert found.lookup(np.array(names, object if found.dtype == "string" else np.int64)).tolist() == rows
    assert Vocabulary.from_bytes(found.to_bytes()).to_bytes() == found.to_bytes()


@pytest.mark.parametrize("dtype", ["string", "int64"])
@settings(max_examples=300, deadline=2000)
@given(data=st.data())
def test_damage_with_a_right_checksum_is_refused_or_harmless(dtype: Any, data: st.DataObject) -> None:
    content = bytearray(some(dtype).to_bytes()[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "more", "digits"]))
        if kind == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            content[place] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 9))]
        elif kind == "more":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            content[place:place] = b"9" * data.draw(st.integers(1, 20))
        if not content:
            content = bytearray(b"x")
    try:
        found = Vocabulary.from_bytes(with_checksum(bytes(content)))
    except (CheckpointCorruptError, CheckpointFormatError):
        return
    sane(found)
