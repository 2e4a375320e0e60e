"""The command is light until it serves, and names the extra that it lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpuembed.errors import MissingExtraError
from tpuembed_cli import serve as command
from tpuembed_serving import ServerSettings

HEAVY = ("tensorflow", "fastapi", "uvicorn", "numpy", "orjson")


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


def test_workers_share_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    monkeypatch.setattr("tpuembed_cli.serve.available_cpus", lambda: 8)
    for workers in (1, 3, 16):
        CliRunner().invoke(command.serve, [str(tmp_path), "--workers", str(workers)])
    assert [settings.run_threads for settings in served] == [8, 2, 1]
