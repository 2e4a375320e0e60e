"""Codes of the REST API, over ASGI, with a servable that needs no TensorFlow. tests/e2e/vectors has URLs and texts."""

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


def test_a_body_that_says_that_it_is_over_the_limit_is_refused_before_it_comes(app: ServingApp) -> None:
    assert send(app, "POST", "/v1/models/m%20x:predict", FULL, content_length="100000").status == 200
    assert send(app, "POST", "/v1/models/m%20x:predict", FULL, content_length="100001").status == 413


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
