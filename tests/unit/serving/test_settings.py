"""Settings are valid once built."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving import LatestVersions, ModelSettings, ServerSettings, SpecificVersions, TelemetrySettings
from tpuembed_serving.core.security import ConnectionLimits


def test_the_name_defaults_to_the_folders_own(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rec")
    (model,) = ServerSettings.for_model_dir(tmp_path / "link").models
    assert model == ModelSettings(name="rec", base_path=tmp_path / "link")
    (model,) = ServerSettings.for_model_dir(tmp_path / "rec", name="other").models
    assert model.name == "other"


@pytest.mark.parametrize(
    "options",
    [
        {"rest_port": -1}, {"rest_port": 65536}, {"poll_seconds": 0}, {"rest_timeout_ms": 0}, {"run_threads": 0},
        {"max_queued_requests": -1}, {"max_body_bytes": 0}, {"drain_seconds": 0.0}, {"poll_seconds": float("nan")},
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with refused(ConfigError, match=f"^{next(iter(options))} is"):
        ServerSettings.for_model_dir(tmp_path, **options)


def test_models_need_names_that_differ(tmp_path: Path) -> None:
    model = ModelSettings(name="m", base_path=tmp_path)
    with pytest.raises(ConfigError, match=r"Given more than once: m$"):
        ServerSettings(models=(model, model))
    ServerSettings(models=())
    with pytest.raises(ConfigError, match="its name is empty"):
        ModelSettings(name="", base_path=tmp_path)


def test_a_copy_with_the_models_of_a_reload_keeps_the_folders_of_the_start(tmp_path: Path) -> None:
    """A worker that starts again gets such a copy."""
    started = ServerSettings(models=(ModelSettings(name="m", base_path=tmp_path / "a" / "m"),))
    copy = dataclasses.replace(started, models=(ModelSettings(name="n", base_path=tmp_path / "b" / "n"),))
    assert copy.reload_paths == started.reload_paths
    assert copy.reload_paths is not None
    assert copy.reload_paths.is_chosen(tmp_path / "a" / "m")
    assert not copy.reload_paths.is_chosen(tmp_path / "b" / "n")


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
        ServerSettings.for_model_dir(tmp_path, **options)


@pytest.mark.parametrize("path", ["metrics", "/v1/metrics", "/V1/x", "/v2", "/v2/m", "/readyz", "/a?b", "/docs", ""])
def test_a_path_of_metrics_that_others_have_is_refused(path: str) -> None:
    with refused(ConfigError, match="metrics_path"):
        TelemetrySettings(metrics_path=path)


def test_routes_and_models_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    found = tuple(ModelSettings(name=name, base_path=tmp_path / name) for name in "ab")
    for path in ("/p", "/pings", "/v1/endpoints/7/deployedModels/8", "/models2/x", "/v1/a.b-c_d~e"):
        ServerSettings(models=found[:1], health_route=path, predict_route=f"{path}:predict")
    with refused(ConfigError, match="health_route and predict_route"):
        ServerSettings(models=found[:1], health_route="/x", predict_route="/x")
    with refused(ConfigError, match="default_model"):
        ServerSettings(models=found, predict_route="/x")
    for models in (found, ()):
        with refused(ConfigError, match="'c'"):
            ServerSettings(models=models, default_model="c")


def test_policies_that_want_nothing_are_refused() -> None:
    with refused(ConfigError):
        LatestVersions(0)
    with refused(ConfigError):
        SpecificVersions(frozenset())


@pytest.mark.parametrize("option", ["connections", "header_bytes", "receive_seconds"])
def test_limits_of_connections_that_let_nothing_through_are_refused(option: str) -> None:
    with refused(ConfigError, match=option):
        ConnectionLimits(**{option: 0})
