"""The routes of Vertex AI and SageMaker over ASGI: which model answers, what `parameters` may say, and the refusals."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.serving.asgi import running, send, wait_until_ready
from tests.support.serving.doubles import DoublingServable, make_version
from tpuembed.errors import ConfigError
from tpuembed_serving import ModelSettings, ServerSettings, TelemetrySettings, create_app
from tpuembed_serving.http.app import ServingApp

FULL = '{"instances": [1]}'
# What Vertex AI sets where a model has no routes of its own.
HEALTH, PREDICT = "/v1/endpoints/7/deployedModels/8", "/v1/endpoints/7/deployedModels/8:predict"
TWO_ROUTES: dict[str, Any] = {"health_route": HEALTH, "predict_route": PREDICT}


class Factors(DoublingServable):
    """Multiplies by `factor`; the signature `thrice` by three times that."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor=factor)
        self.signatures = {**self.signatures, "thrice": self.signatures["serving_default"]}


def models(folder: Path, *names: str) -> tuple[ModelSettings, ...]:
    for version, name in enumerate(names, start=1):
        if not (folder / name).exists():
            make_version(folder / name, version)
    return tuple(ModelSettings(name=name, base_path=folder / name) for name in names)


@contextmanager
def served(folder: Path, *names: str, **options: Any) -> Iterator[ServingApp]:
    """Each model multiplies by its version, which is its place among `names`."""
    settings = ServerSettings(models=models(folder, *names), **options)
    app = create_app(settings, load=lambda path: Factors(int(path.name)))
    with running(app):
        if names:
            wait_until_ready(app)
        yield app


@pytest.mark.parametrize("path", ["/invocations", PREDICT])
def test_the_only_model_answers(tmp_path: Path, path: str) -> None:
    with served(tmp_path, "a", **TWO_ROUTES) as app:
        for body in (FULL, '{"inputs": {"x": [1]}}', '{"instances": [{"x": 1}], "parameters": null}'):
            wanted = send(app, "POST", "/v1/models/a:predict", body)
            assert wanted.status == 200
            assert send(app, "POST", path, body).body == wanted.body
        assert send(app, "POST", path, "{").error == send(app, "POST", "/v1/models/a:predict", "{").error
        assert send(app, "POST", path, FULL, content_type="text/plain").status == 200
        assert (send(app, "GET", path).status, send(app, "GET", path).headers[b"allow"]) == (405, b"POST")
        assert send(app, "POST", f"{path}/", FULL).status != 200


def test_health_is_that_of_readyz(tmp_path: Path) -> None:
    with served(tmp_path, "a", **TWO_ROUTES) as app:
        for path in ("/readyz", "/ping", HEALTH):
            assert [send(app, method, path).status for method in ("GET", "HEAD", "POST")] == [200, 200, 405]
        app.leave(hands_over=False)
        for path in ("/readyz", "/ping", HEALTH):
            reply = send(app, "GET", path)
            assert (reply.status, json.loads(reply.body)) == (503, {"status": "stopping"})


def test_parameters_name_a_signature(tmp_path: Path) -> None:
    with served(tmp_path, "a") as app:
        for body in ('"parameters": {"signature_name": "thrice"}', '"parameters": {}', '"signature_name": "thrice"'):
            assert send(app, "POST", "/invocations", f'{{"instances": [1], {body}}}').status == 200
        twice = '{"instances": [1], "signature_name": "thrice", "parameters": {"signature_name": "thrice"}}'
        reply = send(app, "POST", "/invocations", twice)
        assert (reply.status, reply.error) == (
            400,
            "signature_name is given twice: in the request, and in its parameters. Send one",
        )


@pytest.mark.parametrize(
    "path",
    [
        "/", "/v1/models", "/v1/models/a:predict", "/V1/Models/a", "/v2", "/v2/models/a/infer", "/V2/health/live",
        "/healthz", "/readyz", "/models", "/docs", "/docs/assets", "/openapi.json", "/console/state", "/ping",
        "/invocations", "/metrics", "predict", "", "/a?b", "/a{b}", "/a b", "/a%20b", "/ä",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["health_route", "predict_route"])
def test_a_route_that_is_taken_or_no_path_is_refused(tmp_path: Path, name: str, path: str) -> None:
    options: dict[str, Any] = {name: path, "telemetry": TelemetrySettings(metrics_path="/metrics")}
    with refused(ConfigError, match=name):
        ServerSettings(models=models(tmp_path, "a"), **options)


@pytest.mark.parametrize("path", ["/p", "/pings", "/v1/endpoints/7/deployedModels/8", "/models2/x", "/v1/a.b-c_d~e"])
def test_other_routes_are_taken(tmp_path: Path, path: str) -> None:
    with served(tmp_path, "a", predict_route=path) as app:
        assert send(app, "POST", path, FULL).status == 200
    with served(tmp_path, "a", health_route=path) as app:
        assert send(app, "GET", path).status == 200


def test_routes_and_models_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    found = models(tmp_path, "a", "b")
    with refused(ConfigError, match="health_route and predict_route"):
        ServerSettings(models=found[:1], health_route="/x", predict_route="/x")
    with refused(ConfigError, match="default_model"):
        ServerSettings(models=found, predict_route="/x")
    with refused(ConfigError, match="'c'"):
        ServerSettings(models=found, default_model="c")
    with refused(ConfigError, match="'c'"):
        ServerSettings(models=(), default_model="c")
