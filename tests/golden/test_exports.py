"""Exports of earlier versions load, verify, share runs and answer as the model that was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpuembed.checkpoint.tools import read_rows, verify_files
from tpuembed_serving.tensorflow import session as runtime

EXPORTS = Path(__file__).with_name("exports")
INPUTS = {"user": "ids", "watched": "watched", "age": "age"}
TOLERANCE = {"float32": 1e-6, "int8": 0.01}


@pytest.fixture(scope="module")
def truth() -> Any:
    return np.load(EXPORTS / "truth.npz")


def answers(folder: Path, truth: Any) -> dict[str, Any]:
    servable = runtime.load(folder / "1")
    try:
        signature = servable.signatures["serving_default"]
        inputs = [truth[INPUTS[info.alias]] for info in signature.inputs]
        if folder.name.startswith("lookups"):  # whose inputs are lists, as a serving_config has them if it does not say
            inputs = [ids.reshape(len(ids), -1) for ids in inputs]
        found = servable.run(signature, inputs)
        merging = servable.merging(signature)
        assert merging is not None
        assert merging.is_proven == folder.name.startswith("lookups"), (
            "whole models are proven once they are exported anew"
        )
        return dict(zip([info.alias for info in signature.outputs], found, strict=True))
    finally:
        servable.close()


@pytest.mark.parametrize(("name", "storage"), [("variables", "float32"), ("mmap", "int8")])
def test_lookups(truth: Any, name: str, storage: str) -> None:
    found = answers(EXPORTS / f"lookups_{name}", truth)
    np.testing.assert_allclose(found["user"], truth["users"][truth["ids"]], atol=TOLERANCE[storage])
    means = [truth["videos"][row[row >= 0]].mean(0) if (row >= 0).any() else np.zeros(4) for row in truth["watched"]]
    np.testing.assert_allclose(found["watched"], means, atol=TOLERANCE[storage])


@pytest.mark.parametrize(("name", "storage"), [("variables", "float32"), ("mmap", "int8")])
def test_whole_models(truth: Any, name: str, storage: str) -> None:
    found = answers(EXPORTS / f"model_{name}", truth)
    for output in ("click", "watch"):
        np.testing.assert_allclose(found[output], truth[output], atol=TOLERANCE[storage])


@pytest.mark.parametrize("name", ["lookups_variables", "lookups_mmap", "model_variables", "model_mmap"])
def test_files_are_whole_and_rows_are_those_of_training(truth: Any, name: str) -> None:
    report = verify_files(EXPORTS / name / "1")
    assert not report.damaged
    storage = "int8" if "mmap" in name else "float32"
    for table, rows in (("users", 20), ("videos", 30)):
        np.testing.assert_allclose(
            read_rows(EXPORTS / name, table, 0, rows).values, truth[table], atol=TOLERANCE[storage]
        )
