"""tf.Examples from JSON, read back by TensorFlow's own class; answers of classify and regress, byte for byte."""

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.example import example_pb2

from tpuembed_serving.core.classify_regress import Classification, to_tensor
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json import decode_examples, encode_result, parse_document


def examples(body: str | bytes) -> list[dict[str, Any]]:
    """Each example's features as {name: (kind, values)}."""
    raw = body.encode() if isinstance(body, str) else body
    return [features(data) for data in decode_examples(parse_document(raw))]


def features(data: bytes) -> dict[str, Any]:
    message = example_pb2.Example.FromString(data)
    found = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = (kind, list(getattr(feature, kind).value)) if kind else (None, [])
    return found


def test_names_and_bytes_that_are_no_utf8() -> None:
    (found,) = decode_examples(parse_document(b'{"examples": [{"\xc3\xa9": "\xff"}]}'))
    assert features(found) == {"\u00e9": ("bytes_list", [b"\xff"])}


def test_copies_of_the_context_have_a_limit() -> None:
    """A body of 230 KB had 1.4 GB of examples."""
    slow: list[int] = []
    few = json.dumps({"context": {"c": "x" * 20_000}, "examples": [{}] * 100})
    assert len(decode_examples(parse_document(few.encode()), lambda size=0: slow.append(size))) == 100
    assert max(slow) > 16 * 2**10, "in a thread"
    many = json.dumps({"context": {"c": "x" * 20_000}, "examples": [{}] * 70_000})
    with pytest.raises(StatusError, match=r"^the context takes 133\d\.\d MiB, .* The limit is 64 MiB\. ") as caught:
        decode_examples(parse_document(many.encode()))
    assert caught.value.code is Code.RESOURCE_EXHAUSTED


INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
ELEMENTS = (INT64, st.booleans() | INT64, FLOATS, TEXTS)
VALUES = st.one_of(INT64, FLOATS, TEXTS, *(st.lists(elements, max_size=4) for elements in ELEMENTS))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_any_example_is_what_json_says(value: dict[str, Any]) -> None:
    """Against TensorFlow's class, filled by its own methods."""
    wanted = example_pb2.Example()
    for name, given_values in value.items():
        feature = wanted.features.feature[name]
        values = given_values if isinstance(given_values, list) else [given_values]
        if values and isinstance(values[0], str):
            feature.bytes_list.value.extend(text.encode() for text in values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        elif values:
            feature.int64_list.value.extend(map(int, values))
    (found,) = decode_examples(parse_document(json.dumps({"examples": [value]}).encode()))
    message = example_pb2.Example.FromString(found)
    assert json_format.MessageToDict(message).get("features", {}) == json_format.MessageToDict(wanted).get(
        "features", {}
    )


def test_a_long_feature_that_mixes_kinds_names_the_first_that_differs() -> None:
    with pytest.raises(StatusError) as caught:
        examples('{"examples": [{"F": [1' + ", 2" * 1000 + ', "a", 2.5]}]}')
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.message == "Unexpected element type in feature: F expecting type: int64"


def matrix(*rows: list[bytes]) -> Any:
    array = np.empty((len(rows), len(rows[0])), object)
    for index, row in enumerate(rows):
        array[index] = row
    return array


def test_the_bytes_of_a_classification() -> None:
    labels = matrix([b"a", b'"'], [b"\xff", b"\xc3\xa9"])
    scores = np.array([[0.1, 1], [np.nan, -np.inf]], np.float32)
    assert encode_result(Classification(labels, scores)) == (
        b'{"results":[[["a",0.1],["\\"",1.0]],[["\xff",NaN],["\xc3\xa9",-Infinity]]]}'
    )


def test_no_examples() -> None:
    with pytest.raises(StatusError, match=r"^Input is empty\.$"):
        to_tensor([])
