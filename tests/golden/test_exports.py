"""The golden exports load, verify, share runs and answer as the model that was trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tpuembed.checkpoint.tools import read_rows, verify_files
from tpuembed.manifest import MANIFEST_PATH
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import session as runtime

EXPORTS = Path(__file__).with_name("exports")
INPUTS = {"user": "ids", "watched": "watched", "age": "age"}


@pytest.fixture(scope="module")
def truth() -> Any:
    return np.load(EXPORTS / "truth.npz")


def answers(name: str, truth: Any) -> dict[str, Any]:
    servable = runtime.load(EXPORTS / name / "1")
    try:
        signature = servable.signatures["serving_default"]
        inputs = [truth[INPUTS[info.alias]] for info in signature.inputs]
        if name == "lookups":  # whose inputs are lists, as a serving_config has them if it does not say
            inputs = [ids.reshape(len(ids), -1) for ids in inputs]
        found = servable.run(signature, inputs)
        merging = servable.merging(signature)
        assert merging is not None
        assert merging.is_proven
        return dict(zip([info.alias for info in signature.outputs], found, strict=True))
    finally:
        servable.close()


def test_lookups(truth: Any) -> None:
    found = answers("lookups", truth)
    np.testing.assert_allclose(found["user"], truth["users"][truth["ids"]], atol=1e-6)
    means = [truth["videos"][row[row >= 0]].mean(0) if (row >= 0).any() else np.zeros(4) for row in truth["watched"]]
    np.testing.assert_allclose(found["watched"], means, atol=1e-6)


def test_whole_model(truth: Any) -> None:
    found = answers("model", truth)
    for output in ("click", "watch"):
        np.testing.assert_allclose(found[output], truth[output], atol=1e-6)


@pytest.mark.parametrize("name", ["lookups", "model"])
def test_files_are_whole_and_rows_are_those_of_training(truth: Any, name: str) -> None:
    assert not verify_files(EXPORTS / name / "1").damaged
    for table, rows in (("users", 20), ("videos", 30)):
        np.testing.assert_array_equal(read_rows(EXPORTS / name, table, 0, rows).values, truth[table])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda manifest: manifest.update(format=2), "its format is 2, and this version of tpuembed reads 1"),
        (
            lambda manifest: manifest["requires"].append("tides"),
            "it requires tides, and this version of tpuembed knows base, names, retrieval",
        ),
    ],
)
def test_what_a_server_cannot_read_is_refused(
    change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path
) -> None:
    version = shutil.copytree(EXPORTS / "lookups" / "1", tmp_path / "1")
    manifest = json.loads((version / MANIFEST_PATH).read_text())
    change(manifest)
    (version / MANIFEST_PATH).write_text(json.dumps(manifest))
    with refused(StatusError, match=says):
        runtime.load(version)
