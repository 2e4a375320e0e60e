"""What RapidJSON 1.1.0 reads and refuses, worked out by hand from its reader.h. Messages have no offsets here."""

import json
import math
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json.document import JsonObject, parse_document


def parse(body: bytes) -> Any:
    return parse_document(b'{"v": ' + body + b"}").members["v"]


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
        (b"  ", "The document is empty."),
        (b"nope", "Invalid value."),
        (b"abc", "Invalid value."),
        (b"-", "Invalid value."),
        (b"-x", "Invalid value."),
        (b"Infinit", "Invalid value."),
        (b"Na", "Invalid value."),
        (b"trux", "Invalid value."),
        (b"[", "Invalid value."),
        (b"[1,]", "Invalid value."),
        (b"[,1]", "Invalid value."),
        (b"[1 2]", "Missing a comma or ']' after an array element."),
        (b"[1", "Missing a comma or ']' after an array element."),
        (b"[01]", "Missing a comma or ']' after an array element."),
        (b"{", "Missing a name for object member."),
        (b"{1:2}", "Missing a name for object member."),
        (b'{"a":1,}', "Missing a name for object member."),
        (b'{"a" 1}', "Missing a colon after a name of object member."),
        (b'{"a":}', "Invalid value."),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member."),
        (b"[1.]", "Miss fraction part in number."),
        (b"[1e]", "Miss exponent in number."),
        (b"[1e+]", "Miss exponent in number."),
        (b"[1e999]", "Number too big to be stored in double."),
        (b'["abc', "Missing a closing quotation mark in string."),
        (b'["a\nb"]', "Invalid escape character in string."),
        (rb'["a\x"]', "Invalid escape character in string."),
        (rb'["\u12G4"]', "Incorrect hex digit after \\u escape in string."),
        (rb'["\ud800x"]', "The surrogate pair in string is invalid."),
        (rb'["\udc00"]', "The surrogate pair in string is invalid."),
        (rb'["\ud800\u0041"]', "The surrogate pair in string is invalid."),
        (b"[1\x00]", "Missing a comma or ']' after an array element."),
    ],
)
def test_refuses_with_rapidjsons_message(body: bytes, message: str) -> None:
    with pytest.raises(StatusError) as caught:
        parse_document(body)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.message == f"JSON Parse error: {message}"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[Inf, -Inf, Infinity, -Infinity]", [math.inf, -math.inf, math.inf, -math.inf]),
        (b"[18446744073709551616]", [2.0**64]),
        (b'["\xff"]', ["\udcff"]),
        (b'["-Inf \\" NaN", -Inf]', ['-Inf " NaN', -math.inf]),
        (rb'["\\ud800", "\ud83d\ude00"]', ["\\ud800", "\U0001f600"]),
    ],
)
def test_takes_what_rapidjson_takes_beyond_json(body: bytes, value: Any) -> None:
    assert parse(body) == value


def test_nan_is_a_number() -> None:
    assert all(math.isnan(value) for value in parse(b"[NaN, -NaN]"))


def test_of_equal_keys_the_first_counts_and_the_object_says_so() -> None:
    found = parse(b'{"a": 1, "b": {"c": 1, "c": 2}, "a": [3]}')
    assert found == {"a": 1, "b": {"c": 1}}
    assert isinstance(found, JsonObject)
    assert found.repeats == (("a", [3]),)
    assert found["b"].repeats == (("c", 2),)


def test_numbers_keep_their_type() -> None:
    types = [type(value) for value in parse(b"[1, 1.0, 1e0, -1, 18446744073709551615, 18446744073709551616]")]
    assert types == [int, float, float, int, int, float]


@pytest.mark.parametrize("body", [b'{"a": 1}}', b'{"a": 1} tail', b'\xef\xbb\xbf{"a": 1}', b'\n {"a": 1}\x00'])
def test_takes_what_is_around_the_value(body: bytes) -> None:
    assert parse_document(body).members == {"a": 1}


leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.builds(lambda text: {"b64": text}, st.text(string.ascii_letters + "=+/ ", max_size=6))
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "a", "b", "c", "b64"]), inner),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(values)
def test_reads_what_json_writes(value: Any) -> None:
    text = json.dumps({"v": value})
    wanted = json.loads(
        text, parse_int=lambda digits: int(digits) if -(2**63) <= int(digits) < 2**64 else float(digits)
    )
    np.testing.assert_equal(parse_document(text.encode()).members, wanted)


@pytest.mark.parametrize("inner", [b"[", b'{"a":'])
def test_json_is_as_deep_as_it_may_be(inner: bytes) -> None:
    close = b"]" if inner == b"[" else b"}"

    def body(depth: int) -> bytes:
        return b'{"unknown": ' + inner * (depth - 1) + b"1" + close * (depth - 1) + b', "instances": [1]}'

    for depth in (5, 301):
        assert parse_document(body(depth)).members["instances"] == [1]
    for deep in (inner * 5_000_000, body(100_000), body(100_000).replace(b"1", b"NaN")):
        with refused(StatusError):
            parse_document(deep)
