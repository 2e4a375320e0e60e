"""What `import tpuembed.compat` says where it cannot work."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["tfrs", "keras_rs"])
def test_without_tensorflow_the_command_is_named(module: str) -> None:
    code = "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda n: None if n == 'tensorflow' else find(n)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import tpuembed.compat.{module}"], capture_output=True, text=True, timeout=120
    )
    last = done.stderr.splitlines()[-1]
    assert last.endswith("tpuembed.compat needs tensorflow, which is not installed: pip install 'tpuembed[tf]'")


def test_another_keras_backend_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tpuembed.compat.tfrs"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "KERAS_BACKEND": "jax"},
    )  # fmt: skip
    assert "KERAS_BACKEND is 'jax'" in done.stderr.splitlines()[-1]
