"""The console's routes: who gets the page, who needs a key, what the headers are, and what the files may not do."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.asgi import Reply, running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed_serving import ModelSettings, ServerSettings, create_app
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.http.app import ServingApp

KEY = "the-key-of-this-test-0123456789"
# What Chromium, Firefox and Safari send for a page.
BROWSERS = (
    "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8",
    "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
)
DATA = ("/models", "/v1/models/a/metadata", "/monitoring/prometheus/metrics")
FILES = ("/", "/console/console.css", "/console/console.js", "/console/icon.svg", "/docs", "/docs/docs.js")
STATIC = Path(__file__).parents[4] / "serving/tpuembed_serving/http/static"


def serve(folder: Path, **options: Any) -> ServingApp:
    make_version(folder / "a", 1)
    return create_app(ServerSettings.for_model_dir(folder / "a", **options), load=lambda _: DoublingServable())


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[ServingApp]:
    app = serve(tmp_path, security=SecuritySettings(api_keys=ApiKeys([("test", KEY)])))
    with running(app):
        wait_until_ready(app)
        yield app


@pytest.mark.parametrize("accept", BROWSERS)
def test_a_browser_gets_the_page(tmp_path: Path, accept: str) -> None:
    reply = send(serve(tmp_path), "GET", "/", accept=accept)
    assert (reply.status, reply.headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
    assert reply.headers[b"vary"] == b"Accept"
    assert reply.body.startswith(b"<!doctype html>")
    assert json.loads(send(serve(tmp_path / "b"), "GET", "/", accept="*/*").body) == {"status": "alive"}


def test_pages_need_no_key_and_data_does(locked: ServingApp) -> None:
    for target in (*FILES, "/openapi.json"):
        assert send(locked, "GET", target, accept=BROWSERS[0]).status == 200
    for target in DATA:
        for refused in (target, f"{target}?key={KEY}&x-api-key={KEY}", f"/docs/..{target}"):
            assert send(locked, "GET", refused).status == 401
        assert send(locked, "GET", target, x_api_key=KEY[:-1]).status == 401
        assert send(locked, "GET", target, cookie=f"key={KEY}").status == 401
        assert send(locked, "GET", target, x_api_key=KEY).status != 401
        assert send(locked, "GET", target, authorization=f"Bearer {KEY}").status != 401
    assert b'"a"' not in send(locked, "GET", "/openapi.json").body, "the document names no model"


@pytest.mark.parametrize("target", FILES)
def test_every_file_has_the_headers(tmp_path: Path, target: str) -> None:
    headers = send(serve(tmp_path), "GET", target, accept=BROWSERS[0]).headers
    policy = headers[b"content-security-policy"].decode()
    if target == "/docs":
        policy = policy.replace(" style-src 'self' 'unsafe-inline'; img-src 'self' data:;", "")
    assert policy == "default-src 'self'; frame-ancestors 'none'"
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"referrer-policy"] == b"no-referrer"
    assert headers[b"cache-control"] == b"no-cache"


def test_the_files_obey_their_policy() -> None:
    """No script or style inline, and nothing of another host: a browser that ignores the policy would load it."""
    for name in ("console.html", "docs.html"):
        page = (STATIC / name).read_text()
        assert re.findall(r"<script(?! src=\"[a-z/.-]+\"></script>)|<style|\sstyle=|\son\w+=", page) == []
    refused = r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage"
    for file in STATIC.iterdir():
        if file.is_file():
            assert re.findall(refused, file.read_text().replace("http://www.w3.org/2000/svg", "")) == []


def test_names_travel_as_they_are(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'&\u202e"
    make_version(tmp_path / "m", 1)
    model = ModelSettings(name=name, base_path=tmp_path / "m")
    app = create_app(ServerSettings(models=(model,)), load=lambda _: DoublingServable())
    reply: Reply = send(app, "GET", "/models")
    assert json.loads(reply.body)["models"][0]["name"] == name
    assert reply.headers[b"content-type"] == b"application/json"
