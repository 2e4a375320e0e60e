"""Pages for people, the list of models, request ids, and what the failures of a model are answered."""

import json
import re
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.serving.doubles import DoublingServable, FakeLoader, make_version, wait_for
from tests.support.serving.served import BODY, Served
from tpuembed_serving import AllVersions, ModelSettings
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code, StatusError

KEY = "the-key-of-this-test-0123456789"
NAME = "<img src=x onerror=alert(1)>\"'&\u202e"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8"
FILES = ("/", "/console/console.css", "/console/console.js", "/console/icon.svg", "/docs", "/docs/docs.js")
STATIC = Path(__file__).parents[2] / "serving/tpuembed_serving/http/static"
HTTP_STATUS: Final = {
    "CANCELLED": 499, "UNKNOWN": 500, "INVALID_ARGUMENT": 400, "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400, "ABORTED": 409, "OUT_OF_RANGE": 400, "UNIMPLEMENTED": 501, "INTERNAL": 500,
    "UNAVAILABLE": 503, "DATA_LOSS": 500, "UNAUTHENTICATED": 401,
}  # fmt: skip


class Failing(FakeLoader):
    """Loads models whose runs raise `error`, if there is one."""

    error: Exception | None = None

    def __call__(self, path: Path) -> DoublingServable:
        def fail() -> None:
            if self.error:
                raise self.error

        super().__call__(path)
        return DoublingServable(fail)


@pytest.fixture(scope="module")
def loader() -> Failing:
    return Failing()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, loader: Failing) -> Iterator[Callable[..., Served]]:
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 3, 4):
        make_version(folder / "a", version)
    make_version(folder / "b", 1)
    (folder / "empty").mkdir()
    loader.broken["4"] = StatusError(Code.DATA_LOSS, "cut")
    models = (
        ModelSettings(name="a", base_path=folder / "a", policy=AllVersions(), labels={"stable": 1, "new": 3}),
        ModelSettings(name=NAME, base_path=folder / "b"),
        ModelSettings(name="empty", base_path=folder / "empty"),
    )
    with pytest.MonkeyPatch.context() as patch:
        yield lambda **options: Served(folder, patch, loader, models=models, **options)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served]) -> Iterator[Served]:
    with serve() as running:
        wait_for(lambda: running.listens and running.send("GET", "/v1/models/a").status == 200)
        yield running


@pytest.fixture(scope="module")
def locked(serve: Callable[..., Served]) -> Iterator[Served]:
    with serve(security=SecuritySettings(api_keys=ApiKeys([("test", KEY)]))) as running:
        wait_for(lambda: running.listens and running.send("GET", "/v1/models/a", x_api_key=KEY).status == 200)
        yield running


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/predict", "there is no /predict. /docs and /openapi.json have the routes of this server"),
        ("/monitoring/prometheus/metrics", "there are no metrics here. Start the server with --metrics"),
    ],
)
def test_a_wrong_path_gets_a_hint(server: Served, path: str, error: str) -> None:
    reply = server.send("GET", path)
    assert (reply.status, reply.error) == (404, error)


def test_models_are_listed_with_versions_states_and_labels(server: Served) -> None:
    reply = server.send("GET", "/models")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    good = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    failed = {"version": "4", "state": "END", "status": {"error_code": "DATA_LOSS", "error_message": "cut"}}
    versions = {"a": [failed, {"version": "3", **good}, {"version": "1", **good}], NAME: [{"version": "1", **good}]}
    assert reply.value["models"] == [
        {
            "name": name,
            "labels": {"stable": "1", "new": "3"} if name == "a" else {},
            "model_version_status": versions.get(name, []),
        }
        for name in ("a", NAME, "empty")
    ]


@pytest.mark.parametrize("target", FILES)
def test_every_page_has_the_headers(server: Served, target: str) -> None:
    headers = server.send("GET", target, accept=BROWSER).headers
    policy = headers["content-security-policy"]
    if target == "/docs":
        policy = policy.replace(" style-src 'self' 'unsafe-inline'; img-src 'self' data:;", "")
    assert policy == "default-src 'self'; frame-ancestors 'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"
    assert headers.get("vary") == ("Accept" if target == "/" else None)


def test_the_pages_obey_their_policy(server: Served) -> None:
    """No script or style inline, and nothing of another host: a browser that ignores the policy would load it."""
    for target in ("/", "/docs"):
        page = server.send("GET", target, accept=BROWSER).body.decode()
        assert re.findall(r"<script(?! src=\"[a-z/.-]+\"></script>)|<style|\sstyle=|\son\w+=", page) == []
    refused = r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage"
    for file in STATIC.iterdir():
        if file.is_file():
            assert re.findall(refused, file.read_text().replace("http://www.w3.org/2000/svg", "")) == []
    paths = re.findall(r'(?:src|href)="([^"]+)"', server.send("GET", "/docs").body.decode())
    assert [server.send("GET", f"/{path}").status for path in paths] == [200] * 4


def test_data_needs_a_key_in_a_header(locked: Served) -> None:
    """What is open, and what is not: tests/e2e/test_serve_platforms.py."""
    for target in ("/models", "/v1/models/a/metadata", "/monitoring/prometheus/metrics"):
        for refused in (f"{target}?key={KEY}&x-api-key={KEY}", f"/docs/..{target}"):
            assert locked.send("GET", refused).status == 401
        assert locked.send("GET", target, cookie=f"key={KEY}").status == 401
        assert locked.send("GET", target, authorization=f"Bearer {KEY}").status != 401


def test_the_document_has_tags_and_names(server: Served) -> None:
    document = server.send("GET", "/openapi.json").value
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert {tag["name"] for tag in document["tags"]} == {tag for one in operations for tag in one["tags"]}
    names = [one["operationId"] for one in operations]
    assert len(names) == len(set(names))
    assert {"predict", "classify_version", "regress_label", "status", "metadata_version", "list_models"} <= set(names)
    assert "security" not in document
    assert "securitySchemes" not in document.get("components", {})


def test_a_document_with_keys_says_how_they_are_sent_and_names_no_model(locked: Served) -> None:
    document: Any = locked.send("GET", "/openapi.json").value
    assert document["components"]["securitySchemes"] == {
        "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "Bearer": {"type": "http", "scheme": "bearer"},
    }
    assert document["security"] == [{"ApiKey": []}, {"Bearer": []}]
    open_paths = {
        path for path, item in document["paths"].items() for one in item.values() if one.get("security") == []
    }
    assert open_paths == {"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"}
    assert '"a"' not in json.dumps(document)


@pytest.mark.parametrize("path", [f"/v1/models/{urllib.parse.quote(NAME)}:predict", "/v1/models/a"])
def test_a_request_id_comes_back(server: Served, path: str) -> None:
    """If it is a name. Without an access log, other requests get none."""
    method = "POST" if path.endswith("predict") else "GET"
    for name in ("abc-1", "a b", "x" * 129, "\u00e9", ""):
        reply = server.send(method, path, BODY if method == "POST" else b"", x_request_id=name)
        assert (reply.status, reply.headers["x-request-id"]) == (200, name if name == "abc-1" else None)
    assert "x-request-id" not in server.send(method, path, BODY).headers


def test_what_a_run_raises_has_a_code_and_nothing_of_its_inside(
    server: Served, loader: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        for name, status in HTTP_STATUS.items():
            loader.error = StatusError(Code[name], "beyond")
            reply = server.send("POST", "/v1/models/a:predict", BODY)
            assert (reply.status, reply.error) == (status, "beyond")
            assert server.call("a") == (name, "beyond")
        assert "a request failed" not in caplog.text
        loader.error = ZeroDivisionError("/secret/path")
        reply = server.send("POST", "/v1/models/a:predict", BODY)
        assert (reply.status, reply.error) == (500, "internal error")
        assert server.call("a") == ("INTERNAL", "internal error")
        assert "/secret/path" in caplog.text
    finally:
        loader.error = None
