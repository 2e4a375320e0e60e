"""URLs, codes and texts of the REST API, over ASGI, with a servable that needs no TensorFlow."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving.asgi import running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.http.rest import HTTP_STATUS

FULL = '{"instances": [1]}'


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingApp]:
    base_path = tmp_path_factory.mktemp("models") / "m x"
    make_version(base_path, 7)
    app = create_app(ServerSettings.for_model_dir(base_path, max_body_bytes=100_000), load=lambda _: DoublingServable())
    with running(app):
        wait_until_ready(app)
        yield app


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/m%20x:predict",
        "/v1/models/m%20x/versions/7:predict",
        "/v1/models/m%20x/versions/0007:predict",
        "/V1/MODELS/m%20x:predict",
        "/v1/models/%6D%20%78:predict",
    ],
)
def test_predict_is_found(app: ServingApp, target: str) -> None:
    reply = send(app, "POST", target, FULL, content_type="text/plain")
    assert (reply.status, reply.body) == (200, b'{"predictions":[2]}')
    length = b"%d" % len(reply.body)
    assert reply.headers == {
        b"content-type": b"application/json",
        b"content-length": length,
        b"x-model-version": b"7",
    }


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/models/m%20x:predict?x=1"),
        ("POST", "/v1/models/m%20x:PREDICT"),
        ("POST", "/v1/models/m%20x:predicts"),
        ("POST", "/v1/models/m%20x"),
        ("POST", "/v1/models/m%20x/versions/:predict"),
        ("POST", "/v1/models/m%20x/versions/-1:predict"),
        ("POST", "/v1/models/m%20x/versions/1/labels/a:predict"),
        ("POST", "/v1/models/:predict"),
        ("POST", "/v1/models//m:predict"),
        ("POST", "/v1/models/m/extra:predict"),
        ("PUT", "/v1/models/m%20x:predict"),
        ("DELETE", "/v1/models/m%20x"),
        ("HEAD", "/v1/models/m%20x"),
        ("GET", "/v1/models/m%20x:predict"),
        ("GET", "/v1/models/m%20x?x=1"),
        ("GET", "/v1/models/m%20x/metadata/"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/"),
        ("GET", "/v1/other"),
    ],
)
def test_anything_else_is_malformed(app: ServingApp, method: str, target: str) -> None:
    reply = send(app, method, target, FULL)
    assert (reply.status, reply.error) == (400, f"Malformed request: {method} {target}")


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "message"),
    [
        ("GET", "/v1/models", "", 400, "Missing model name in request."),
        ("GET", "/v1/models/versions/1", "", 400, "Missing model name in request."),
        ("GET", "/v1/models/z", "", 404, "Could not find any versions of model z"),
        ("GET", "/v1/models/metadata", "", 404, "Could not find any versions of model metadata"),
        ("GET", "/v1/models/m%20x/versions/8", "", 404, "Could not find version 8 of model m x"),
        ("GET", "/v1/models/z/metadata", "", 404, "Servable not found for request: Latest(z)"),
        ("GET", "/v1/models/m%20x/versions/8/metadata", "", 404, "Servable not found for request: Specific(m x, 8)"),
        ("GET", "/v1/models/m%20x/labels/a/metadata", "", 400, "Unrecognized servable version label: a"),
        ("POST", "/v1/models/z:predict", FULL, 404, "Servable not found for request: Latest(z)"),
        ("POST", "/v1/models/m%20x/versions/8:predict", FULL, 404, "Servable not found for request: Specific(m x, 8)"),
        ("POST", "/v1/models/m%20x/labels/can%61ry:predict", FULL, 400, "Unrecognized servable version label: canary"),
        (
            "POST", "/v1/models/m%20x/versions/9223372036854775808:predict", FULL, 400,
            "Failed to convert version: 9223372036854775808 to numeric.",
        ),
        ("POST", "/v1/models/z:predict", "", 400, "JSON Parse error: The document is empty"),
        ("POST", "/v1/models/z:predict", "{", 400, "JSON Parse error: Missing a name for object member."),
        (
            "POST", "/v1/models/m%20x:predict", '{"signature_name": "g"}', 400,
            'Serving signature name: "g" not found in signature def',
        ),
        (
            "POST", "/v1/models/m%20x:predict", '{"signature_name": "no_inputs"}', 400,
            "Failed to get input map for signature: no_inputs",
        ),
        ("POST", "/v1/models/m%20x:predict", "{}", 400, "Missing 'inputs' or 'instances' key"),
        (
            "POST", "/v1/models/m%20x:classify", "{}", 400,
            "JSON Value: {} When method is classify, key 'examples' is expected and was not found",
        ),
        (
            "POST", "/v1/models/m%20x:regress", "{}", 400,
            "JSON Value: {} When method is classify, key 'examples' is expected and was not found",
        ),
        (
            "POST", "/v1/models/m%20x:regress", '{"signature_name": "g", "examples": [{}]}', 400,
            "No signature was found with the name: g",
        ),
    ],
)  # fmt: skip
def test_errors(app: ServingApp, method: str, target: str, body: str, status: int, message: str) -> None:
    reply = send(app, method, target, body)
    assert (reply.status, reply.error) == (status, message)


@pytest.mark.parametrize(
    "target",
    ["/v1/models/m%20x", "/v1/models/m%20x/versions/7", "/v1/models/m%20x/labels/any", "/v1/models/m%20x/METADATA"],
)
def test_status(app: ServingApp, target: str) -> None:
    reply = send(app, "GET", target)
    wanted = """{
 "model_version_status": [
  {
   "version": "7",
   "state": "AVAILABLE",
   "status": {
    "error_code": "OK",
    "error_message": ""
   }
  }
 ]
}
"""
    assert (reply.status, reply.body.decode()) == (200, wanted)


def test_metadata(app: ServingApp) -> None:
    for target in ("/v1/models/m%20x/metadata", "/v1/models/m%20x/versions/7/metadata"):
        reply = send(app, "GET", target)
        assert reply.status == 200
        assert json.loads(reply.body) == {
            "model_spec": {"name": "m x", "signature_name": "", "version": "7"},
            "metadata": {"signature_def": {"signature_def": {"serving_default": {"method_name": "predict"}}}},
        }


def test_a_body_in_parts(app: ServingApp) -> None:
    assert send(app, "POST", "/v1/models/m%20x:predict", '{"inst', 'ances": ', "[1]}").status == 200


def test_a_gzip_body(app: ServingApp) -> None:
    target = "/v1/models/m%20x:predict"
    packed = gzip.compress(FULL.encode())
    assert send(app, "POST", target, packed, content_encoding="gzip").status == 200


def test_a_body_over_the_limit(app: ServingApp) -> None:
    reply = send(app, "POST", "/v1/models/m%20x:predict", b" " * 99_999, b"  ")
    assert (reply.status, reply.error) == (413, "the request body is larger than the limit of 100000 bytes")


def test_an_inflated_body_over_the_limit(app: ServingApp) -> None:
    packed = gzip.compress(b" " * 100_001)
    assert len(packed) < 1000
    reply = send(app, "POST", "/v1/models/m%20x:predict", packed, content_encoding="gzip")
    assert (reply.status, reply.error) == (413, "the request body is larger than the limit of 100000 bytes")


def test_a_body_that_says_that_it_is_over_the_limit_is_refused_before_it_comes(app: ServingApp) -> None:
    assert send(app, "POST", "/v1/models/m%20x:predict", FULL, content_length="100000").status == 200
    assert send(app, "POST", "/v1/models/m%20x:predict", FULL, content_length="100001").status == 413


def test_a_cors_preflight(app: ServingApp) -> None:
    assert send(app, "OPTIONS", "/v1/models/m:predict", origin="https://a.example").status == 200
    refused = send(app, "OPTIONS", "/v1/models/m:predict")
    assert (refused.status, refused.body) == (400, b"")


def test_every_code_has_its_http_status() -> None:
    table = {
        "OK": 200, "CANCELLED": 499, "UNKNOWN": 500, "INVALID_ARGUMENT": 400, "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 400, "ABORTED": 409, "OUT_OF_RANGE": 400, "UNIMPLEMENTED": 501, "INTERNAL": 500,
        "UNAVAILABLE": 503, "DATA_LOSS": 500, "UNAUTHENTICATED": 401,
    }  # fmt: skip
    assert {code.name: status for code, status in HTTP_STATUS.items()} == table


def failing_app(tmp_path: Path, error: Exception) -> ServingApp:
    def fail() -> None:
        raise error

    make_version(tmp_path / "m", 1)
    return create_app(ServerSettings.for_model_dir(tmp_path / "m"), load=lambda _: DoublingServable(fail))


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (StatusError(Code.OUT_OF_RANGE, "beyond"), 400, "beyond"),
        (StatusError(Code.RESOURCE_EXHAUSTED, "OOM"), 429, "OOM"),
        (ZeroDivisionError("/secret/path"), 500, "internal error"),
    ],
)
def test_what_a_run_raises_has_a_code_and_no_inside(
    tmp_path: Path, raised: Exception, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = failing_app(tmp_path, raised)
    with running(app):
        wait_until_ready(app)
        reply = send(app, "POST", "/v1/models/m:predict", FULL)
    assert (reply.status, reply.error) == (status, message)
    assert ("a request failed" in caplog.text) == (status == 500)


def test_health_and_readiness(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    app = create_app(ServerSettings.for_model_dir(tmp_path / "m", poll_seconds=0.02), load=lambda _: DoublingServable())
    with running(app):
        assert send(app, "GET", "/healthz").status == 200
        assert send(app, "GET", "/readyz").status == 503
        make_version(tmp_path / "m", 1)
        wait_until_ready(app)
        assert send(app, "GET", "/readyz").status == 200


def test_the_openapi_page_has_the_raw_routes(app: ServingApp) -> None:
    paths = app.openapi()["paths"]
    for method in ("predict", "classify", "regress"):
        for choice in ("", "/versions/{version}", "/labels/{label}"):
            assert "post" in paths[f"/v1/models/{{model}}{choice}:{method}"]
    assert "get" in paths["/v1/models/{model}/versions/{version}/metadata"]
    assert "get" in paths["/readyz"]
