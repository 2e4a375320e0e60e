"""The tolerant parser against RapidJSON 1.1.0's rules, worked out by hand from its reader.h, and against `json`."""

import json
import math
from typing import Any

import pytest

from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json.parser import JsonObject, parse

VALID = [
    "{}",
    "[]",
    ' { "a" : [ 1 , 2.5 , -3e2 ] , "b" : { "c" : null } } ',
    '[true, false, null, "", "x", [], {}, [[]], [{}]]',
    r'["\"\\\/\b\f\n\r\tA", "é€", "😀", "😀"]',
    "[0, -0, 9223372036854775807, -9223372036854775808, 18446744073709551615, 1E5, 1e+5, 1.5e-7, 0.0]",
]


@pytest.mark.parametrize("text", VALID)
def test_reads_strict_json_as_the_standard_library_does(text: str) -> None:
    assert parse(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The document is empty"),
        (b"  ", "The document is empty. at offset: 2"),
        (b"]", "The document is empty. at offset: 0"),
        (b"nope", "Invalid value. at offset: 1"),
        (b"abc", "Invalid value. at offset: 0"),
        (b"-", "Invalid value. at offset: 1"),
        (b"-x", "Invalid value. at offset: 1"),
        (b"Infinit", "Invalid value. at offset: 7"),
        (b"Na", "Invalid value. at offset: 2"),
        (b"trux", "Invalid value. at offset: 3"),
        (b"[", "Invalid value. at offset: 1"),
        (b"[1,]", "Invalid value. at offset: 3"),
        (b"[,1]", "Invalid value. at offset: 1"),
        (b"[1 2]", "Missing a comma or ']' after an array element. at offset: 3"),
        (b"[1", "Missing a comma or ']' after an array element. at offset: 2"),
        (b"[01]", "Missing a comma or ']' after an array element. at offset: 2"),
        (b"{", "Missing a name for object member. at offset: 1"),
        (b"{1:2}", "Missing a name for object member. at offset: 1"),
        (b'{"a":1,}', "Missing a name for object member. at offset: 7"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at offset: 5"),
        (b'{"a":}', "Invalid value. at offset: 5"),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member. at offset: 7"),
        (b"[1.]", "Miss fraction part in number. at offset: 3"),
        (b"[1e]", "Miss exponent in number. at offset: 3"),
        (b"[1e+]", "Miss exponent in number. at offset: 4"),
        (b"[1e999]", "Number too big to be stored in double. at offset: 1"),
        (b'["abc', "Missing a closing quotation mark in string. at offset: 5"),
        (b'["a\nb"]', "Invalid escape character in string. at offset: 3"),
        (rb'["a\x"]', "Invalid escape character in string. at offset: 3"),
        (rb'["\u12G4"]', "Incorrect hex digit after \\u escape in string. at offset: 2"),
        (rb'["\ud800x"]', "The surrogate pair in string is invalid. at offset: 2"),
        (rb'["\ud800\u0041"]', "The surrogate pair in string is invalid. at offset: 2"),
        (b"[1\x00]", "Missing a comma or ']' after an array element. at offset: 2"),
    ],
)
def test_refuses_with_rapidjsons_message_and_offset(body: bytes, message: str) -> None:
    with pytest.raises(StatusError) as caught:
        parse(body)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.message == f"JSON Parse error: {message}"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[1] tail", [1]),
        (b'{"a": 1}}', {"a": 1}),
        (b"\xef\xbb\xbf[1]", [1]),
        (b"[Inf, -Inf, Infinity, -Infinity]", [math.inf, -math.inf, math.inf, -math.inf]),
        (b"[18446744073709551616]", [2.0**64]),
        (b'["\xff"]', ["\udcff"]),
        (rb'["\udc00"]', ["\udced\udcb0\udc80"]),
    ],
)
def test_takes_what_rapidjson_takes_beyond_json(body: bytes, value: Any) -> None:
    assert parse(body) == value


def test_nan_is_a_number() -> None:
    assert all(math.isnan(value) for value in parse(b"[NaN, -NaN]"))


def test_of_equal_keys_the_first_counts_and_the_object_says_so() -> None:
    found = parse(b'{"a": 1, "b": {"c": 1, "c": 2}, "a": [3]}')
    assert found == {"a": 1, "b": {"c": 1}}
    assert found.repeated
    assert found["b"].repeated
    assert isinstance(found, JsonObject)


def test_numbers_keep_their_type() -> None:
    types = [type(value) for value in parse(b"[1, 1.0, 1e0, -1, 18446744073709551615, 18446744073709551616]")]
    assert types == [int, float, float, int, int, float]


def test_depth_has_no_bound() -> None:
    value = parse(b"[" * 500_000 + b"]" * 500_000)
    depth = 0
    while value:
        (value,) = value
        depth += 1
    assert depth == 499_999
