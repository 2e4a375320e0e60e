"""Requests that schemathesis makes of the server's own OpenAPI document, valid ones and others: each answer is as declared."""

import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.doubles import wait_for
from tests.support.serving.good_client import GoodClient
from tests.support.serving.models import spec
from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model

SCRIPT = Path(sys.executable).with_name("schemathesis")
ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)
GOOD_PATH = "/v1/models/movies:predict"
GOOD = b'{"inputs": {"user": [1, 2], "watched": [[3, 4], [5, 6]]}}'
GOOD_ANSWER = {"outputs": {"user": [[2.0, 3.0], [4.0, 5.0]], "watched": [[16.0, 18.0], [24.0, 26.0]]}}
MODELS = {"predict": "movies", "classify": "ages", "regress": "tastes"}
# By TensorFlow Serving's API a URL that it does not know is 400, whatever its method, and a model may refuse what JSON allows.
NOT_OURS = "unsupported_method,positive_data_acceptance"
CONFIG = """
model_config_list {{
  config {{ name: "movies" base_path: "{root}/movies" model_platform: "tensorflow" {labels} }}
  config {{ name: "ages" base_path: "{root}/ages" model_platform: "tensorflow" {labels} }}
  config {{ name: "tastes" base_path: "{root}/tastes" model_platform: "tensorflow" {labels} }}
}}
"""


def ages(inputs: Any) -> dict[str, Any]:
    user = tf.io.parse_example(inputs, {"user": tf.io.FixedLenFeature([], tf.int64, 0)})["user"]
    old = tf.cast(user > 40, tf.float32)
    return {
        "classes": tf.repeat(tf.constant([["old", "young"]]), tf.size(user), 0),
        "scores": tf.stack([old, 1 - old], 1),
    }


def tastes(inputs: Any) -> dict[str, Any]:
    watched = tf.io.parse_example(inputs, {"watched": tf.io.VarLenFeature(tf.int64)})["watched"]
    return {"outputs": tf.cast(tf.sparse.reduce_sum(watched, 1), tf.float32)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models for the document's own examples, one for each method."""
    if not SCRIPT.exists():
        pytest.skip("schemathesis is not installed: pip install 'tpuembed[dev]'")
    root = tmp_path_factory.mktemp("openapi")
    tables = tf.train.Checkpoint(users=tf.Variable(ROWS, name="users"), items=tf.Variable(ROWS + 1, name="items"))
    features = {"user": {"table": "users", "input": "id"}, "watched": {"table": "items", "combiner": "sum"}}
    export_saved_model(tables.write(str(root / "ckpt")), root / "movies", serving_config={"features": features})
    for function in (ages, tastes):
        signature = tf.function(function).get_concrete_function(spec(tf.string, "inputs"))
        path = str(root / function.__name__ / "1")
        tf.saved_model.save(tf.Module(), path, signatures={"serving_default": signature})
    labels = 'version_labels { key: "stable" value: 1 }'
    (root / "models.config").write_text(CONFIG.format(root=root, labels=labels))
    options = ("--metrics", "--access-log", str(root / "access.log"))
    with ServerProcess(None, root / "log", "--config", str(root / "models.config"), *options) as running:
        running.wait_for(1)
        while running.request("GET", "/readyz")[0] != 200:
            assert running.process.poll() is None, running.log
        yield running


def document(server: ServerProcess) -> Any:
    """The server's, where a model is one of those that it has, a version and a label too: valid requests are for these."""
    found = json.loads(server.request("GET", "/openapi.json")[1])
    for path, item in found["paths"].items():
        names = [MODELS[path.rpartition(":")[2]]] if ":" in path else sorted(MODELS.values())
        values = {"model": names, "version": [1], "label": ["stable"]}
        for operation in item.values():
            for parameter in operation.get("parameters", []):
                if not path.endswith("/labels/{label}"):  # the state of the versions: theirs looks at no label there
                    parameter["schema"] = {**parameter["schema"], "enum": values[parameter["name"]]}
    return found


def asked(server: ServerProcess) -> dict[str, collections.Counter[int]]:
    """Route -> status -> requests, as the server's own log has them."""
    counts = collections.defaultdict[str, collections.Counter[int]](collections.Counter)
    log = server.log_path.with_name("access.log")
    server.request("GET", "/v1/models/the-last-one")  # lines are written in order, by a thread that may be behind
    wait_for(lambda: b"the-last-one" in log.read_bytes())
    for line in log.read_text(encoding="utf-8").splitlines()[:-1]:
        entry = json.loads(line)
        found = re.fullmatch(r"/v1/models/[^/]*?(/versions/|/labels/|)[^/]*:(\w+)", entry["path"])
        if found and entry["method"] == "POST":
            counts[f"{found[1].strip('/')}:{found[2]}"][entry["status"]] += 1
    return counts


ROUTES = {f"{choice}:{method}" for choice in ("", "versions", "labels") for method in MODELS}


@pytest.mark.nightly
def test_every_answer_is_as_the_document_says(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(document(server)))
    url = f"http://{server.host}:{server.port}"
    checks = ["--checks", "all", "--exclude-checks", NOT_OURS, "--continue-on-failure", "--warnings", "off"]
    bounds = ["--max-examples", "8", "--generation-deterministic", "--suppress-health-check", "all"]
    command = [str(SCRIPT), "--no-color", "run", "openapi.json", "--url", url, *checks, *bounds]
    with GoodClient(f"{url}{GOOD_PATH}", GOOD, GOOD_ANSWER) as good:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in server.log
    found = asked(server)
    assert set(found) >= ROUTES
    found[":predict"][200] -= good.answers
    for route in ROUTES:
        assert found[route][200] > 0, (route, found)
        assert found[route][400] > 0, (route, found)
        assert set(found[route]) <= {200, 400, 404, 501, 503, 504}, (route, found)
    print({route: dict(found[route]) for route in sorted(found)}, f"and {good.answers} good requests meanwhile")
