"""tritonclient and the SDK of KServe against a whole server. `make test-clients` makes their environment."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.models import spec
from tests.support.serving.process import ServerProcess

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
DTYPES = {
    "BOOL": tf.bool, "UINT8": tf.uint8, "UINT16": tf.uint16, "UINT32": tf.uint32, "UINT64": tf.uint64, "INT8": tf.int8,
    "INT16": tf.int16, "INT32": tf.int32, "INT64": tf.int64, "FP16": tf.float16, "FP32": tf.float32, "FP64": tf.float64,
    "BF16": tf.bfloat16, "BYTES": tf.string,
}  # fmt: skip
TABLE = np.random.default_rng(7).normal(size=(50, 4)).astype(np.float32)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing: make test-clients"),
]


def save(path: Path) -> dict[str, Any]:
    module = tf.Module()
    module.table = tf.Variable(TABLE)
    lookup = tf.function(lambda ids: {"embedding": tf.gather(module.table, ids) * 1.5})
    signatures = {"serving_default": lookup.get_concrete_function(spec(tf.int64, "ids"))}
    for name, dtype in DTYPES.items():
        same = tf.function(lambda x: {"y": tf.identity(x)})
        signatures[name] = same.get_concrete_function(spec(dtype, "x", (None, None)))
    tf.saved_model.save(module, str(path), signatures=signatures)
    ids = np.array([0, 49, 7, 7], np.int64)
    loaded = tf.saved_model.load(str(path))
    return {"ids": ids, "embedding": loaded.signatures["serving_default"](ids=tf.constant(ids))["embedding"].numpy()}


CONFIG = """
model_config_list {{ config {{ name: "m" base_path: "{path}" model_platform: "tensorflow"
  version_labels {{ key: "stable" value: 1 }} }} }}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("clients")
    np.savez(folder / "tensors.npz", **save(folder / "m" / "1"))
    (folder / "models.config").write_text(CONFIG.format(path=folder / "m"))
    options = ("--config", str(folder / "models.config"), "--grpc-port", "0")
    with ServerProcess(None, folder / "log", *options) as running:
        running.wait_for(1)
        yield [f"{running.host}:{running.port}", running.grpc_address, str(folder / "tensors.npz")]
    assert "Traceback" not in running.log


CASES = {
    "triton": ("http_binary", "http_json", "http_compressed", "http_async", "grpc", "grpc_stream"),
    "kserve_sdk": ("rest", "grpc", "v1"),
}


@pytest.mark.parametrize(("client", "case"), [(client, case) for client, cases in CASES.items() for case in cases])
def test_clients_get_what_tensorflow_computes(server: list[str], client: str, case: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(PYTHON), "-m", f"tests.clients.{client}", case, *server]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PAGE = ROOT / "docs" / "how-to" / "open-inference-protocol.md"
SCRIPTS = {"with_triton.py": "[[6.0, 7.0], [10.0, 11.0]] [[2.0, 2.5], [7.0, 7.5]]"}
SCRIPTS["with_kserve.py"] = SCRIPTS["with_triton.py"]


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """What the page serves."""
    folder = tmp_path_factory.mktemp("movies")
    subprocess.run([sys.executable, "-c", block("publish.py")], cwd=folder, check=True, capture_output=True)
    with ServerProcess(folder / "models" / "movies", folder / "log") as running:
        running.wait_for(1)
        yield running


def block(name: str) -> str:
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_of_the_page(movies: ServerProcess, name: str) -> None:
    script = block(name).replace(":8501", f":{movies.port}")
    command = [str(PYTHON), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout.strip(), done.returncode) == (SCRIPTS[name], 0), done.stderr
    assert SCRIPTS[name] in PAGE.read_text(encoding="utf-8")
