"""Exports of Keras' weight files that carry their features: no serving_config, and lookups as the rows in the file say."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed

GOLDEN = Path(__file__).parents[1] / "golden" / "keras_rs" / "keras_adam"
IDS = np.array([[1, 2, -1], [0, 0, 3]])


@pytest.fixture
def lookup(tmp_path: Path) -> Any:
    def export(checkpoint: Path) -> Any:
        report = tpuembed.export_saved_model(str(checkpoint), str(tmp_path / "models"), workers=1)
        return tf.saved_model.load(report.path).signatures["serving_default"]

    return export


@pytest.mark.nightly
def test_keras_rs(lookup: Any) -> None:
    serve = lookup(GOLDEN / "model.keras")
    names = serve.structured_input_signature[1]
    found = serve(**dict.fromkeys(names, tf.constant(IDS)))
    items, tags, users, videos = (np.load(GOLDEN / f"table{number}.npy") for number in range(4))  # by name
    expected = {
        "watched": [(videos[1] + videos[2]) / 2, (2 * videos[0] + videos[3]) / 3],
        "fav": [(videos[1] + videos[2]) / 2, (2 * videos[0] + videos[3]) / 3],
        "who/user": [(users[1] + users[2]) / np.sqrt(2), (2 * users[0] + users[3]) / np.sqrt(3)],
        "who/what/item": [items[1] + items[2], 2 * items[0] + items[3]],
        "who/what/tag": [tags[1] + tags[2], 2 * tags[0] + tags[3]],
    }
    assert set(found) == set(expected)
    for name, activations in expected.items():
        np.testing.assert_allclose(found[name], activations, rtol=1e-6, err_msg=name)


def test_own_layer(lookup: Any, tmp_path: Path) -> None:
    """`.weights.h5` alone: the layer's config lies in it."""
    table = tpuembed.TableConfig(9, 4, "items/v.1", combiner="sum")
    layer = tpuembed.TPUEmbedding({"a": tpuembed.FeatureConfig(table)}, optimizer="adagrad")
    ids = keras.Input((), dtype="int64", name="a")
    model = keras.Model(ids, layer({"a": ids})["a"])
    model.save_weights(tmp_path / "model.weights.h5")
    rows = layer.embedding_tables[table].numpy()
    found = lookup(tmp_path / "model.weights.h5")(a=tf.constant(IDS))["a"]
    np.testing.assert_allclose(found, [rows[1] + rows[2], 2 * rows[0] + rows[3]], rtol=1e-6, atol=1e-7)
