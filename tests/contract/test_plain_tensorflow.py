"""Exports of every kind, loaded by a process that has TensorFlow and cannot import tpuembed."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support import contract_lookups, contract_models
from tests.support.contract_lookups import FEATURES, Lookups
from tests.support.contract_models import WholeModel
from tpuembed import export_saved_model

Array = np.ndarray[Any, Any]

PROGRAM = """
import sys

sys.modules["tpuembed"] = sys.modules["tpuembed_serving"] = None  # to import them is an error from here on
import numpy as np
import tensorflow as tf

for folder in sys.argv[1:]:
    version, *_ = open(f"{folder}/version").read().splitlines()
    loaded = tf.saved_model.load(version)
    inputs = {name: tf.constant(value) for name, value in np.load(f"{folder}/inputs.npz").items()}
    found = loaded.signatures["serving_default"](**inputs)
    np.savez(f"{folder}/outputs.npz", **{name: value.numpy() for name, value in found.items()})
assert sys.modules["tpuembed"] is None
"""

CASES = ("lookups", "mapped", "overlay", "model")
SMALL = {name: FEATURES[name] for name in ("user", "next")}
"""The features of the versions that are exported here."""


@pytest.fixture(scope="module")
def given() -> dict[str, dict[str, Array]]:
    small = contract_lookups.draw(SMALL, 21, seed=3)
    return {
        "lookups": contract_lookups.draw(FEATURES, 21, seed=3),
        "mapped": small,
        "overlay": small,
        "model": contract_models.draw(21, seed=3),
    }


@pytest.fixture(scope="module")
def found(
    lookups: Lookups, whole_model: WholeModel, given: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Array]]:
    """Return what the process computes: its outputs for each case."""
    folder = tmp_path_factory.mktemp("plain")
    versions = {"lookups": lookups.version, "model": whole_model.version}
    options: dict[str, Any] = {"serving_config": {"features": SMALL}, "layout": "mmap", "workers": 1}
    versions["mapped"] = export_saved_model(lookups.prefix, folder / "m", **options).path
    versions["overlay"] = export_saved_model(lookups.prefix, folder / "m", base="latest", **options).path
    for name in CASES:
        (folder / name).mkdir()
        (folder / name / "version").write_text(str(versions[name]))
        np.savez(folder / name / "inputs.npz", **given[name])
    command = [sys.executable, "-c", PROGRAM, *(str(folder / name) for name in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: dict(np.load(folder / name / "outputs.npz")) for name in CASES}


@pytest.mark.parametrize("case", ["lookups", "mapped", "overlay"])
def test_lookups_are_those_of_numpy(lookups: Lookups, given: Any, found: Any, case: str) -> None:
    features, inputs = FEATURES if case == "lookups" else SMALL, given[case]
    assert found[case].keys() == features.keys()
    for name, spec in features.items():
        rows = lookups.rows[spec["table"]]
        wanted = contract_lookups.look_up(spec, rows, inputs[name], inputs.get(f"{name}_weights"))
        np.testing.assert_allclose(found[case][name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_whole_model_computes_what_it_computed_in_training(whole_model: WholeModel, given: Any, found: Any) -> None:
    wanted = contract_models.predict(whole_model.model, given["model"])
    assert found["model"].keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found["model"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
