"""Response bodies, byte for byte, as RapidJSON's PrettyWriter lays them out in json_tensor.cc."""

import json
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Array
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import encode_error, encode_outputs, responses

DTYPES = {"float32": "float", "float64": "double", "object": "string", "float16": "half"}


def encode(row_form: bool, **outputs: Any) -> str:
    arrays: dict[str, Array] = {alias: np.asarray(value) for alias, value in outputs.items()}
    dtypes = {alias: DTYPES.get(str(array.dtype), str(array.dtype)) for alias, array in arrays.items()}
    return encode_outputs(arrays, signature({}, dtypes), row_form).decode()


def floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def text(*values: bytes) -> Array:
    return np.array(values, dtype=object)


def test_rows_of_one_scalar_output() -> None:
    assert encode(True, y=floats(2.5, 3)) == '{\n    "predictions": [2.5, 3.0\n    ]\n}'


def test_rows_of_one_vector_output() -> None:
    wanted = '{\n    "predictions": [[0.200000003], [1.0]\n    ]\n}'.replace("0.200000003", "0.2")
    assert encode(True, y=floats(0.2, 1).reshape(2, 1)) == wanted


def test_rows_of_two_outputs() -> None:
    wanted = """{
    "predictions": [
        {
            "a": [1, 2],
            "b": true
        },
        {
            "a": [3, 4],
            "b": false
        }
    ]
}"""
    assert encode(True, a=np.array([[1, 2], [3, 4]]), b=np.array([True, False])) == wanted


def test_an_empty_batch() -> None:
    assert encode(True, y=floats()) == '{\n    "predictions": []\n}'
    assert encode(True, a=floats(), b=floats()) == '{\n    "predictions": []\n}'
    assert encode(False, y=floats()) == '{\n    "outputs": []\n}'


def test_rows_with_an_empty_inner_dimension() -> None:
    assert encode(True, y=np.zeros((2, 1, 0), np.int64)) == '{\n    "predictions": [[[]], [[]]\n    ]\n}'


def test_columns_of_one_output_take_a_line_per_value() -> None:
    wanted = """{
    "outputs": [
        [
            1,
            2
        ],
        [
            3,
            4
        ]
    ]
}"""
    assert encode(False, y=np.array([[1, 2], [3, 4]], np.int32)) == wanted


def test_columns_of_two_outputs_and_a_scalar() -> None:
    wanted = """{
    "outputs": {
        "a": 1.5,
        "b": [
            1
        ]
    }
}"""
    assert encode(False, a=np.float32(1.5), b=np.array([1])) == wanted


def test_strings_are_escaped_as_little_as_can_be() -> None:
    value = 'a"\\/\b\f\n\r\t\x01\x1f\x7f\u00e9'.encode()
    wanted = '{\n    "predictions": ["a\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\u00e9"\n    ]\n}'
    assert encode(True, y=text(value)) == wanted


def test_bytes_that_are_no_utf8_go_out_as_they_are() -> None:
    body = encode_outputs({"y": text(b"\xff")}, signature({}, {"y": "string"}), row_form=True)
    assert body == b'{\n    "predictions": ["\xff"\n    ]\n}'


def test_outputs_named_bytes_are_base64_objects() -> None:
    assert encode(True, y_bytes=text(b"\x00\xff")) == (
        '{\n    "predictions": [{\n            "b64": "AP8="\n        }\n    ]\n}'
    )
    assert encode(False, y_bytes=text(b"\x00\xff")) == (
        '{\n    "outputs": [\n        {\n            "b64": "AP8="\n        }\n    ]\n}'
    )


def test_64_bit_integers_are_exact() -> None:
    assert encode(True, y=np.array([2**64 - 1], np.uint64)) == '{\n    "predictions": [18446744073709551615\n    ]\n}'
    assert encode(True, y=np.array([-(2**63)])) == '{\n    "predictions": [-9223372036854775808\n    ]\n}'


def test_a_row_answer_needs_a_batch() -> None:
    with pytest.raises(StatusError, match=r"^Tensor name: y has no shape information $"):
        encode(True, y=np.float32(1))
    with pytest.raises(StatusError, match=r"^Tensor name: b has inconsistent batch size: 1 expecting: 2$"):
        encode(True, a=floats(1, 2), b=floats(1))


def test_a_dtype_without_a_json_form_is_refused() -> None:
    for row_form in (True, False):
        with pytest.raises(StatusError, match=r"^Failed to write JSON value for tensor type: half$"):
            encode(row_form, y=np.array([1], np.float16))
        with pytest.raises(StatusError, match=r"^Failed to write JSON value for tensor type: complex64$"):
            encode(row_form, y=np.array([1], np.complex64))


def test_no_outputs_are_refused() -> None:
    with pytest.raises(StatusError, match=r"^Cannot convert empty tensor map to JSON$"):
        encode(True)


def test_an_error() -> None:
    assert encode_error('no "x"\n') == b'{\n    "error": "no \\"x\\"\\n"\n}'


shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b_bytes", "c%"]), st.tuples(st.sampled_from(["int64", "string"]), shapes), min_size=1
    ),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
)
def test_blocks_have_the_text_of_the_whole(
    drawn: dict[str, tuple[str, list[int]]], batch: int, block: int, row_form: bool
) -> None:
    """Also rows of more elements than a block. Python's own parser reads the values back."""
    arrays = {alias: np.arange(math.prod(shape) * batch).reshape(batch, *shape) for alias, (_, shape) in drawn.items()}
    outputs = {
        alias: np.array([b"%d" % value for value in array.ravel().tolist()], object).reshape(array.shape)
        if drawn[alias][0] == "string"
        else array
        for alias, array in arrays.items()
    }
    one = signature({}, {alias: dtype for alias, (dtype, _) in drawn.items()})
    whole = encode_outputs(outputs, one, row_form)
    with mock.patch.object(responses, "_BLOCK_ELEMENTS", block):
        assert encode_outputs(outputs, one, row_form) == whole
    if all(dtype == "int64" for dtype, _ in drawn.values()):
        (found,) = json.loads(whole).values()
        lists = {alias: array.tolist() for alias, array in arrays.items()}
        if len(lists) == 1:
            (wanted,) = lists.values()
        else:
            wanted = (
                [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)] if row_form else lists
            )
        assert found == wanted
