"""Predict requests that tests/e2e/vectors cannot hold: bytes that are no text, and values that are large."""

from collections.abc import Mapping

import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Array
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import decode_inputs, parse_document

INT = {"x": "int64"}


def decode(body: str | bytes, inputs: Mapping[str, str]) -> list[Array]:
    raw = body.encode() if isinstance(body, str) else body
    return list(decode_inputs(parse_document(raw), signature(inputs)).arrays)


def error(body: str | bytes, inputs: Mapping[str, str]) -> StatusError:
    with pytest.raises(StatusError) as caught:
        decode(body, inputs)
    return caught.value


def test_bytes_that_are_no_utf8_stay_as_they_are() -> None:
    (array,) = decode(b'{"inputs": ["\xff\xfe", "\xc3\xa9"]}', {"x": "string"})
    assert array.tolist() == [b"\xff\xfe", b"\xc3\xa9"]


def test_an_object_with_two_b64_keys_is_no_string() -> None:
    message = error('{"inputs": {"x": [{"b64": "aGk=", "b64": "aGk="}]}}', {"x": "string"}).message
    assert message.endswith(" not formatted correctly for base64 data")


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
