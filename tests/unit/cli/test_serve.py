"""The command is light until it serves, and names the extra that it lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed_cli import serve as command
from tpuembed_serving import LoadSettings, ModelSettings, ServerSettings
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.settings import BatchingSettings

HEAVY = ("tensorflow", "fastapi", "uvicorn", "numpy", "orjson")


def test_the_module_imports_nothing_heavy() -> None:
    code = f"import sys, tpuembed_cli.serve; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_settings_need_no_web_framework() -> None:
    code = f"import sys, tpuembed_serving; tpuembed_serving.ServerSettings; print([n for n in {HEAVY} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["tensorflow", "fastapi", "uvicorn", "orjson"])
def test_a_missing_extra_is_one_sentence(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    result = CliRunner().invoke(command.serve, [str(tmp_path)])
    assert isinstance(result.exception, MissingExtraError)
    sentence = f"tpuembed serve needs {package}, which is not installed: pip install 'tpuembed[serve]'"
    assert str(result.exception) == sentence


def test_every_option_reaches_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    arguments = "--name n --host ::1 --rest-port 1 --poll-seconds 2 --rest-timeout-ms 3 --run-threads 4"
    arguments += " --max-queued-requests 5 --max-body-bytes 6 --drain-seconds 7 --grpc-port 8 --workers 9"
    arguments += " --lame-duck-seconds 12 --listen-when-loaded"
    arguments += " --max-load-retries 0 --load-retry-seconds 11 --verify-on-load"
    arguments += " --allow_version_labels_for_unavailable_models"
    result = CliRunner().invoke(command.serve, [str(tmp_path), *arguments.split()])
    assert result.exception is None
    assert served == [
        ServerSettings.for_model_dir(
            tmp_path, name="n", host="::1", rest_port=1, poll_seconds=2, rest_timeout_ms=3, run_threads=4,
            max_queued_requests=5, max_body_bytes=6, drain_seconds=7, grpc_port=8, workers=9, verify_on_load=True,
            lame_duck_seconds=12, listen_when_loaded=True,
            load=LoadSettings(max_retries=0, retry_seconds=11, labels_for_unavailable=True),
        )
    ]  # fmt: skip


def test_batching_options_reach_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    (tmp_path / "b.pbtxt").write_text("max_batch_size { value: 8 }")
    file = f"--batching-parameters-file {tmp_path / 'b.pbtxt'}"
    for arguments in ("", "--disable-batching --max-batch-rows 7", f"--enable_batching {file}"):
        result = CliRunner().invoke(command.serve, [str(tmp_path), *arguments.split()])
        assert result.exception is None
    assert [settings.batching for settings in served] == [
        BatchingSettings(),
        BatchingSettings(enabled=False, max_rows=7),
        BatchingSettings(enabled=True, parameters=BatchingParameters(max_batch_size=8)),
    ]
    result = CliRunner().invoke(command.serve, [str(tmp_path), *file.split()])
    assert isinstance(result.exception, ConfigError), "as TensorFlow Serving: a file alone does not enable it"


def test_a_config_is_what_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    config = tmp_path / "models.config"
    config.write_text(
        'model_config_list { config { name: "m" base_path: "/m" model_platform: "tensorflow" } }', encoding="utf-8"
    )
    result = CliRunner().invoke(command.serve, ["--config", str(config), "--config-poll-seconds", "2"])
    assert result.exception is None
    assert served[0].models == (ModelSettings(name="m", base_path=Path("/m")),)
    assert (served[0].config_file, served[0].config_poll_seconds) == (config, 2.0)


def test_workers_share_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    monkeypatch.setattr("tpuembed_cli.serve.available_cpus", lambda: 8)
    for workers in (1, 3, 16):
        CliRunner().invoke(command.serve, [str(tmp_path), "--workers", str(workers)])
    assert [settings.run_threads for settings in served] == [8, 2, 1]


def test_every_option_has_help() -> None:
    for parameter in command.serve.params:
        record = parameter.to_info_dict()
        assert parameter.name == "model_dir" or record["help"]
