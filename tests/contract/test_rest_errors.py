"""REST requests that are refused: TensorFlow Serving's status and text for each, whatever is wrong.

Source of the texts: tensorflow_serving/util/json_tensor.cc and model_servers/http_rest_api_handler.cc. They print the JSON
value of which they speak; here such texts begin with "..." and are compared from there.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.contract_serve import Server, shared_server

HALF, ZOO = "half_plus_two:predict", "zoo:predict"
ROW = "Failed to process element: 0 of 'instances' list. Error: INVALID_ARGUMENT: "
PLAIN = "but expecting {} as multiple input tensors required as per tensorinfo_map"


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def refusal(server: Server, method: str, path: str, body: Any, **headers: str) -> tuple[int, str]:
    reply = server.ask(method, path, body, headers)
    assert reply.headers["content-type"] == "application/json"
    assert "Traceback" not in reply.error
    return reply.status, reply.error


def assert_text(found: str, wanted: str) -> None:
    if wanted.startswith("..."):
        assert found.endswith(wanted.removeprefix("...")), found
    else:
        assert found == wanted


BODIES: Mapping[str, list[tuple[Any, str]]] = {
    "keys": [
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"examples": [1]}, "Missing 'inputs' or 'instances' key"),
        (
            {"instances": [1], "inputs": [1]},
            "... Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist ",
        ),
        ({"instances": 1}, "... Expecting 'instances' to be an list/array"),
        ({"instances": None}, "... Expecting 'instances' to be an list/array"),
        ({"instances": []}, "... No values in 'instances' array"),
        (
            {"signature_name": 1, "instances": [1]},
            "... not formatted correctly. 'signature_name' key must be a string value.",
        ),
        ({"signature_name": "S", "instances": [1]}, 'Serving signature name: "S" not found in signature def'),
    ],
    "no object": [
        ("", "JSON Parse error: The document is empty"),
        ("1", "JSON Value: 1 Is not object"),
        ("null", "JSON Value: null Is not object"),
        ("[1, 2]", "JSON Value: [1, 2] Is not object"),
    ],
    "rows": [
        ({"instances": [1, {"x": 2}]}, "Expecting value/list but got object at item 1 of input list"),
        ({"instances": [{"x": 1}, [2]]}, "Expecting object but got list at item 1 of input list"),
        (
            {"instances": [{"x": 1, "z": 2}]},
            "Failed to process element: 0 key: z of 'instances' list. Error: INVALID_ARGUMENT: "
            "JSON object: does not have named input: z",
        ),
        (
            {"instances": [{"x": 1}, {}]},
            "Failed to process element: 1 of 'instances' list. JSON object: {} keys must be equal to: x",
        ),
    ],
    "shapes of rows": [
        (
            {"instances": [[1], [1, 2]]},
            "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: Expecting tensor size: 1 but got: 2",
        ),
        (
            {"instances": [{"x": [1, 2]}, {"x": [[1, 2]]}]},
            "Failed to process element: 1 key: x of 'instances' list. Error: INVALID_ARGUMENT: "
            "Expecting shape [2] but got: [1,2]",
        ),
        ({"instances": [[1, [2]]]}, f"{ROW}Encountered list at unexpected level: 1 expected < 1"),
        (
            {"instances": [[[1], [2, 3]]]},
            f"{ROW}Encountered list at unexpected size: 2 at level: 1 expected size: 1",
        ),
    ],
    "columns": [
        ({"inputs": {}}, "Missing named input: x in 'inputs' object."),
        ({"inputs": {"y": [1]}}, "Missing named input: x in 'inputs' object."),
        ({"inputs": [[1], [2, 3]]}, "Encountered list at unexpected size: 2 at level: 1 expected size: 1"),
        ({"inputs": [1, [2]]}, "Encountered list at unexpected level: 1 expected < 1"),
        (
            {"inputs": [[1], 2]},
            "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
        ),
    ],
    "values": [
        ({"inputs": ["a"]}, 'JSON Value: "a" Type: String is not of expected type: float'),
        ({"inputs": None}, "JSON Value: null Type: Null is not of expected type: float"),
        ({"inputs": [False]}, "JSON Value: false Type: False is not of expected type: float"),
        ({"instances": [True]}, f"{ROW}JSON Value: true Type: True is not of expected type: float"),
    ],
}


@pytest.mark.parametrize("about", BODIES)
def test_bodies(server: Server, about: str) -> None:
    for body, text in BODIES[about]:
        status, found = refusal(server, "POST", f"/v1/models/{HALF}", body)
        assert status == 400
        assert_text(found, text)


def test_json_that_is_broken(server: Server) -> None:
    for body in (
        "no",
        "{",
        '{"instances": [1',
        '{"instances": [1,]}',
        "{'instances': [1]}",
        '{"instances": ["a]}',
        "   ",
    ):
        status, text = refusal(server, "POST", f"/v1/models/{HALF}", body)
        assert status == 400, body
        assert text.startswith("JSON Parse error: "), body


SIGNATURES: Mapping[str, tuple[int, Any, str]] = {
    "serving_default": (
        400,
        {"instances": [[1.0, 0]]},
        f"{ROW}JSON Value: 1.0 Type: Number is not of expected type: int64",
    ),
    "text": (400, {"inputs": [1]}, "JSON Value: 1 Type: Number is not of expected type: string"),
    "int32": (400, {"inputs": ["1"]}, 'JSON Value: "1" Type: String is not of expected type: int32'),
    "logic": (400, {"inputs": [1]}, "JSON Value: 1 Type: Number is not of expected type: bool"),
    "half": (501, {"inputs": [1.0]}, "Conversion of JSON Value: 1.0 to type: half"),
    "to_half": (400, {"inputs": [1]}, "Failed to write JSON value for tensor type: half"),
    "total": (400, {"instances": [1]}, "Tensor name: y has no shape information "),
    "uneven": (400, {"instances": [1, 2]}, "Tensor name: b has inconsistent batch size: 1 expecting: 2"),
    "mixed": (400, {"instances": [1]}, f"instances is a plain list, {PLAIN.format('list of objects')}"),
}


def test_types_and_shapes_that_a_signature_does_not_have(server: Server) -> None:
    for signature, (status, body, text) in SIGNATURES.items():
        found = refusal(server, "POST", f"/v1/models/{ZOO}", {"signature_name": signature, **body})
        assert found == (status, text), signature


def test_several_inputs_need_their_names(server: Server) -> None:
    for body, text in (
        ({"inputs": [1]}, f"inputs is a plain value/list, {PLAIN.format('an object')}"),
        ({"inputs": {"ids": [1], "on": [True]}}, "Missing named input: weights in 'inputs' object."),
        ({"instances": [{"ids": 1}]}, "... keys must be equal to: ids,on,weights"),
    ):
        status, found = refusal(server, "POST", f"/v1/models/{ZOO}", {"signature_name": "mixed", **body})
        assert status == 400
        assert_text(found, text)


def test_ids_outside_of_their_table(server: Server) -> None:
    row = {"user": 1, "watched": [2], "liked": [], "rated": [], "rated_weights": [], "history": [59]}
    for feature, value in (("user", 60), ("user", -1), ("watched", [3, 90]), ("history", [-2])):
        body = {"instances": [row, row | {feature: value}]}
        status, text = refusal(server, "POST", "/v1/models/mapped:predict", body)
        bad, table, size = (*value, 0)[-2] if isinstance(value, list) else value, "users", 60
        if feature == "watched":
            table, size = "items", 90
        assert status == 400
        assert f"feature {feature}: id {bad} of row 1 is not in table {table}, which has {size} rows" in text
    row = {"user": 1, "seen": [2], "price": [0.5]}
    for feature, value, text in (  # of a whole model
        ("user", 60, "feature user: id 60 of row 1 is not in table users, which has 60 rows"),
        ("seen", [3, 1 << 62], f"feature seen: id {1 << 62} of row 1 is not in table items, which has 90 rows"),
    ):
        body = {"instances": [row, row | {feature: value}]}
        assert text in refusal(server, "POST", "/v1/models/ranker:predict", body)[1]
    for bad in (5, -1):  # by TensorFlow's own words, in a graph that is not an export
        status, found = refusal(server, "POST", f"/v1/models/{ZOO}", {"instances": [[0, bad]]})
        assert status == 400
        assert found.startswith(f"indices[0,1] = {bad} is not in [0, 5)")


def test_models_versions_and_labels_that_are_not_there(server: Server) -> None:
    for target, status, text in (
        ("none:predict", 404, "Servable not found for request: Latest(none)"),
        ("Scale:predict", 404, "Servable not found for request: Latest(Scale)"),
        ("scale/versions/3:predict", 404, "Servable not found for request: Specific(scale, 3)"),
        ("scale/labels/beta:predict", 400, "Unrecognized servable version label: beta"),
        ("scale/versions/9223372036854775808:predict", 400, "...to numeric."),
    ):
        found = refusal(server, "POST", f"/v1/models/{target}", {"instances": [1.0]})
        assert found[0] == status
        assert_text(found[1], text)
    missing = refusal(server, "GET", "/v1/models/none", None)
    assert missing == (404, "Could not find any versions of model none")
    assert refusal(server, "GET", "/v1/models/scale/versions/3", None) == (
        404,
        "Could not find version 3 of model scale",
    )


MALFORMED = """
POST /v1/models/scale:predict?a=b
POST /v1/models/scale:PREDICT
POST /v1/models/scale:explain
POST /v1/models/scale
POST /v1/models/scale/versions/x:predict
POST /v1/models/scale/versions/1/labels/stable:predict
PUT /v1/models/scale:predict
GET /v1/models/scale:predict
GET /v1/x
"""


def test_urls_that_are_malformed(server: Server) -> None:
    for line in MALFORMED.split("\n")[1:-1]:
        method, path = line.split()
        body = {"instances": [1.0]} if method != "GET" else None
        assert refusal(server, method, path, body) == (400, f"Malformed request: {line}")


def test_what_the_graph_refuses(server: Server) -> None:
    body = {"signature_name": "mixed", "inputs": {"ids": [1, 2], "weights": [1, 2, 3], "on": [True]}}
    status, text = refusal(server, "POST", f"/v1/models/{ZOO}", body)
    assert status == 400
    assert "ncompatible shapes" in text or "required broadcastable shapes" in text


def test_a_list_of_models_is_not_there(server: Server) -> None:
    assert refusal(server, "GET", "/v1/models", None) == (400, "Missing model name in request.")


EXAMPLES: list[tuple[Any, str]] = [
    ({}, "... When method is classify, key 'examples' is expected and was not found"),
    ({"examples": 1}, "... Expecting 'examples' value to be an list/array"),
    ({"examples": []}, "... 'examples' value is an empty array"),
    ({"examples": [{"x": None}]}, "...Feature: x has element with unexpected JSON type: Null"),
    ({"examples": [{"x": [1.0, "a"]}]}, "...Unexpected element type in feature: x expecting type: float"),
]


def test_examples_that_are_none(server: Server) -> None:
    for body, text in EXAMPLES:
        found = refusal(
            server, "POST", "/v1/models/half_plus_two:regress", {"signature_name": "regress_x_to_y", **body}
        )
        assert found[0] == 400
        assert_text(found[1], text)


def test_a_url_that_names_no_model_needs_a_default(server: Server) -> None:
    status, text = refusal(server, "POST", "/invocations", {"instances": [1]})
    assert status == 400
    assert "--default-model" in text
