"""Checkpoints that tensorflow_recommenders wrote: exported, and restored into our layer, against what TFRS itself held."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

ROOT = Path(__file__).parents[1] / "golden" / "tfrs"
E = tf.tpu.experimental.embedding


def _truth(name: str) -> dict[str, Any]:
    truth: dict[str, Any] = json.loads((ROOT / name / "truth.json").read_text())
    return truth


def _padded(rows: list[list[Any]], padding: Any) -> npt.NDArray[Any]:
    width = max(len(row) for row in rows)
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows])


@pytest.mark.nightly
def test_an_export_looks_up_what_tfrs_looks_up(tmp_path: Path) -> None:
    folder, lookups = ROOT / "adam_lookups", _truth("adam_lookups")["lookups"]
    features, inputs = {}, {}
    for name, lookup in lookups.items():
        weighted = lookup["weights"] is not None
        features[name] = {"table": lookup["table"], "combiner": lookup["combiner"], "weighted": weighted}
        inputs[name] = _padded(lookup["ids"], -1)
        if weighted:
            inputs[f"{name}_weights"] = _padded(lookup["weights"], 0.0).astype(np.float32)
    report = export_saved_model(folder, tmp_path / "m", serving_config={"features": features})
    found = capi.predict(report.path, inputs)
    for name, lookup in lookups.items():
        np.testing.assert_allclose(
            found[name], np.load(folder / lookup["weighted_activations"]), atol=1e-6, err_msg=name
        )


def test_a_foreign_checkpoint_needs_a_serving_config(tmp_path: Path) -> None:
    with refused(ConfigError):
        export_saved_model(ROOT / "adam_lookups", tmp_path / "m")


def _features() -> dict[str, Any]:
    """As the goldens' generator configures them."""
    video = E.TableConfig(11, 4, name="video/table.v1", combiner="mean")
    user, unnamed = E.TableConfig(7, 3, name="user", combiner="sqrtn"), E.TableConfig(5, 2, combiner="sum")
    tables = {"fav": video, "friends": user, "tags": unnamed, "watched": video}
    return {name: E.FeatureConfig(table) for name, table in tables.items()}


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_a_tfrs_checkpoint_restores_into_the_layer_slots_included(tmp_path: Path) -> None:
    layer = TPUEmbedding(_features(), optimizer="adam")
    tf.train.Checkpoint(layer=layer).read(str(ROOT / "adam_lookups" / "ckpt")).assert_existing_objects_matched()
    again = tf.train.load_checkpoint(tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt")))
    for name, files in _truth("adam_lookups")["tables"].items():
        for key, file in {name: files["rows"], **{f"{name}/{s}": f for s, f in files["slots"].items()}}.items():
            escaped = key.replace(".", "..").replace("/", ".S")
            found = again.get_tensor(f"layer/_tpu_embedding/{escaped}/.ATTRIBUTES/VARIABLE_VALUE")
            np.testing.assert_array_equal(found, np.load(ROOT / "adam_lookups" / file), err_msg=key)
