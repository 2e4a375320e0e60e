"""Installations that cannot work are refused by name."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.runtime import tpu


@pytest.mark.parametrize(("variable", "value"), [("TF_USE_LEGACY_KERAS", "1"), ("KERAS_BACKEND", "numpy")])
def test_another_keras_is_refused(variable: str, value: str) -> None:
    code = (
        "import tpuembed\nfrom tpuembed import FeatureConfig, TableConfig, TpuEmbedError\n"
        "try:\n    tpuembed.TPUEmbedding(FeatureConfig(TableConfig(3, 2, 't')))\nexcept TpuEmbedError as error:\n    print(error)"
    )
    environ = {**os.environ, variable: value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=120)
    assert variable in done.stdout, done.stderr
    assert "Unset it" in done.stdout


def test_two_tensorflows_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter([name]))
    tpu._installed.cache_clear()
    with refused(ConfigError):
        tpu.check_environment()
    tpu._installed.cache_clear()
