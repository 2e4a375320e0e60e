"""Settings are valid once built."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving import ModelSettings, ServerSettings


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
