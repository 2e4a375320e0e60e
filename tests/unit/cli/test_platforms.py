"""What Vertex AI, SageMaker and Kubernetes set in the environment of `tpuembed serve`, and what options make of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.messages import said
from tpuembed_cli import serve as serving
from tpuembed_cli.main import cli
from tpuembed_serving import ServerSettings

VERTEX = {
    "AIP_HTTP_PORT": "9090",
    "AIP_HEALTH_ROUTE": "/health",
    "AIP_PREDICT_ROUTE": "/predict",
    "AIP_MODE": "PREDICTION",
}
CONFIG = """
model_config_list {
  config { name: "a" base_path: "/a" model_platform: "tensorflow" }
  config { name: "b" base_path: "/b" model_platform: "tensorflow" }
}
"""
REMOTE = ["--target", "host:1", "--name", "n"]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerSettings]:
    found: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", found.append, raising=False)
    monkeypatch.setattr(serving, "_warn", lambda *_: None)

    def run(*arguments: str | Path, **variables: str) -> ServerSettings:
        done = CliRunner().invoke(cli, ["serve", *map(str, arguments)], env=variables)
        assert done.exception is None, (done.output, done.exception)
        return found.pop()

    return run


def refusal(*arguments: str | Path, **variables: str) -> str:
    done = CliRunner().invoke(cli, ["serve", *map(str, arguments)], env=variables)
    assert done.exit_code in (1, 2), (done.output, done.exception)
    return done.stderr


def where(settings: ServerSettings) -> tuple[str, int, int | None]:
    return settings.host, settings.rest_port, settings.grpc_port


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder in place of /opt/ml."""
    (tmp_path / "ml" / "model" / "1").mkdir(parents=True)
    return tmp_path / "ml"


def test_nothing_is_set(parse: Callable[..., ServerSettings], tmp_path: Path) -> None:
    settings = parse(tmp_path)
    assert (*where(settings), settings.health_route, settings.predict_route) == ("127.0.0.1", 8501, 8500, None, None)
    empty = dict.fromkeys([*VERTEX, "AIP_STORAGE_URI", "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_BASE_DIR"], "")
    assert parse(tmp_path, **empty) == settings


def test_options_win(parse: Callable[..., ServerSettings], tmp_path: Path, base: Path) -> None:
    platform = {**VERTEX, "AIP_STORAGE_URI": "/nowhere", "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": "7"}
    config = tmp_path / "models.config"
    config.write_text(CONFIG)
    settings = parse(tmp_path, "--host", "::1", "--rest-port", "1", **platform)
    assert (where(settings), settings.models[0].base_path) == (("::1", 1, 8500), tmp_path)
    settings = parse(**platform, TPUEMBED_SERVE_MODEL_DIR=str(tmp_path), TPUEMBED_SERVE_REST_PORT="2")
    assert (where(settings), settings.models[0].base_path) == (("0.0.0.0", 2, 8500), tmp_path)
    settings = parse("--config", config, "--default-model", "b", **platform)
    assert (settings.rest_port, settings.default_model, len(settings.models)) == (9090, "b", 2)
    settings = parse(*REMOTE, **platform)
    assert (where(settings), settings.target) == (("0.0.0.0", 9090, 8500), "host:1")


def test_sagemaker(parse: Callable[..., ServerSettings], base: Path) -> None:
    settings = parse(SAGEMAKER_BASE_DIR=str(base))
    assert where(settings) == ("0.0.0.0", 8080, None)
    assert [(model.name, model.base_path) for model in settings.models] == [("model", base / "model")]
    assert where(parse(SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_BIND_TO_PORT="9")) == ("0.0.0.0", 9, None)
    assert where(parse("--grpc-port", "5", SAGEMAKER_BASE_DIR=str(base))) == ("0.0.0.0", 8080, 5)
    assert where(parse("--host", "127.0.0.1", SAGEMAKER_BASE_DIR=str(base))) == ("127.0.0.1", 8080, None)


def test_the_folder_of_sagemaker_is_in_opt(monkeypatch: pytest.MonkeyPatch, parse: Callable[..., Any]) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/opt/ml/model")
    assert str(parse().models[0].base_path) == "/opt/ml/model"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"AIP_STORAGE_URI": "", "AIP_HTTP_PORT": "8080"},
        {"AIP_HTTP_PORT": "0"},
        {"AIP_HTTP_PORT": "65536"},
        {"AIP_HTTP_PORT": "tcp://10.0.0.1:80"},
        {"SAGEMAKER_BIND_TO_PORT": "٣"},
    ],
)
def test_refusals_without_a_model(variables: dict[str, str]) -> None:
    said(refusal(**variables))


@pytest.mark.parametrize(
    "variables",
    [
        {"AIP_PREDICT_ROUTE": "/v1/models/m:predict"},
        {"AIP_HEALTH_ROUTE": "/healthz"},
        {"AIP_HEALTH_ROUTE": "/x", "AIP_PREDICT_ROUTE": "/x"},
        {"AIP_PREDICT_ROUTE": "predict"},
        {"AIP_PREDICT_ROUTE": "/monitoring/prometheus/metrics"},
    ],
)
def test_routes_are_refused_by_name(tmp_path: Path, variables: dict[str, str]) -> None:
    said(refusal(tmp_path, "--metrics", **variables))


def test_several_models_need_a_default(tmp_path: Path) -> None:
    config = tmp_path / "models.config"
    config.write_text(CONFIG)
    said(refusal("--config", config, **VERTEX))
    said(refusal("--config", config, "--default-model", "c"))


def test_links_of_kubernetes_are_no_options(
    parse: Callable[..., ServerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Services called tpuembed-serve, tpuembed-serve-rest and tpuembed-serve-grpc."""
    warned: list[str] = []
    monkeypatch.setattr(serving, "_warn", lambda _, text: warned.append(text))
    link = "tcp://10.0.0.1:80"
    settings = parse(
        tmp_path,
        TPUEMBED_SERVE_SERVICE_HOST="10.0.0.1",
        TPUEMBED_SERVE_SERVICE_PORT="80",
        TPUEMBED_SERVE_PORT=link,
        TPUEMBED_SERVE_PORT_80_TCP_ADDR="10.0.0.1",
        TPUEMBED_SERVE_REST_PORT=link,
        TPUEMBED_SERVE_GRPC_PORT="udp://[fd00::1]:80",
    )
    assert where(settings) == ("127.0.0.1", 8501, 8500)
    assert warned == [
        "ignored, because Kubernetes set them for a Service and not for an option: TPUEMBED_SERVE_REST_PORT, "
        "TPUEMBED_SERVE_GRPC_PORT",
        "no option of tpuembed serve has these environment variables: TPUEMBED_SERVE_PORT, "
        "TPUEMBED_SERVE_PORT_80_TCP_ADDR, TPUEMBED_SERVE_SERVICE_HOST, TPUEMBED_SERVE_SERVICE_PORT",
    ]
    warned.clear()
    assert where(parse(tmp_path)) == ("127.0.0.1", 8501, 8500)
    assert not warned


@pytest.mark.parametrize(
    "variables",
    [
        {"TPUEMBED_SERVE_REST_PORT": "tcp://10.0.0.1"},
        {"TPUEMBED_SERVE_REST_PORT": "http://10.0.0.1:80"},
        {"TPUEMBED_SERVE_WORKERS": "tcp://10.0.0.1:80"},
    ],
)
def test_other_values_are_refused(tmp_path: Path, variables: dict[str, str]) -> None:
    said(refusal(tmp_path, **variables))


def test_a_link_loses_against_a_flag(parse: Callable[..., ServerSettings], tmp_path: Path) -> None:
    assert parse(tmp_path, "--rest-port", "3", TPUEMBED_SERVE_REST_PORT="tcp://10.0.0.1:80").rest_port == 3
