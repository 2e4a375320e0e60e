"""Classify and regress in JSON: converts request bodies to tf.Examples, and results to answers (json_tensor.cc).

An example is an object of features. This module serializes it without TensorFlow, which may not be imported yet:
`example.proto` and `feature.proto` are small.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuembed.formats.protobuf import bytes_field, varint
from tpuembed_serving.core.classify_regress import Classification, InferenceResult, check_context
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.http.json.debug import type_name
from tpuembed_serving.http.json.document import Document, JsonObject, format_error
from tpuembed_serving.http.json.responses import numbers, plain_numbers, write_json
from tpuembed_serving.http.json.tensors import base64_decode, is_base64_object

__all__ = ["decode_examples", "encode_result"]

_EXAMPLES_BETWEEN_CHECKS = 256
_INT64 = range(-(2**63), 2**63)
# Field numbers of the oneof in Feature.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_KIND_NAMES = {_BYTES_LIST: "bytes", _FLOAT_LIST: "float", _INT64_LIST: "int64"}
_KIND_OF_TYPE: dict[type, int] = {
    **dict.fromkeys((str, dict, JsonObject), _BYTES_LIST),
    **dict.fromkeys((int, bool), _INT64_LIST),
    float: _FLOAT_LIST,
}


def decode_examples(document: Document, check: Check = noop) -> list[bytes]:
    """Return the request's serialized tf.Examples, each with the request's context before its own features.

    `check` is called now and then.

    Raises:
        StatusError: there are no examples, or a value is not allowed in an example.
    """
    members = document.members
    context = _example(members["context"]) if "context" in members else b""
    if "examples" not in members:
        # TensorFlow Serving's text names classify for regress too.
        raise format_error(members, "When method is classify, key 'examples' is expected and was not found")
    examples = members["examples"]
    if not isinstance(examples, list):
        raise format_error(members, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise format_error(members, "'examples' value is an empty array")
    check_context(context, len(examples), check)
    found = []
    for index, value in enumerate(examples):
        if index % _EXAMPLES_BETWEEN_CHECKS == 0:
            check()
        found.append(context + _example(value))
    return found


def _example(value: Any) -> bytes:
    """Serialize an Example {features: 1 {feature: 1 map<key: 1, value: 2>}}. Of equal keys, parsers keep the last."""
    if not isinstance(value, dict):
        raise invalid_argument(f"Example must be JSON object but got JSON {type_name(value)}")
    repeats = value.repeats if isinstance(value, JsonObject) else ()
    features = b"".join(
        bytes_field(1, bytes_field(1, _bytes(name)) + bytes_field(2, _feature(name, content)))
        for name, content in (*value.items(), *repeats)
    )
    return bytes_field(1, features)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _feature(name: str, content: Any) -> bytes:
    """Serialize a Feature {bytes_list: 1 | float_list: 2 | int64_list: 3}. An empty list sets none of them."""
    values = content if isinstance(content, list) else [content]
    if not values:
        return b""
    kinds = {_KIND_OF_TYPE.get(type(value)) for value in values}
    kind = kinds.pop()
    if kinds or kind is None or kind == _BYTES_LIST or (kind == _INT64_LIST and not _fits(values)):
        kind = _checked_kind(name, values)
    return bytes_field(kind, _ENCODERS[kind](values))


def _fits(values: Sequence[int]) -> bool:
    return min(values) in _INT64 and max(values) in _INT64


def _checked_kind(name: str, values: Sequence[Any]) -> int:
    """Return the kind of all values. Checks value by value, so that the first error is reported."""
    kind = None
    for value in values:
        found = _KIND_OF_TYPE.get(type(value))
        if found is None or (isinstance(value, dict) and not is_base64_object(value)):
            raise invalid_argument(f"Feature: {name} has element with unexpected JSON type: {type_name(value)}")
        if kind is not None and found != kind:
            text = f"Unexpected element type in feature: {name} expecting type: {_KIND_NAMES[kind]}"
            raise invalid_argument(text)
        kind = found
        if isinstance(value, dict):
            base64_decode(value)
        if kind == _INT64_LIST and value not in _INT64:
            raise invalid_argument(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    assert kind is not None
    return kind


def _bytes_list(values: Sequence[Any]) -> bytes:
    return b"".join(
        bytes_field(1, base64_decode(value) if isinstance(value, dict) else _bytes(value)) for value in values
    )


def _float_list(values: Sequence[float]) -> bytes:
    """Serialize a FloatList. Values that are too large for a float become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bytes_field(1, np.array(values, np.float64).astype("<f4").tobytes())


def _int64_list(values: Sequence[int]) -> bytes:
    return bytes_field(1, b"".join(map(varint, values)))


_ENCODERS = {_BYTES_LIST: _bytes_list, _FLOAT_LIST: _float_list, _INT64_LIST: _int64_list}


def encode_result(result: InferenceResult) -> bytes:
    """Return the body of an answer: a number per example, or a list of [label, score] per example."""
    if not isinstance(result, Classification):
        return b'{"results":%b}' % numbers(result.values)
    labels = [[label.decode("utf-8", "surrogateescape") for label in row] for row in result.labels.tolist()]
    rows = zip(labels, plain_numbers(result.scores), strict=True)
    return write_json({"results": [list(zip(*row, strict=True)) for row in rows]})
