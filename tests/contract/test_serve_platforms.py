"""The routes and variables of Vertex AI and SageMaker, on a server of several models whose lookups TensorFlow runs."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.contract_serve import (
    LOOKUPS,
    TABLES,
    Server,
    assert_near,
    config_of,
    draw_ids,
    eventually,
    look_up,
    run_tensorflow,
    saved_models,
)
from tests.support.serving.process import run_command

HEALTH, PREDICT = "/v1/endpoints/7/deployedModels/8", "/v1/endpoints/7/deployedModels/8:predict"
"""Such as Vertex AI's own routes, which begin like TensorFlow Serving's."""


def free_port() -> int:
    """A port below those that the system gives to clients."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(models: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("platforms")
    config = folder / "models.config"
    config.write_text(config_of(models, dict.fromkeys((*LOOKUPS, "ranker"), "")), encoding="utf-8")
    variables = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": HEALTH,
        "AIP_PREDICT_ROUTE": PREDICT,
        "AIP_STORAGE_URI": "",  # an empty variable is not set
        "TPUEMBED_SERVE_CONFIG": str(config),
        "TPUEMBED_SERVE_LOOKUPS": "tensorflow",
        "TPUEMBED_SERVE_GRPC_PORT": "0",
        "TPUEMBED_SERVE_LAME_DUCK_SECONDS": "0",
    }
    with Server(None, folder / "log", "--default-model", "mapped", variables=variables, bare=True) as running:
        eventually(lambda: running.get("/ping").status == 200)
        yield running


def rows_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {name: value.tolist() for name, value in inputs.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_it_listens_on_all_addresses_at_the_platforms_port(server: Server, port: int) -> None:
    assert server.port == port
    socket.create_connection(("127.0.0.2", port), 10).close()


def test_health_routes(server: Server) -> None:
    for path in (HEALTH, "/ping", "/readyz"):
        assert [server.ask(method, path).status for method in ("GET", "HEAD", "POST")] == [200, 200, 405], path
    for path in (f"{PREDICT}/", "/invocations/"):
        assert server.ask("POST", path, {}).status in (400, 404), path


@pytest.mark.parametrize("path", [PREDICT, "/invocations"])
def test_predictions_of_the_default_model(server: Server, path: str) -> None:
    inputs = draw_ids(30, 5, 4)
    wanted = look_up(inputs)
    bodies: list[dict[str, Any]] = [{}, {"parameters": {}}, {"parameters": {"signature_name": "serving_default"}}]
    for body in bodies:
        reply = server.ask("POST", path, {**body, "instances": rows_of(inputs)})
        assert reply.status == 200, reply.body
        predictions = reply.value["predictions"]
        assert_near({name: [row[name] for row in predictions] for name in wanted}, wanted)
    columns = {name: value.tolist() for name, value in inputs.items()}
    assert_near(server.ask("POST", path, {"inputs": columns}).value["outputs"], wanted)


@pytest.mark.parametrize("path", [PREDICT, "/invocations"])
def test_what_the_routes_refuse(server: Server, path: str) -> None:
    rows = rows_of(draw_ids(31, 2, 3))
    for body, word in (
        ({"instances": rows, "parameters": {"top_k": 5}}, "top_k"),
        ({"instances": rows, "parameters": {"signature_name": "S"}}, "S"),
        (
            {"instances": rows, "signature_name": "S", "parameters": {"signature_name": "S"}},
            "signature_name is given twice: in the request, and in its parameters. Send one",
        ),
        ({"instances": []}, "No values in 'instances' array"),
        ({"instances": [rows[0], rows[1] | {"user": 60}]}, "feature user: id 60 of row 1 is not in table users"),
    ):
        reply = server.ask("POST", path, body)
        assert reply.status == 400
        assert word in reply.error


@pytest.mark.parametrize("model", LOOKUPS)
def test_lookups_by_tensorflow_have_the_tables_rows(server: Server, model: str) -> None:
    """The truth is the same numpy as for lookups by the C library."""
    for seed, (batch, width) in enumerate([(1, 1), (300, 12)]):
        inputs = draw_ids(seed + 40, batch, width)
        columns = {name: value.tolist() for name, value in inputs.items()}
        found = server.post(f"{model}:predict", {"inputs": columns}).value["outputs"]
        assert_near(found, look_up(inputs))
        np.testing.assert_array_equal(np.array(found["user"], np.float32), TABLES["users"][inputs["user"]])


def test_a_whole_model_by_tensorflow(server: Server, models: Path) -> None:
    draw = np.random.default_rng(32)
    seen = np.where(np.arange(6) < draw.integers(0, 7, (20, 1)), draw.integers(0, 90, (20, 6)), -1)
    inputs = {"user": draw.integers(0, 60, 20), "seen": seen, "price": draw.random((20, 1), np.float32)}
    wanted = run_tensorflow(models / "ranker" / "1", "serving_default", inputs)["score"]
    reply = server.post("ranker:predict", {"instances": rows_of(inputs)})
    np.testing.assert_allclose(np.array(reply.value["predictions"]), wanted, rtol=1e-5, atol=1e-6)


def test_routes_of_the_server_are_not_given_away(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a default model has to be one of the config's."""
    result = run_command("serve", models / "scale", "--rest-port", "0", "--no-grpc", "--default-model", "none")
    assert result.returncode in (1, 2)
    assert "none" in result.stderr
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/models/scale:predict")
    result = run_command("serve", models / "scale", "--rest-port", "0", "--no-grpc")
    assert result.returncode in (1, 2)
    assert "/v1/models/scale:predict" in result.stderr
