"""Binary tensors against numpy and struct: what is read is what was written, and damaged ones are refused."""

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.messages import refused
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.servable import TensorInfo
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.open_inference.tensors import (
    DTYPES,
    Content,
    check_shape,
    datatype_of,
    read_binary,
    write_binary,
)

NUMBERS = {name: dtype for name, dtype in DTYPES.items() if name != "BYTES"}
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def arrays(name: str) -> st.SearchStrategy[Any]:
    """Of any values of a datatype: those of BF16 from their 16 bits."""
    if name == "BF16":
        return hnp.arrays(np.uint16, SHAPES).map(lambda array: array.view(ml_dtypes.bfloat16))
    return hnp.arrays(NUMBERS[name], SHAPES)


def strings() -> st.SearchStrategy[Any]:
    return SHAPES.flatmap(lambda shape: hnp.arrays(object, shape, elements=st.binary(max_size=9), fill=st.nothing()))


def framed(array: Any) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in array.ravel().tolist())


def read(name: str, shape: tuple[int, ...], data: bytes, before: int = 0, after: int = 0) -> Any:
    buffer = b"\xff" * before + data + b"\xff" * after
    return read_binary("x", name, shape, Content(buffer, before, before + len(data)), noop)


@pytest.mark.parametrize("name", NUMBERS)
@given(data=st.data(), before=st.integers(0, 9), after=st.integers(0, 9))
def test_numbers_are_read_and_written_as_numpy_has_them(name: str, data: Any, before: int, after: int) -> None:
    array = data.draw(arrays(name))
    found = read(name, array.shape, array.tobytes(), before, after)
    assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes())
    assert bytes(write_binary(array, name, noop)) == array.tobytes()
    assert bytes(write_binary(array.T, name, noop)) == array.T.tobytes()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_not_copied(name: str) -> None:
    buffer = bytes(10 * NUMBERS[name].itemsize)
    found = read_binary("x", name, (2, 4), Content(buffer, NUMBERS[name].itemsize, 9 * NUMBERS[name].itemsize), noop)
    start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    assert found.__array_interface__["data"][0] == start + NUMBERS[name].itemsize
    written = np.frombuffer(write_binary(found, name, noop), np.uint8)
    assert written.__array_interface__["data"] == found.__array_interface__["data"]


@given(array=strings(), before=st.integers(0, 9), after=st.integers(0, 9))
def test_strings_are_read_and_written_with_their_lengths(array: Any, before: int, after: int) -> None:
    data = framed(array)
    found = read("BYTES", array.shape, data, before, after)
    assert (found.shape, found.tolist()) == (array.shape, array.tolist())
    assert bytes(write_binary(array, "BYTES", noop)) == data


@pytest.mark.parametrize("name", DTYPES)
@given(shape=SHAPES, data=st.binary(max_size=40), before=st.integers(0, 9))
def test_any_bytes_are_read_whole_or_refused(name: str, shape: tuple[int, ...], data: bytes, before: int) -> None:
    """What is read has all the bytes, and no others: those around are never values."""
    try:
        found = read(name, shape, data, before, 9)
    except StatusError:
        return
    assert found.shape == shape
    assert (framed(found) if name == "BYTES" else found.tobytes()) == data


@given(array=strings(), cut=st.integers(1, 40))
def test_a_truncated_list_of_strings_is_refused(array: Any, cut: int) -> None:
    data = framed(array)
    if not data:
        return
    with pytest.raises(StatusError):
        read("BYTES", array.shape, data[: max(0, len(data) - cut)], after=40)


@pytest.mark.parametrize(
    ("name", "shape", "data"),
    [
        ("INT64", (2,), bytes(15)),
        ("INT64", (2,), bytes(17)),
        ("FP32", (), b""),
        ("FP32", (0, 3), bytes(4)),
        ("UINT8", (2**29, 2**29), bytes(4)),
        ("BOOL", (3,), b"\x00\x01\x02"),
        ("BYTES", (2,), b"\x01\0\0\0a"),
        ("BYTES", (2,), b"\x00\0\0\0\x00\0\0"),
        ("BYTES", (1,), b"\x02\0\0\0a"),
        ("BYTES", (1,), b"\xff\xff\xff\xffa"),
        ("BYTES", (2,), b"\x04\0\0\0aaaa\x01"),
        ("BYTES", (1,), b"\x01\0\0\0ab"),
        ("BYTES", (0,), b"a"),
        ("BYTES", (2**40,), bytes(8)),
    ],
)
def test_refuses_bytes_that_do_not_fit(name: str, shape: tuple[int, ...], data: bytes) -> None:
    with refused(StatusError, match="input x"):
        read(name, shape, data, after=40)


@pytest.mark.parametrize(
    "sizes", [[-1], [2, -1, -1], [True], [1.0], ["1"], [None], [2**63], [2**30, 2**30], [0, 2**64], [1] * 65, [-1] * 20]
)
def test_refuses_shapes_that_no_array_has(sizes: list[Any]) -> None:
    with refused(StatusError, match="input x"):
        check_shape("x", sizes)


@given(st.lists(st.integers(0, 2**64), max_size=64))
def test_a_shape_that_is_taken_is_one_that_numpy_takes(sizes: list[int]) -> None:
    try:
        shape = check_shape("x", sizes)
    except StatusError:
        return
    assert np.broadcast_to(np.uint8(0), shape).shape == tuple(sizes)


def test_a_dtype_without_a_datatype_is_refused() -> None:
    with refused(StatusError, match="complex64"):
        datatype_of(TensorInfo("z", "z:0", "complex64", np.dtype(np.complex64)))
