"""No body, however broken, is anything but arrays or a status that is the client's own."""

import json
import string
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import document, parse_document

VALID = [
    b'{"signature_name": "f", "instances": [{"a": 1, "b": 2.5, "c": "x"}, {"a": 2, "b": NaN, "c": {"b64": "aGk="}}]}',
    b'{"inputs": {"x": [[1, 2], [3, 4]], "b64": ["\\ud83d\\ude00"]}}',
    b'{"instances": [[true, false], [1e3, -0.5e-7]], "inputs": null}',
]
LOOSE = [
    b'{"instances": [NaN, Infinity, -Infinity, 1e308], "instances": 2}',
    b' {"inputs": {"x": [1, 2.0, -0, 1e-400], "x": "a:b", "y": "\\u00e9\\ud83d\\ude00"}} tail',
    b'{"a": "http://b", "c": [18446744073709551615, 18446744073709551616, -9223372036854775809]}',
]
PIECES = [
    b"", b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"0", b"-", b".", b"e", b"9", b"\\", b"\\u", b"\\ud800",
    b"\\udc00", b"NaN", b"Inf", b"Infinity", b"true", b"null", b"\x00", b"\xff", b"\xc3\xa9", b"\n", b"\x1f", b"1e999", b"9" * 400,
    b'"x":1,', b'"a":{},',
]  # fmt: skip
SMALL = settings(max_examples=400, deadline=None)

leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.builds(lambda text: {"b64": text}, st.text(string.ascii_letters + "=+/ ", max_size=6))
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "a", "b", "c", "b64"]), inner),
    max_leaves=12,
)


def outcome(body: bytes, read: Callable[[bytes], Any]) -> str:
    """The value, telling 1 from 1.0 and true, or the message."""
    try:
        return repr(read(body))
    except StatusError as error:
        return error.message


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from([*VALID, *LOOSE]), st.data())
def test_both_parsers_agree(body: bytes, data: st.DataObject) -> None:
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(changed)))
        piece = data.draw(st.sampled_from(PIECES))
        changed[at : at + data.draw(st.integers(0, 2))] = piece
    mutated = bytes(changed)
    loose = outcome(mutated, document._parse_loosely)
    if loose.startswith("{"):
        assert outcome(mutated, lambda raw: parse_document(raw).members) == loose
    else:
        assert outcome(mutated, parse_document).endswith((loose, "Is not object"))


@SMALL
@given(values)
def test_reads_what_json_writes(value: Any) -> None:
    text = json.dumps({"v": value})
    wanted = json.loads(
        text, parse_int=lambda digits: int(digits) if -(2**63) <= int(digits) < 2**64 else float(digits)
    )
    np.testing.assert_equal(parse_document(text.encode()).members, wanted)
