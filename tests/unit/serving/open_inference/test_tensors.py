"""Binary tensors and shapes that are refused. What is read is what was written: http/test_open_inference.py."""

from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.servable import TensorInfo
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.open_inference.tensors import (
    Content,
    check_shape,
    datatype_of,
    read_binary,
)


def read(name: str, shape: tuple[int, ...], data: bytes, before: int = 0, after: int = 0) -> Any:
    buffer = b"\xff" * before + data + b"\xff" * after
    return read_binary("x", name, shape, Content(buffer, before, before + len(data)), noop)


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


def test_a_dtype_without_a_datatype_is_refused() -> None:
    with refused(StatusError, match="complex64"):
        datatype_of(TensorInfo("z", "z:0", "complex64", np.dtype(np.complex64)))
