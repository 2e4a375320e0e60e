"""Scripts run by the interpreters of the proof's environments, each in a process of its own, within a time limit."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.tpu import child
from tests.tpu.environments import Environment

__all__ = ["NO_TPU", "REQUIRED", "SOME_TPU", "run", "skip_without"]

REQUIRED: Final = "TPUEMBED_TPU_PROOF"
"""An environment variable; where it is set, a missing environment is a failure and no skip."""
NO_TPU: Final[Mapping[str, str]] = {"TPU_LIBRARY_PATH": "/nonexistent.so", "JAX_PLATFORMS": "cpu"}
"""For what runs on the CPU: no process looks for a TPU."""
SOME_TPU: Final[Mapping[str, str]] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
}
"""For what asks libtpu of TPUs that nothing runs on: they are named, and not looked for."""
_ROOT: Final = Path(__file__).resolve().parents[3]


def skip_without(*environments: Environment) -> None:
    """Skip the running test, by name of what is missing, unless all `environments` are there."""
    for environment in environments:
        if environment.is_complete():
            continue
        message = f"the environment {environment.name} is not made: python -m tests.tpu.environments, or make tpu-proof"
        if os.environ.get(REQUIRED):
            pytest.fail(message)
        pytest.skip(message)


def run(
    environment: Environment, module: str, *arguments: str, seconds: float = 240.0, names: Mapping[str, str] = NO_TPU
) -> str:
    """The standard output of `python -m module arguments` in `environment`, with `names` among its variables.

    Raises:
        AssertionError: it failed, or took longer than `seconds`.
    """
    skip_without(environment)
    try:
        done = subprocess.run(
            child.command(environment.python, module, *arguments),
            cwd=_ROOT,
            env=child.variables({"TF_CPP_MIN_LOG_LEVEL": "3"}, names),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{module} took longer than {seconds} s: {error.stderr!r:.2000}") from None
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
