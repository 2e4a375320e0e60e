"""Frames against bytes written by hand, and the ways in which one can be wrong."""

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuembed_serving.http.binary_frames import FrameError, decode_frame, encode_frame

HEADER = (
    b'{"a":1,"tensors":[{"name":"x","dtype":"int32","shape":[3],"offset":0,"size":12},'
    b'{"name":"y","dtype":"float64","shape":[1,1],"offset":16,"size":8}]}'
)
PADDED = HEADER + b" " * (-len(HEADER) % 8)
FRAME = (
    b"TPEB" + struct.pack("<III", 1, len(PADDED), 0) + PADDED + struct.pack("<iii", 1, -2, 3) + bytes(4) + struct.pack("<d", 0.5)
)  # fmt: skip


def framed(header: Any, payload: bytes = b"", version: int = 1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"TPEB" + struct.pack("<III", version, len(text), 0) + text + payload


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "dtype": "int64", "shape": [2], "offset": 0, "size": 16, **changes}


def test_the_bytes_are_those_of_the_description() -> None:
    arrays = {"x": np.array([1, -2, 3], np.int32), "y": np.array([[0.5]])}
    assert encode_frame(arrays, {"a": 1}) == FRAME
    found = decode_frame(FRAME)
    assert found.members == {"a": 1}
    assert list(found.tensors) == ["x", "y"]
    np.testing.assert_array_equal(found.tensors["x"], arrays["x"])
    np.testing.assert_array_equal(found.tensors["y"], arrays["y"])


def test_arrays_are_views_of_the_frame() -> None:
    found = decode_frame(FRAME).tensors["x"]
    assert not found.flags.writeable
    assert np.shares_memory(found, np.frombuffer(FRAME, np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.array(7, np.uint16),
        np.empty((0, 3), np.float32),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.array([1, 2], ">i4"),
        np.array([True, False]),
        np.array([[1.5, -2]], ml_dtypes.bfloat16),
        np.array([1 + 2j]),
    ],
)
def test_any_array_comes_back(array: Any) -> None:
    found = decode_frame(encode_frame({"before": np.ones(3, np.int8), "x": array}, {})).tensors["x"]
    assert (found.shape, found.dtype.name) == (array.shape, array.dtype.name)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"a"], object), np.array(["2020"], "M8[D]")])
def test_what_has_no_form_is_refused(array: Any) -> None:
    with pytest.raises(FrameError, match=r"tensor x: dtype .* has no binary form"):
        encode_frame({"x": array}, {})


TWO = bytes(16)
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least 16 bytes"),
    "cut in the prefix": (FRAME[:15], "at least 16 bytes"),
    "magic": (b"TPEA" + FRAME[4:], "begins with b'TPEA'"),
    "version": (framed({"tensors": []}, version=2), "version 2"),
    "cut in the header": (FRAME[:60], "a header of"),
    "long header": (b"TPEB" + struct.pack("<III", 1, 2**32 - 1, 0) + bytes(100), "a header of 4294967295"),
    "no JSON": (framed(b"{"), "is no JSON"),
    "deep JSON": (framed(b"[" * 100_000), "is no JSON"),
    "no UTF-8": (framed(b'{"\xff": 1}'), "is no JSON"),
    "no object": (framed([]), "no JSON object"),
    "no tensors": (framed({}), "`tensors`"),
    "many tensors": (framed({"tensors": [0] * 5000}), "`tensors`"),
    "no entry": (framed({"tensors": [0]}), "no printable name"),
    "no name": (framed({"tensors": [entry(name=1)]}, TWO), "no printable name"),
    "half a character": (framed({"tensors": [entry(name="\ud800")]}, TWO), "no printable name"),
    "twice": (framed({"tensors": [entry(size=0, shape=[0])] * 2}), "twice"),
    "dtype": (framed({"tensors": [entry(dtype="str")]}, TWO), "dtype 'str' is none of bool"),
    "dtype of objects": (framed({"tensors": [entry(dtype="object")]}, TWO), "is none of"),
    "no dtype": (framed({"tensors": [entry(dtype=["int64"])]}, TWO), "is none of"),
    "shape": (framed({"tensors": [entry(shape=2)]}, TWO), "no list of at most 32"),
    "negative": (framed({"tensors": [entry(shape=[-2])]}, TWO), "no list of at most 32"),
    "a bool for a size": (framed({"tensors": [entry(shape=[True, 2])]}, TWO), "no list of at most 32"),
    "a fraction": (framed({"tensors": [entry(shape=[2.0])]}, TWO), "no list of at most 32"),
    "rank": (framed({"tensors": [entry(shape=[1] * 33)]}, TWO), "no list of at most 32"),
    "large": (framed({"tensors": [entry(shape=[2**62, 2**62])]}, TWO), "too large"),
    "large and empty": (framed({"tensors": [entry(shape=[0, 2**62, 2**62], size=0)]}), "too large"),
    "size": (framed({"tensors": [entry(size=15)]}, TWO), "size is 15, and dtype and shape make 16"),
    "offset": (framed({"tensors": [entry(offset=8)]}, TWO + bytes(8)), "has to lie at 0"),
    "overlap": (framed({"tensors": [entry(), entry(name="y")]}, TWO), "has to lie at 16"),
    "beyond": (framed({"tensors": [entry()]}, bytes(15)), "to end by 15"),
    "cut": (FRAME[:-1], "to end by"),
    "more": (FRAME + b"\0", "its header describes"),
    "bool": (framed({"tensors": [entry(dtype="bool", shape=[1], size=1)]}, b"\2"), "neither 0 nor 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_frame_is_refused(case: str) -> None:
    data, text = WRONG[case]
    with pytest.raises(FrameError) as caught:
        decode_frame(data)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(FRAME)))
def test_damage_is_found_or_harmless(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(FRAME)
    for place, byte in changes:
        data[place] = byte
    try:
        found = decode_frame(bytes(data[:length]))
    except FrameError:
        return
    assert all(array.nbytes <= len(FRAME) for array in found.tensors.values())
