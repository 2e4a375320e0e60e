"""The binary API over ASGI, with a servable that needs no TensorFlow: URLs, codes, and frames both ways."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.serving.doubles import DoublingServable, make_version
from tests.unit.serving.test_rest import Reply, running, send, wait_until_ready
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.http.binary_frames import decode_frame, encode_frame

URL = "/binary/v1/models/m:predict"
INPUT = {"x": np.array([1, 2], np.int64)}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingApp]:
    base_path = tmp_path_factory.mktemp("models") / "m"
    make_version(base_path, 7)
    app = create_app(ServerSettings.for_model_dir(base_path, max_body_bytes=10_000), load=lambda _: DoublingServable())
    with running(app):
        wait_until_ready(app)
        yield app


def ask(app: ServingApp, tensors: dict[str, Any], url: str = URL, **members: Any) -> Reply:
    return send(app, "POST", url, encode_frame(tensors, members))


@pytest.mark.parametrize("url", [URL, "/binary/v1/models/m/versions/7:predict", "/binary/v1/models/%6D:predict"])
def test_a_frame_is_answered_with_one(app: ServingApp, url: str) -> None:
    reply = ask(app, INPUT, url)
    assert (reply.status, reply.headers[b"content-type"]) == (200, b"application/octet-stream")
    frame = decode_frame(reply.body)
    np.testing.assert_array_equal(frame.tensors["y"], [2, 4])
    assert frame.members == {"model": "m", "version": 7, "signature_name": "serving_default"}


@pytest.mark.parametrize(
    ("tensors", "members", "url", "status", "message"),
    [
        (INPUT, {}, "/binary/v1/models/z:predict", 404, "Servable not found for request: Latest(z)"),
        (INPUT, {}, "/binary/v1/models/m/versions/8:predict", 404, "Servable not found for request: Specific(m, 8)"),
        (INPUT, {}, "/binary/v1/models/m/labels/a:predict", 400, "Unrecognized servable version label: a"),
        (INPUT, {}, "/binary/v1/models/m:classify", 404, "No such binary request: POST /binary/v1/models/m:classify"),
        (INPUT, {}, "/binary/v1/models/m:predict?a=1", 404, "No such binary request"),
        (INPUT, {"signature_name": "g"}, URL, 400, 'Serving signature name: "g" not found in signature def'),
        (INPUT, {"signature_name": 1}, URL, 400, "the header's signature_name is no string"),
        ({}, {}, URL, 400, "0!=1 Sent extra: {}. Missing but required: {x}."),
        ({**INPUT, "z": np.ones(1)}, {}, URL, 400, "2!=1 Sent extra: {z}. Missing but required: {}."),
        ({"x": np.array([1, 2], np.int32)}, {}, URL, 400, "Type mismatch: input x is int32 vs. expected int64"),
    ],
)
def test_errors(
    app: ServingApp, tensors: dict[str, Any], members: dict[str, Any], url: str, status: int, message: str
) -> None:
    reply = ask(app, tensors, url, **members)
    assert reply.status == status
    assert message in reply.error
    assert reply.headers[b"content-type"] == b"application/json"


def test_what_is_no_frame_is_the_clients_fault(app: ServingApp) -> None:
    reply = send(app, "POST", URL, json.dumps({"instances": [1]}))
    assert (reply.status, "begins with" in reply.error) == (400, True)
    assert send(app, "POST", URL, b"\0" * 10_001).status == 413


def test_theirs_is_not_ours(app: ServingApp) -> None:
    frame = encode_frame(INPUT, {})
    reply = send(app, "POST", "/v1/models/m:predict", frame, content_type="application/octet-stream")
    assert (reply.status, "JSON Parse error" in reply.error) == (400, True)
    assert send(app, "GET", URL).status == 404
