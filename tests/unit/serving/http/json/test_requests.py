"""Predict requests against arrays and messages worked out by hand from TensorFlow Serving's json_tensor.cc."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Array
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json import decode_inputs, parse_document, signature_name

INT = {"x": "int64"}
PAIR = {"a": "int64", "b": "float"}


def decode(body: str | bytes, inputs: Mapping[str, str]) -> list[Array]:
    raw = body.encode() if isinstance(body, str) else body
    return list(decode_inputs(parse_document(raw), signature(inputs)).arrays)


def error(body: str | bytes, inputs: Mapping[str, str]) -> StatusError:
    with pytest.raises(StatusError) as caught:
        decode(body, inputs)
    return caught.value


def expect(arrays: list[Array], *wanted: Array) -> None:
    assert [array.dtype for array in arrays] == [array.dtype for array in wanted]
    for array, want in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(array, want)


def i64(value: Any) -> Array:
    return np.array(value, dtype=np.int64)


def f32(value: Any) -> Array:
    return np.array(value, dtype=np.float32)


def strings(*values: bytes) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.mark.parametrize(
    ("body", "inputs", "wanted"),
    [
        ('{"instances": [1, 2]}', INT, [i64([1, 2])]),
        ('{"instances": [[1, 2], [3, 4]]}', INT, [i64([[1, 2], [3, 4]])]),
        ('{"instances": [{"x": [1]}, {"x": [2]}]}', INT, [i64([[1], [2]])]),
        ('{"instances": [{"b": 0.5, "a": 1}, {"a": 2, "b": 3}]}', PAIR, [i64([1, 2]), f32([0.5, 3])]),
        ('{"instances": [[]]}', INT, [i64([[]])]),
        ('{"instances": [[[]], [[]]]}', INT, [np.zeros((2, 1, 0), np.int64)]),
        ('{"inputs": 7}', INT, [i64(7)]),
        ('{"inputs": [[1], [2]]}', INT, [i64([[1], [2]])]),
        ('{"inputs": {"x": [1], "unknown": {"deep": [1, "2"]}}}', INT, [i64([1])]),
        ('{"inputs": {"a": [1, 2], "b": 0.5}}', PAIR, [i64([1, 2]), f32(0.5)]),
        ('{"inputs": []}', INT, [i64([])]),
        ('{"inputs": [true, false]}', {"x": "bool"}, [np.array([True, False])]),
        ('{"inputs": [0, 255]}', {"x": "uint8"}, [np.array([0, 255], np.uint8)]),
        ('{"inputs": [4294967295]}', {"x": "uint32"}, [np.array([2**32 - 1], np.uint32)]),
        ('{"inputs": [18446744073709551615, 0]}', {"x": "uint64"}, [np.array([2**64 - 1, 0], np.uint64)]),
        ('{"inputs": [1, 2.5, 1e40, -1e40, 1e-60]}', {"x": "float"}, [f32([1, 2.5, np.inf, -np.inf, 0])]),
        ('{"inputs": [NaN, Infinity, -Infinity, Inf]}', {"x": "float"}, [f32([np.nan, np.inf, -np.inf, np.inf])]),
        ('{"inputs": [36893488147419103232]}', {"x": "double"}, [np.array([2.0**65])]),
        ('{"inputs": ["a", "\u00e9", ""]}', {"x": "string"}, [strings(b"a", "\u00e9".encode(), b"")]),
        (b'{"inputs": ["\xff\xfe"]}', {"x": "string"}, [strings(b"\xff\xfe")]),
        ('{"instances": [{"b64": "AP8="}, "a"]}', {"x": "string"}, [strings(b"\x00\xff", b"a")]),
        ('{"instances": [{"b64": "AP8"}]}', {"b64": "string"}, [strings(b"\x00\xff")]),
        ('{"inputs": [["a", "b"], ["c", "d"]]}', {"x": "string"}, [strings(b"a", b"b", b"c", b"d").reshape(2, 2)]),
        ('{"inputs": {"b64": "aGk="}}', {"x": "string"}, [np.array(b"hi", dtype=object)]),
        ('{"instances": [{"x": {"b64": "aGk="}}]}', {"x": "string"}, [strings(b"hi")]),
    ],
)
def test_a_body_becomes_these_arrays(body: str, inputs: dict[str, str], wanted: list[Array]) -> None:
    expect(decode(body, inputs), *wanted)


@pytest.mark.parametrize(
    "body",
    [
        '{"instances": [1], "instances": [2]}',
        '{"instances": [1]} {"instances": [2]}',
        '{"instances": [1], "note": "a:b", "instances": 5}',
        '{"instances": [{"x": 1, "x": 2}]}',
        '{"note": {"instances": [9]}, "instances": [{"x": 1, "x": [2, 3]}]}',
    ],
)
def test_the_first_of_equal_keys_counts_and_trailing_bytes_do_not(body: str) -> None:
    expect(decode(body, INT), i64([1]))


def test_the_first_of_equal_keys_counts_in_columns() -> None:
    expect(decode('{"inputs": {"x": [1], "x": [2]}}', INT), i64([1]))


def test_an_object_with_two_b64_keys_is_no_string() -> None:
    message = error('{"inputs": {"x": [{"b64": "aGk=", "b64": "aGk="}]}}', {"x": "string"}).message
    assert message.endswith(" not formatted correctly for base64 data")


DENIED = "is not of expected type: int64"
ROW = "Failed to process element: {} of 'instances' list. Error: INVALID_ARGUMENT: {}"


@pytest.mark.parametrize(
    ("leaf", "shown", "kind"),
    [
        ("1.0", "1.0", "Number"),
        ("1e2", "100.0", "Number"),
        ("1e30", "1e30", "Number"),
        ("1.25e-9", "1.25e-09", "Number"),
        ("9223372036854775808", "9223372036854775808", "Number"),
        ('"3"', '"3"', "String"),
        ("true", "true", "True"),
        ("false", "false", "False"),
        ("null", "null", "Null"),
        ("{}", "{}", "Object"),
        ('{"b64": "aGk="}', '{\n    "b64": "aGk="\n}', "Object"),
    ],
)
def test_an_integer_must_be_one(leaf: str, shown: str, kind: str) -> None:
    told = f"JSON Value: {shown} Type: {kind} {DENIED}"
    if leaf in ("1e30", "9223372036854775808"):
        number = f"{float(leaf):.1f}" if "e" in leaf else leaf
        told += f". Input x is int64, which cannot hold {number}. Send integers from {-(2**63)} to {2**63 - 1}."
    assert error(f'{{"inputs": [1, {leaf}]}}', INT).message == told
    assert error(f'{{"instances": [{{"x": {leaf}}}]}}', INT).message == ROW.format("0 key: x", told)


@pytest.mark.parametrize("leaf", ["2147483648", "-2147483649"])
@pytest.mark.parametrize("dtype", ["int32", "int16", "int8", "uint8"])
def test_more_than_32_bits_are_refused_with_their_words_and_the_range(leaf: str, dtype: str) -> None:
    message, limits = error(f'{{"inputs": [{leaf}]}}', {"x": dtype}).message, np.iinfo(dtype)
    theirs = f"JSON Value: {leaf} Type: Number is not of expected type: {dtype}"
    ours = f"Input x is {dtype}, which cannot hold {leaf}. Send integers from {limits.min} to {limits.max}."
    assert message == f"{theirs}. {ours}"


@pytest.mark.parametrize(
    ("dtype", "leaf"),
    [
        ("uint32", "-1"), ("uint32", "4294967296"), ("uint64", "-1"), ("uint64", "18446744073709551616"),
        ("float", "true"), ("float", '"1"'), ("double", "null"), ("bool", "1"), ("bool", "0.0"), ("string", "1"),
    ],
)  # fmt: skip
def test_other_types_are_as_strict(dtype: str, leaf: str) -> None:
    assert f"is not of expected type: {dtype}" in error(f'{{"inputs": [{leaf}]}}', {"x": dtype}).message


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        ('{"inputs": [[1], [1, 2]]}', INT, "Encountered list at unexpected size: 2 at level: 1 expected size: 1"),
        ('{"inputs": [1, [2]]}', INT, "Encountered list at unexpected level: 1 expected < 1"),
        (
            '{"inputs": [[1], 2]}',
            INT,
            "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
        ),
        ('{"inputs": {"a": [1]}}', PAIR, "Missing named input: b in 'inputs' object."),
        ('{"inputs": {}}', INT, "Missing named input: x in 'inputs' object."),
        (
            '{"inputs": [1]}',
            PAIR,
            "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
            "tensorinfo_map",
        ),
        (
            '{"instances": [1]}',
            PAIR,
            "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
            "tensorinfo_map",
        ),
        ('{"instances": [{"x": 1}, 2]}', INT, "Expecting object but got list at item 1 of input list"),
        ('{"instances": [1, {"x": 2}]}', INT, "Expecting value/list but got object at item 1 of input list"),
        (
            '{"instances": [{"x": 1, "y": 2}]}',
            INT,
            ROW.format("0 key: y", "JSON object: does not have named input: y"),
        ),
        (
            '{"instances": [{"a": 1}]}',
            PAIR,
            "Failed to process element: 0 of 'instances' list. JSON object: {\n    \"a\": 1\n} keys must be equal to: "
            "a,b",
        ),
        ('{"instances": [[1], [1, 2]]}', INT, ROW.format("1", "Expecting tensor size: 1 but got: 2")),
        ('{"instances": [[1, 2], [[1, 2]]]}', INT, ROW.format("1", "Expecting shape [2] but got: [1,2]")),
        (
            '{"instances": [{"b64": "aGk="}]}',
            {"a": "string", "b": "string"},
            "input size does not match signature: 1!=2 len({a}) != len({a,b}). Sent extra: {}. "
            "Missing but required: {b}.",
        ),
        ('{"inputs": {"b64": "a"}}', {"x": "string"}, "Unable to base64 decode"),
        ('{"inputs": {"b64": "@@@@"}}', {"x": "string"}, "Unable to base64 decode"),
        ("{}", INT, "Missing 'inputs' or 'instances' key"),
    ],
)
def test_is_refused_with_their_words(body: str, inputs: dict[str, str], message: str) -> None:
    refused = error(body, inputs)
    assert refused.code is Code.INVALID_ARGUMENT
    assert refused.message == message


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("[1]", "Is not object"),
        ('{"instances": [1], "inputs": [1]}', "expecting only one of 'inputs' or 'instances' keys to exist "),
        ('{"instances": 1}', "Expecting 'instances' to be an list/array"),
        ('{"instances": []}', "No values in 'instances' array"),
    ],
)
def test_an_error_about_the_whole_body_shows_it(body: str, end: str) -> None:
    message = error(body, INT).message
    assert message.startswith("JSON Value: ")
    assert message.endswith(end)


def test_a_dtype_without_a_json_form_is_unimplemented() -> None:
    refused = error('{"inputs": [1.0]}', {"x": "half"})
    assert refused.code is Code.UNIMPLEMENTED
    assert refused.message == "Conversion of JSON Value: 1.0 to type: half"


def test_in_a_row_it_is_wrapped_as_their_invalid_argument() -> None:
    refused = error('{"instances": [1.0]}', {"x": "half"})
    assert refused.code is Code.INVALID_ARGUMENT
    assert refused.message == ROW.format("0", "x").replace(
        "INVALID_ARGUMENT: x", "UNIMPLEMENTED: Conversion of JSON Value: 1.0 to type: half"
    )


def test_the_signature_name_must_be_a_string() -> None:
    assert signature_name(parse_document(b'{"signature_name": "g"}')) == "g"
    assert signature_name(parse_document(b"{}")) == ""
    with pytest.raises(StatusError) as caught:
        signature_name(parse_document(b'{"signature_name": 1}'))
    wanted = (
        'JSON Value: {\n    "signature_name": 1\n} not formatted correctly. '
        "'signature_name' key must be a string value."
    )
    assert caught.value.message == wanted


def test_a_shown_value_is_cut_after_256_bytes() -> None:
    message = error(f'{{"instances": [], "note": "{"n" * 300}", "more": 1}}', INT).message
    shown = message.removeprefix("JSON Value: ").removesuffix(" No values in 'instances' array")
    assert shown == '{\n    "instances": [],\n    "note": "' + "n" * 300 + '"'


def test_one_long_string_among_many_numbers_costs_no_memory() -> None:
    body = '{"inputs": ["' + "s" * 1_000_000 + '"' + ", 1" * 100_000 + "]}"
    assert error(body, INT).message.endswith("Type: String is not of expected type: int64")


def test_a_rank_that_no_array_has_is_refused() -> None:
    refused = error('{"inputs": ' + "[" * 500 + "1" + "]" * 500 + "}", INT)
    assert refused.message == "Tensor rank 500 is larger than the supported rank 64"
