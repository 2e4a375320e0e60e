"""The list of models, and a documentation that needs nothing of the internet."""

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving.asgi import running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, FakeLoader, make_version
from tpuembed_serving import AllVersions, ModelSettings, ServerSettings, create_app
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.app import ServingApp

FULL = '{"instances": [1]}'


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingApp]:
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 3, 4):
        make_version(folder / "a", version)
    make_version(folder / "b", 1)
    load = FakeLoader()
    load.broken["4"] = StatusError(Code.DATA_LOSS, "cut")
    models = (
        ModelSettings(name="a", base_path=folder / "a", policy=AllVersions(), labels={"stable": 1, "new": 3}),
        ModelSettings(name="b c", base_path=folder / "b"),
    )
    app = create_app(ServerSettings(models=models), load=load)
    with running(app):
        wait_until_ready(app)
        yield app


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/predict", "there is no /predict. /docs and /openapi.json have the routes of this server"),
        ("/monitoring/prometheus/metrics", "there are no metrics here. Start the server with --metrics"),
    ],
)
def test_a_wrong_path_gets_a_hint(app: ServingApp, path: str, error: str) -> None:
    reply = send(app, "GET", path)
    assert (reply.status, reply.error) == (404, error)


def test_models_are_listed_with_versions_states_and_labels(app: ServingApp) -> None:
    reply = send(app, "GET", "/models")
    assert reply.status == 200
    ok = {"error_code": "OK", "error_message": ""}
    assert json.loads(reply.body) == {
        "models": [
            {
                "name": "a",
                "labels": {"stable": "1", "new": "3"},
                "model_version_status": [
                    {"version": "4", "state": "END", "status": {"error_code": "DATA_LOSS", "error_message": "cut"}},
                    {"version": "3", "state": "AVAILABLE", "status": ok},
                    {"version": "1", "state": "AVAILABLE", "status": ok},
                ],
            },
            {
                "name": "b c",
                "labels": {},
                "model_version_status": [{"version": "1", "state": "AVAILABLE", "status": ok}],
            },
        ]
    }


def test_a_model_without_a_version_is_listed(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    app = create_app(ServerSettings.for_model_dir(tmp_path / "m"), load=lambda _: DoublingServable())
    with running(app):
        reply = send(app, "GET", "/models")
    assert json.loads(reply.body) == {"models": [{"name": "m", "labels": {}, "model_version_status": []}]}


def test_the_documentation_loads_nothing_from_elsewhere(app: ServingApp) -> None:
    if importlib.util.find_spec("fastapi_offline") is None:
        pytest.skip("fastapi-offline is not installed: the page then loads Swagger UI from its CDN")
    page = send(app, "GET", "/docs").body.decode()
    assert "http://" not in page
    assert "https://" not in page
    paths = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(paths) == 5
    assert asyncio.run(statuses(app, paths)) == [200] * 5


async def statuses(app: ServingApp, paths: list[str]) -> list[int]:
    """Of files, which are sent in more than one message."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return [(await client.get(f"/{path}")).status_code for path in paths]


def test_the_document_has_the_models_tags_and_names(app: ServingApp) -> None:
    document = json.loads(send(app, "GET", "/openapi.json").body)
    operations = [(path, operation) for path, item in document["paths"].items() for operation in item.values()]
    assert {tag["name"] for tag in document["tags"]} == {tag for _, one in operations for tag in one["tags"]}
    names = [one["operationId"] for _, one in operations]
    assert len(names) == len(set(names))
    assert {"predict", "classify_version", "regress_label", "status", "metadata_version", "list_models"} <= set(names)
    for path, operation in operations:
        if "{model}" in path:
            assert operation["parameters"][0]["schema"]["enum"] == ["a", "b c"]
    assert "security" not in document
    assert "securitySchemes" not in document.get("components", {})


def test_models_that_are_added_later_are_in_the_document(app: ServingApp, tmp_path: Path) -> None:
    models = list(app.settings.models)
    make_version(tmp_path / "c", 1)
    try:
        app.repository.reload([*models, ModelSettings(name="c", base_path=tmp_path / "c")])
        document = json.loads(send(app, "GET", "/openapi.json").body)
    finally:
        app.repository.reload(models)
    (parameter,) = document["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert parameter["schema"]["enum"] == ["a", "b c", "c"]


def test_a_document_with_keys_says_how_they_are_sent(tmp_path: Path) -> None:
    make_version(tmp_path / "m", 1)
    key = "the-key-of-this-test-0123456789"
    security = SecuritySettings(api_keys=ApiKeys([("test", key)]))
    settings = ServerSettings.for_model_dir(tmp_path / "m", security=security)
    app = create_app(settings, load=lambda _: DoublingServable())
    document = json.loads(send(app, "GET", "/openapi.json", x_api_key=key).body)
    assert document["components"]["securitySchemes"] == {
        "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "Bearer": {"type": "http", "scheme": "bearer"},
    }
    assert document["security"] == [{"ApiKey": []}, {"Bearer": []}]
    open_paths = {
        path for path, item in document["paths"].items() for one in item.values() if one.get("security") == []
    }
    assert open_paths == {"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"}


def test_a_request_id_comes_back(app: ServingApp) -> None:
    url = "/v1/models/b%20c:predict"
    assert send(app, "POST", url, FULL, x_request_id="abc-1").headers[b"x-request-id"] == b"abc-1"
    for insane in ("a b", "x" * 129, "\u00e9", ""):
        assert b"x-request-id" not in send(app, "POST", url, FULL, x_request_id=insane).headers
    assert b"x-request-id" not in send(app, "POST", url, FULL).headers
