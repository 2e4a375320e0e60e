"""`track_rows=True`: which rows an overlay of a checkpoint writes, and that its answers are those of the live tables."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model


def make() -> TPUEmbedding:
    tables = {"user": TableConfig(3000, 4, "users"), "item": TableConfig(500, 4, "items")}
    return TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, "adagrad", track_rows=True)


def step(layer: TPUEmbedding, users: list[int], items: list[int]) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        rows = layer({"user": tf.constant(users), "item": tf.constant(items)})
        loss = tf.add_n([tf.reduce_sum((each - 1.0) ** 2) for each in rows.values()])
    gradients = tape.gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))


def assert_answers(path: Path, layer: TPUEmbedding) -> None:
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    live = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    ids = {"user": np.arange(3000), "item": np.arange(3000) % 500}
    found = served(**{name: tf.constant(values[:, None], tf.int64) for name, values in ids.items()})
    np.testing.assert_allclose(found["user"], live["users"], rtol=1e-6)
    np.testing.assert_allclose(found["item"], live["items"][ids["item"]], rtol=1e-6)


def test_an_overlay_has_the_rows_that_training_touched(tmp_path: Path) -> None:
    """Also after the program ended: the stamps of rows are in the checkpoint, and come back with it."""
    layer: Any = make()
    step(layer, [1, 2, 3], [7])
    checkpoint = tf.train.Checkpoint(layer=layer)
    full = export_saved_model(checkpoint.write(str(tmp_path / "ckpt-1")), tmp_path / "m", workers=1)
    assert (full.base, full.rows_changed) == (None, None)
    assert full.bytes_written == 4 * 4 * (3000 + 500)

    resumed = make()
    tf.train.Checkpoint(layer=resumed).read(str(tmp_path / "ckpt-1")).assert_existing_objects_matched()
    step(resumed, [2, 2999], [7, 7])
    step(resumed, [2, 10], [499])
    path = tf.train.Checkpoint(layer=resumed).write(str(tmp_path / "ckpt-2"))
    overlay = export_saved_model(path, tmp_path / "m", base="latest", workers=1)
    assert (overlay.version, overlay.base) == (2, 1)
    assert overlay.rows_changed == len({2, 2999, 10}) + len({7, 499})
    assert_answers(overlay.path, resumed)
    assert_answers(full.path, layer)
