"""The console's routes: who gets the page, who needs a key, what the headers are, and what the data says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.asgi import Reply, running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, FakeLoader, make_version
from tpuembed_serving import AllVersions, ModelSettings, ServerSettings, create_app
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.app import ServingApp
from tpuembed_serving.http.static import CONSOLE, DOCS

KEY = "the-key-of-this-test-0123456789"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
DATA = ("/console/state", "/console/signatures?model=a&version=1", "/openapi.json")
FILES = ("/", *(f"/console/{name}" for name in CONSOLE), "/docs", *(f"/docs/{name}" for name in DOCS))
STATIC = Path(__file__).parents[4] / "serving/tpuembed_serving/http/static"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 3, 4):
        make_version(folder / "a", version)
    return folder


def serve(folder: Path, **options: Any) -> ServingApp:
    load = FakeLoader()
    load.broken["4"] = StatusError(Code.DATA_LOSS, "<b>cut</b>")
    model = ModelSettings(name="a", base_path=folder / "a", policy=AllVersions(), labels={"stable": 1})
    return create_app(ServerSettings(models=(model,), **options), load=load)


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[ServingApp]:
    app = serve(folder)
    with running(app):
        wait_until_ready(app)
        yield app


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[ServingApp]:
    app = serve(folder, security=SecuritySettings(api_keys=ApiKeys([("test", KEY)])))
    with running(app):
        wait_until_ready(app)
        yield app


def state(app: ServingApp) -> dict[str, Any]:
    reply = send(app, "GET", "/console/state")
    assert reply.status == 200
    return dict(json.loads(reply.body))


def test_without_a_console_everybody_gets_json(folder: Path) -> None:
    app = serve(folder, console=False)
    assert json.loads(send(app, "GET", "/", accept=BROWSER).body) == {"status": "alive"}
    for target in (
        "/console/state",
        "/console/signatures?model=a&version=1",
        *(f"/console/{name}" for name in CONSOLE),
    ):
        assert send(app, "GET", target).status == 404


@pytest.mark.parametrize("target", FILES)
def test_pages_and_scripts_need_no_key(locked: ServingApp, target: str) -> None:
    assert send(locked, "GET", target, accept=BROWSER).status == 200


@pytest.mark.parametrize("target", DATA)
def test_all_data_needs_the_key_in_a_header(locked: ServingApp, target: str) -> None:
    separator = "&" if "?" in target else "?"
    for refused in (target, f"{target}{separator}key={KEY}&x-api-key={KEY}", f"/x/..{target}"):
        assert send(locked, "GET", refused).status == 401
    assert send(locked, "GET", target, x_api_key=KEY[:-1]).status == 401
    assert send(locked, "GET", target, cookie=f"key={KEY}").status == 401
    assert send(locked, "GET", target, x_api_key=KEY).status == 200
    assert send(locked, "GET", target, authorization=f"Bearer {KEY}").status == 200


@pytest.mark.parametrize("target", [*FILES, *DATA])
def test_every_answer_has_the_headers(app: ServingApp, target: str) -> None:
    headers = send(app, "GET", target, accept=BROWSER).headers
    policy = headers[b"content-security-policy"].decode()
    if target == "/docs":
        policy = policy.replace(" style-src 'self' 'unsafe-inline'; img-src 'self' data:;", "")
    assert policy == "default-src 'self'; frame-ancestors 'none'"
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert target != "/" or headers[b"vary"] == b"Accept"
    assert headers[b"referrer-policy"] == b"no-referrer"
    assert headers[b"cache-control"] == (b"no-store" if target in DATA else b"no-cache")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("target", ["/", *DATA])
def test_the_console_only_reads(app: ServingApp, method: str, target: str) -> None:
    assert send(app, method, target).status == 405


def test_the_files_obey_their_policy() -> None:
    """No script or style inline, and nothing of another host: a browser that ignores the policy would load it."""
    for name in ("console.html", "docs.html"):
        page = (STATIC / name).read_text()
        assert re.findall(r"<script(?! src=\"[a-z/.-]+\"></script>)|<style|\sstyle=|\son\w+=", page) == []
    for file in STATIC.iterdir():
        if file.is_file():
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert (
                re.findall(
                    r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage", text
                )
                == []
            )


def test_the_data_has_versions_labels_states_and_errors(app: ServingApp, folder: Path) -> None:
    (model,) = state(app)["models"]
    assert (model["name"], model["labels"]) == ("a", {"stable": "1"})
    assert [(one["version"], one["state"]) for one in model["versions"]] == [
        ("4", "END"), ("3", "AVAILABLE"), ("1", "AVAILABLE"),
    ]  # fmt: skip
    broken, _, loaded = model["versions"]
    assert broken["error"] == "<b>cut</b>. Next retry in 60 s"
    assert broken["load_seconds"] is None
    assert (loaded["error"], loaded["bytes"], loaded["layout"]) == ("", len(b"graph"), "SavedModel")
    assert loaded["path"] == str(folder / "a" / "1")
    assert 0 <= loaded["load_seconds"] < 60


def test_the_figures_need_no_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = serve(folder)
    assert app.telemetry.metrics is None
    with running(app):
        wait_until_ready(app)
        assert state(app)["models"][0]["traffic"] is None
        for body in ('{"instances": [1]}', '{"instances": [1]}', '{"instances": ['):
            send(app, "POST", "/v1/models/a:predict", body)
        send(app, "POST", "/v1/models/b:predict", '{"instances": [1]}')
        found = state(app)
    (model,) = found["models"]
    assert model["traffic"]["answers"] == 3
    assert model["traffic"]["failures"] == {"INVALID_ARGUMENT": 1}
    assert found["others"] == 1


def test_signatures_of_a_version(app: ServingApp) -> None:
    found = json.loads(send(app, "GET", "/console/signatures?model=a&version=3").body)["signatures"]
    assert [one["name"] for one in found] == ["serving_default", "no_inputs"]
    assert found[0]["inputs"] == [{"name": "x", "dtype": "int64", "shape": None}]


@pytest.mark.parametrize(
    ("query", "status"),
    [("model=a&version=4", 404), ("model=b&version=1", 404), ("model=a&version=..", 400), ("model=a&version=-1", 404)],
)
def test_signatures_that_do_not_exist(app: ServingApp, query: str, status: int) -> None:
    reply = send(app, "GET", f"/console/signatures?{query}")
    assert (reply.status, bool(reply.error)) == (status, True)


def test_clients_that_ask_while_models_load(folder: Path) -> None:
    """Before the first poll: the page is there, and says what is loading."""
    app = serve(folder)
    assert state(app)["server"]["ready"] is False
    assert [model["name"] for model in state(app)["models"]] == ["a"]


def test_a_server_that_stops_says_so(folder: Path) -> None:
    app = serve(folder)
    app.leave(hands_over=False)
    assert state(app)["server"]["stopping"] is True


def test_names_travel_as_they_are(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'&\u202e"
    make_version(tmp_path / "m", 1)
    model = ModelSettings(name=name, base_path=tmp_path / "m")
    app = create_app(ServerSettings(models=(model,)), load=lambda _: DoublingServable())
    reply: Reply = send(app, "GET", "/console/state")
    assert json.loads(reply.body)["models"][0]["name"] == name
    assert reply.headers[b"content-type"] == b"application/json"
