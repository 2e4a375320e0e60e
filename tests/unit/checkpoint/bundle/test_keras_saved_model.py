"""SavedModels of Keras 3: names instead of numbers, against what keras-rs' layer said of its tables."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointFormatError, UnknownTableError
from tpuembed.export import export_saved_model

GOLDENS = Path(__file__).parents[3] / "golden" / "keras_rs_saved_models"


def check(name: str, of_table: str, others: set[str]) -> None:
    """Every table, called as `of_table` says, with its slots; and `others` beside them."""
    tables = json.loads((GOLDENS / name / "truth.json").read_text())["tables"]
    with open_checkpoint(GOLDENS / name / "model") as checkpoint:
        assert set(checkpoint.tables()) == {of_table.format(table) for table in tables} | others
        for table, files in tables.items():
            listed = of_table.format(table)
            np.testing.assert_array_equal(checkpoint.read(listed), np.load(GOLDENS / name / files["rows"]))
            assert set(checkpoint.tables()[listed].slots) == set(files["slots"])
            for slot, file in files["slots"].items():
                np.testing.assert_array_equal(checkpoint.read(listed, slot=slot), np.load(GOLDENS / name / file))


def test_names_that_slots_prove() -> None:
    check("saved", "{}", set())


def test_exported_models_have_names_of_variables() -> None:
    check("exported", "de/{}/embeddings", {"dense/kernel"})


def test_models_without_an_optimizer_have_names_of_variables() -> None:
    check("untrained", "de/{}/embeddings", {"_operations/7/_kernel"})


def test_names_that_slots_disprove() -> None:
    with refused(CheckpointFormatError):
        open_checkpoint(GOLDENS / "misleading" / "model")


def test_an_export_by_the_name_of_a_variable(tmp_path: Path) -> None:
    config = {"features": {"x": {"table": "de/video.v1/embeddings", "input": "id"}}}
    report = export_saved_model(GOLDENS / "exported" / "model", tmp_path, serving_config=config, workers=1)
    tables = json.loads((GOLDENS / "exported" / "truth.json").read_text())["tables"]
    rows = np.load(GOLDENS / "exported" / tables["video.v1"]["rows"])
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"](x=tf.range(11, dtype=tf.int64))["x"]
    np.testing.assert_array_equal(served, rows)


def test_a_name_of_two_variables_is_no_name(tmp_path: Path) -> None:
    """Each is listed once, by its place in `variables`, which is Keras' order."""
    tower = [keras.Sequential([keras.layers.Embedding(5 + n, 2, name="emb")], name="tower") for n in (0, 1)]
    for layer in tower:
        layer.build((1, 3))
    archive = keras.export.ExportArchive()
    for layer in tower:
        archive.track(layer)
    archive.add_endpoint("serve", lambda ids: tower[0](ids) + tower[1](ids), [tf.TensorSpec([1, 3], tf.int32)])
    archive.write_out(str(tmp_path), verbose=False)
    with open_checkpoint(tmp_path) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.tables()}
        with pytest.raises(UnknownTableError):
            checkpoint.read("tower/emb/embeddings")
    assert set(found) == {"variables/0", "variables/1"}
    for number, layer in enumerate(tower):
        np.testing.assert_array_equal(found[f"variables/{number}"], layer.weights[0].numpy())
