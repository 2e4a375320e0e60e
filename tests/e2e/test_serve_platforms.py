"""The contracts of Vertex AI and SageMaker: a server in their environment, asked as they ask. And who may ask what."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.process import SCRIPT, ServerProcess
from tpuembed_serving import ServerSettings, create_app

KEY = "the-key-of-this-test-0123456789"
# What Vertex AI sets where a model has no routes of its own: they begin like TensorFlow Serving's.
HEALTH, PREDICT = "/v1/endpoints/7/deployedModels/8", "/v1/endpoints/7/deployedModels/8:predict"
VERTEX = {
    "AIP_MODE": "PREDICTION", "AIP_FRAMEWORK": "CUSTOM_CONTAINER", "AIP_MODE_VERSION": "1.0.0", "AIP_ENDPOINT_ID": "7",
    "AIP_DEPLOYED_MODEL_ID": "8", "AIP_HEALTH_ROUTE": HEALTH, "AIP_PREDICT_ROUTE": PREDICT,
}  # fmt: skip
ROWS = [[1.5, 2.0], [-3.0, 0.25]]
NUMBERS = [number for row in ROWS for number in row]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module, rows = tf.Module(), tf.TensorSpec([None, 2], tf.float32, name="x")
    module.weights = tf.Variable([[0.5, 0.1], [-1.0, 3.0]])
    product = tf.function(lambda x: {"y": tf.linalg.matmul(x, module.weights)}).get_concrete_function(rows)
    folder = tmp_path_factory.mktemp("ml") / "model"
    tf.saved_model.save(module, str(folder / "1"), signatures={"serving_default": product})
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    loaded = tf.saved_model.load(str(model / "1"))
    return loaded.signatures["serving_default"](x=tf.constant(ROWS))["y"].numpy().tolist()


def same(answer: bytes, expected: Any) -> None:
    value = json.loads(answer)
    assert list(value) == ["predictions"]
    tf.debugging.assert_near(value["predictions"], expected, rtol=1e-6)


def is_healthy(server: ServerProcess, path: str) -> bool:
    status, _ = server.request("GET", path)
    assert status in (200, 503)
    return status == 200


_CONTAINER = """
ip link set lo up
mount -t tmpfs none /opt
mkdir -p /opt/ml/model
mount --bind "$2" /opt/ml/model
mount -o remount,bind,ro /opt/ml/model
"$1" serve 2>"$3" &
for _ in $(seq 1200); do
    curl --silent --fail --output /dev/null http://127.0.0.2:8080/ping && break
    kill -0 $! || exit 1
    sleep 0.1
done
curl --silent --show-error --fail-with-body --data "$4" http://127.0.0.2:8080/invocations
kill -INT $!
wait $!
"""


def can_be_a_container() -> bool:
    """Whether this process may have its own /opt and its own ports, and needs nothing of /opt."""
    tools = all(map(shutil.which, ("unshare", "ip", "curl")))
    done = tools and subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, check=False)
    return bool(done and done.returncode == 0 and not Path(sys.base_prefix).resolve().is_relative_to("/opt"))


@pytest.mark.skipif(not can_be_a_container(), reason="needs root, unshare, ip and curl")
@pytest.mark.nightly
def test_sagemaker_in_its_folder_and_at_its_port(model: Path, expected: Any, tmp_path: Path) -> None:
    """`docker run IMAGE serve` without any variable, with mounts and ports as a container has them."""
    command = ["unshare", "--mount", "--net", "bash", "-ec", _CONTAINER, "container", str(SCRIPT), str(model)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "SAGEMAKER_"))}
    log = tmp_path / "log"
    command += [str(log), json.dumps({"instances": ROWS})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr, log.read_text())
    same(done.stdout.encode(), expected)
    assert "serving model at http://0.0.0.0:8080/v1/models/model" in log.read_text()


CONFIG = """
model_config_list {{
  config {{ name: "a" base_path: "{model}" model_platform: "tensorflow" }}
  config {{ name: "b" base_path: "{model}" model_platform: "tensorflow" }}
}}
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("cause", ["--default-model", "AIP_PREDICT_ROUTE"])
def test_a_reload_leaves_the_routes_their_model(
    model: Path, expected: Any, tmp_path: Path, workers: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --default-model the only model is the one of AIP_PREDICT_ROUTE."""
    both = CONFIG.format(model=model)
    lines = both.splitlines(keepends=True)
    only_a, only_b = "".join(lines[:3] + lines[4:]), "".join(lines[:2] + lines[3:])
    before, after = (both, only_b) if cause == "--default-model" else (only_a, both)
    options = ("--default-model", "a") if cause == "--default-model" else ()
    if cause == "AIP_PREDICT_ROUTE":
        monkeypatch.setenv("AIP_PREDICT_ROUTE", PREDICT)
    config = tmp_path / "models.config"
    config.write_text(before)
    follow = ("--config", str(config), "--config-poll-seconds", "0.05", "--workers", workers)
    with ServerProcess(None, tmp_path / "log", *follow, *options) as server:
        wait_for(lambda: is_healthy(server, "/ping"))
        config.write_text(after)
        said(server.announced(f"{config}: not applied. "))
        same(server.request("POST", "/invocations", json.dumps({"instances": ROWS}))[1], expected)


# ---- who may ask


OPEN = (
    "GET /", "HEAD /", "GET /healthz", "HEAD /healthz", "GET /readyz", "HEAD /readyz", "GET /ping", "HEAD /ping",
    f"GET {HEALTH}", f"HEAD {HEALTH}", "GET /v2/health/live", "GET /v2/health/ready",
    "GET /console/console.css", "GET /console/console.js", "GET /console/icon.svg", "GET /docs", "GET /openapi.json",
    "GET /docs/docs.js", "GET /docs/assets/swagger-ui-bundle.js", "GET /docs/assets/swagger-ui.css",
)  # fmt: skip
ROW, COLUMN = json.dumps({"instances": ROWS}), json.dumps({"inputs": {"x": ROWS}})
EXAMPLE = json.dumps({"examples": [{"x": 1.0}]})
TENSOR = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": NUMBERS}]})
LOCKED = {
    "POST /invocations": ROW,
    f"POST {PREDICT}": ROW,
    **{f"POST /v1/models/model{choice}:predict": COLUMN for choice in ("", "/versions/1", "/labels/stable")},
    **{
        f"POST /v1/models/model{choice}:{method}": EXAMPLE
        for choice in ("", "/versions/1", "/labels/stable")
        for method in ("classify", "regress")
    },
    **{
        f"GET /v1/models/model{choice}{part}": None
        for choice in ("", "/versions/1", "/labels/stable")
        for part in ("", "/metadata")
    },
    "GET /v2": None,
    **{f"GET /v2/models/model{choice}{part}": None for choice in ("", "/versions/1") for part in ("", "/ready")},
    **{f"POST /v2/models/model{choice}/infer": TENSOR for choice in ("", "/versions/1")},
    "GET /models": None,
    "GET /monitoring/prometheus/metrics": None,
}
NO_SIGNATURE = {name for name in LOCKED if ":classify" in name or ":regress" in name}
"""The model has no such signature: with a key they are answered 400."""


@pytest.fixture(scope="module")
def locked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that wants a key, in the environment of Vertex AI."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(KEY)
    label = 'version_labels { key: "stable" value: 1 }'
    config = f'config {{ name: "model" base_path: "{model}" model_platform: "tensorflow" {label} }}'
    (folder / "models.config").write_text(f"model_config_list {{ {config} }}")
    options = ["--config", str(folder / "models.config"), "--api-key-file", str(folder / "keys"), "--metrics"]
    options += ["--grpc-port", "0"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VERTEX.items():
            patch.setenv(name, value)
        server = ServerProcess(None, folder / "log", *options)
    with server:
        wait_for(lambda: is_healthy(server, "/ping"))
        yield server
    assert "Traceback" not in server.log


def ask(server: ServerProcess, route: str, body: str | None = None, **headers: str) -> tuple[int, bytes]:
    method, target = route.split(" ")
    return server.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("route", OPEN)
def test_routes_without_a_key(locked: ServerProcess, route: str) -> None:
    assert ask(locked, route)[0] == 200
    assert ask(locked, route, x_api_key="wrong")[0] == 200


@pytest.mark.parametrize("route", LOCKED)
def test_routes_with_a_key(locked: ServerProcess, route: str) -> None:
    body = LOCKED[route]
    for headers in ({}, {"x_api_key": "wrong" * 5}, {"authorization": f"Basic {KEY}"}):
        status, answer = ask(locked, route, body, **headers)
        assert status == 401, answer
        assert list(json.loads(answer)) == ["error"]
    status, answer = ask(locked, route, body, x_api_key=KEY)
    assert status == (400 if route in NO_SIGNATURE else 200), answer
    assert ask(locked, route, body, authorization=f"Bearer {KEY}")[0] == status


def test_every_route_is_above(model: Path) -> None:
    settings = ServerSettings.for_model_dir(model, health_route=HEALTH, predict_route=PREDICT)
    app = create_app(settings)
    routes: list[Any] = app.routes
    found = {
        f"{method} {route.path}"
        for route in routes
        for method in getattr(route, "methods", None) or ["GET"]
        if not route.path.startswith("/docs/assets")  # a folder
    }
    found |= {f"{method.upper()} {path}" for path, item in app.openapi()["paths"].items() for method in item}
    for name, value in {"model": "model", "version": "1", "label": "stable"}.items():
        found = {route.replace(f"{{{name}}}", value) for route in found}
    assert found - {route.partition("?")[0] for route in (*OPEN, *LOCKED)} == set()


def test_a_path_that_only_looks_open_needs_a_key(locked: ServerProcess) -> None:
    for path in (
        "/ping/",
        "/PING",
        "//ping",
        "/ping%2f",
        "/healthz/..",
        f"{HEALTH}/",
        f"{HEALTH}:predict",
        "/invocations/",
    ):
        assert ask(locked, f"GET {path}")[0] == 401, path
    for path in ("/ping", HEALTH):  # with a query it is the same route
        assert ask(locked, f"GET {path}?x=1")[0] == 200


METHODS = """
    tensorflow.serving.PredictionService/Predict tensorflow.serving.PredictionService/Classify
    tensorflow.serving.PredictionService/Regress tensorflow.serving.PredictionService/MultiInference
    tensorflow.serving.PredictionService/GetModelMetadata tensorflow.serving.ModelService/GetModelStatus
    tensorflow.serving.ModelService/HandleReloadConfigRequest
    inference.GRPCInferenceService/ServerLive inference.GRPCInferenceService/ServerReady
    inference.GRPCInferenceService/ServerMetadata inference.GRPCInferenceService/ModelReady
    inference.GRPCInferenceService/ModelMetadata inference.GRPCInferenceService/ModelInfer
"""


def test_calls_without_a_key(locked: ServerProcess) -> None:
    with grpc.insecure_channel(locked.grpc_address) as channel:
        for method in METHODS.split():
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/{method}")(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
