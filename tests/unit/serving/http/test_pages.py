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


def test_theirs_still_has_no_list(app: ServingApp) -> None:
    reply = send(app, "GET", "/v1/models")
    assert (reply.status, reply.error) == (400, "Missing model name in request.")


def test_the_documentation_loads_nothing_from_elsewhere(app: ServingApp) -> None:
    if importlib.util.find_spec("fastapi_offline") is None:
        pytest.skip("fastapi-offline is not installed: the page then loads Swagger UI from its CDN")
    page = send(app, "GET", "/docs").body.decode()
    assert "http://" not in page
    assert "https://" not in page
    paths = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(paths) == 3
    assert asyncio.run(statuses(app, paths)) == [200, 200, 200]


async def statuses(app: ServingApp, paths: list[str]) -> list[int]:
    """Of files, which are sent in more than one message."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return [(await client.get(f"/{path}")).status_code for path in paths]


def test_the_documentation_names_its_schema(app: ServingApp) -> None:
    page = send(app, "GET", "/docs")
    assert (page.status, b"openapi.json" in page.body) == (200, True)
    assert json.loads(send(app, "GET", "/openapi.json").body)["openapi"].startswith("3.")


@pytest.mark.parametrize("base", ["", "/versions/{version}", "/labels/{label}"])
def test_every_route_has_a_schema_and_examples(app: ServingApp, base: str) -> None:
    paths = json.loads(send(app, "GET", "/openapi.json").body)["paths"]
    for method in ("predict", "classify", "regress"):
        operation = paths[f"/v1/models/{{model}}{base}:{method}"]["post"]
        body = operation["requestBody"]["content"]["application/json"]
        assert body["schema"]
        assert body["examples"]
        assert {"200", "400", "404", "503", "504"} <= set(operation["responses"])
    assert "get" in paths[f"/v1/models/{{model}}{base}"]
    assert "get" in paths[f"/v1/models/{{model}}{base}/metadata"]
    assert "get" in paths["/models"]


def test_a_request_id_comes_back(app: ServingApp) -> None:
    url = "/v1/models/b%20c:predict"
    assert send(app, "POST", url, FULL, x_request_id="abc-1").headers[b"x-request-id"] == b"abc-1"
    for insane in ("a b", "x" * 129, "\u00e9", ""):
        assert b"x-request-id" not in send(app, "POST", url, FULL, x_request_id=insane).headers
    assert b"x-request-id" not in send(app, "POST", url, FULL).headers


def test_an_overload_says_when_to_come_again(tmp_path: Path) -> None:
    def busy() -> None:
        raise StatusError(Code.UNAVAILABLE, "full")

    make_version(tmp_path / "m", 1)
    app = create_app(ServerSettings.for_model_dir(tmp_path / "m"), load=lambda _: DoublingServable(busy))
    with running(app):
        wait_until_ready(app)
        reply = send(app, "POST", "/v1/models/m:predict", FULL)
        assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")
        assert b"retry-after" not in send(app, "POST", "/v1/models/z:predict", FULL).headers
