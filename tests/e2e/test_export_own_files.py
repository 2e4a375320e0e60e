"""Whatever file the layer was saved in, it carries the layer's config: an export needs no serving_config."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

IDS = np.array([[1, 2, 1], [3, -1, -1]])


@pytest.fixture(scope="module")
def model() -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in "ab"}
    features = {
        "a": FeatureConfig(TableConfig(9, 4, "t/v.1", combiner="sum")),
        "b": FeatureConfig(TableConfig(5, 2, "u")),
    }
    rows = TPUEmbedding(features, optimizer="adam", name="embedding")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([rows["a"], rows["b"]])))
    model.compile("sgd", "mse")
    model.fit({name: np.arange(4) for name in "ab"}, np.ones(4), verbose=0)
    return model


def _save(model: Any, folder: Path, ending: str) -> str:
    if ending == "ckpt":
        return str(tf.train.Checkpoint(model=model).write(str(folder / "ckpt")))
    path = folder / f"m.{ending}"
    if ending == "keras":
        model.save(path)
    else:
        model.save_weights(path, **({"max_shard_size": 4e-7} if ending == "weights.json" else {}))
    return str(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["ckpt", "weights.h5", "weights.json", "keras"])
def test_an_export_needs_no_serving_config(model: Any, ending: str, tmp_path: Path) -> None:
    report = export_saved_model(_save(model, tmp_path, ending), tmp_path / "served")
    found = capi.predict(report.path, {"a": IDS, "b": IDS})
    tables = {table.name: rows.numpy() for table, rows in model.get_layer("embedding").embedding_tables.items()}
    first, second = tables["t/v.1"], tables["u"]
    np.testing.assert_allclose(found["a"], [2 * first[1] + first[2], first[3]], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["b"], [(2 * second[1] + second[2]) / 3, second[3]], rtol=1e-6, atol=1e-7)
