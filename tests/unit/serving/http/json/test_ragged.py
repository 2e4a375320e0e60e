"""Lists of different lengths: what they decode to, and what keeps TensorFlow Serving's error."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Signature
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json import decode_inputs, pad_ragged, parse_document

IDS = signature({"watched": "int64"})
WEIGHTED = signature({"friends": "int64", "friends_weights": "float", "user": "int64"})
PADDING: dict[str, tuple[int | None, ...]] = {"ids": (-1,), "weighted": (-1, 0, None)}


def decoded(body: Any, signature: Signature, padding: tuple[int | None, ...]) -> dict[str, np.ndarray[Any, Any]] | None:
    padded = dataclasses.replace(signature, padding=padding)
    document = pad_ragged(parse_document(json.dumps(body).encode()), padded)
    if document is None:
        return None
    arrays = decode_inputs(document, signature).arrays
    return {info.alias: array for info, array in zip(signature.inputs, arrays, strict=True)}


def test_a_weight_that_was_forgotten_is_no_padding() -> None:
    body = {"inputs": {"friends": [[1, 5], [2, 3]], "friends_weights": [[0.5], [1, 0.25]], "user": [7, 8]}}
    with refused(StatusError, match="friends_weights"):
        decoded(body, WEIGHTED, PADDING["weighted"])


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [[1, 2], [3, 4]]},
        {"instances": [[1, 2], 3]},
        {"instances": [[1, [2]], [3]]},
        {"instances": [1, 2]},
        {"instances": []},
        {"instances": 5},
        {"instances": [{"watched": [1]}, [2, 3]]},
        {"instances": [{"watched": [1]}, {"other": [2, 3]}]},
        {"instances": [{"b64": "AA=="}, {"b64": "AAA="}]},
        {"inputs": 5},
        {"inputs": {"other": [[1], []]}},
        {"inputs": [[1], []], "instances": [[1], []]},
        {},
    ],
)
def test_anything_else_is_left_alone(body: Any) -> None:
    assert decoded(body, IDS, PADDING["ids"]) is None


def test_an_input_that_is_no_list_is_left_alone() -> None:
    body = {"inputs": {"friends": [[1, 5]], "friends_weights": [[1, 2]], "user": [[7, 8], [9]]}}
    assert decoded(body, WEIGHTED, PADDING["weighted"]) is None
    assert decoded({"instances": [[1], []]}, IDS, (None,)) is None
    assert decoded({"instances": [[1], []]}, IDS, ()) is None


def test_a_key_twice_is_no_ragged_list() -> None:
    body = b'{"instances": [{"watched": [1], "watched": [2]}, {"watched": [3, 4]}]}'
    assert pad_ragged(parse_document(body), dataclasses.replace(IDS, padding=PADDING["ids"])) is None


def test_a_value_of_another_type_is_still_an_error() -> None:
    with pytest.raises(StatusError, match="is not of expected type: int64"):
        decoded({"instances": [[1, 2], [1.5]]}, IDS, PADDING["ids"])


def test_one_long_list_does_not_fill_the_memory() -> None:
    """A body of 250 KB became lists of gigabytes, on the event loop."""
    slow: list[int] = []
    padded = dataclasses.replace(IDS, padding=PADDING["ids"])
    document = parse_document(json.dumps({"instances": [[1]] * 3000 + [[1] * 1000]}).encode())
    assert pad_ragged(document, padded, lambda size=0: slow.append(size)) is not None
    assert max(slow) > 16 * 2**10, "in a thread"
    document = parse_document(json.dumps({"instances": [[1]] * 3000 + [[1] * 10_000]}).encode())
    with refused(StatusError, match="3001") as caught:
        pad_ragged(document, padded)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    many = [[1] * 4000, [1] * 1000] * 2000  # mostly values that were sent
    assert pad_ragged(parse_document(json.dumps({"instances": many}).encode()), padded) is not None
