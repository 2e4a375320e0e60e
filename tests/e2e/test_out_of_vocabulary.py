"""Ids outside of their tables: no slot moves, no negative id is taken for padding, and a serving_config may say otherwise."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError

Array = np.ndarray[Any, Any]
DIM = 3


def fill(embedding: Any) -> dict[str, Array]:
    """Give the tables rows, and return them."""
    rows = {}
    for config, variable in embedding.embedding_tables.items():
        rows[config.name] = np.random.default_rng(len(config.name)).normal(size=variable.shape).astype(np.float32)
        variable.assign(rows[config.name])
    return rows


def test_zeros_touch_no_row_and_no_slot() -> None:
    table = TableConfig(5, 2, "t", combiner="mean", out_of_vocabulary="zeros")
    embedding = TPUEmbedding({"a": FeatureConfig(table), "b": FeatureConfig(table)}, "adam")
    before = {name: variable.numpy() for name, variable in embedding.named_variables().items()}
    features = {"a": tf.constant([5, -1, 2**40]), "b": tf.ragged.constant([[7, 9], [-5], []], tf.int64)}
    with tf.GradientTape() as tape:
        found = embedding(features)
        loss = tf.reduce_sum(found["a"]) + tf.reduce_sum(found["b"])
    embedding.apply_gradients(tape.gradient(loss, embedding.trainable_variables))
    assert not np.any(found["a"])
    assert not np.any(found["b"])
    assert int(embedding.updates) == 1
    for name, variable in embedding.named_variables().items():
        np.testing.assert_array_equal(variable, before[name], err_msg=name)


@pytest.mark.parametrize("policy", ["error", "zeros", 4])
def test_an_unchecked_negative_id_of_a_sequence_is_no_padding(policy: str | int) -> None:
    """It was row 0."""
    table = TableConfig(5, DIM, "t")
    config = FeatureConfig(table, max_sequence_length=2, validate_weights_and_indices=False, out_of_vocabulary=policy)
    embedding = TPUEmbedding({"x": config}, "sgd")
    rows = fill(embedding)["t"]
    features = {"x": tf.ragged.constant([[1, -1, 7], [3]], tf.int64)}
    for call in (embedding, tf.function(embedding)):
        if policy == "error":
            with pytest.raises(tf.errors.InvalidArgumentError, match="feature x: id -1 of row 0 is not in table t"):
                call(features)
        else:
            instead = np.zeros(DIM) if policy == "zeros" else rows[4]
            np.testing.assert_array_equal(call(features)["x"], [[rows[1], instead], [rows[3], np.zeros(DIM)]])


def test_a_serving_config_overrides_lookups_and_is_refused_for_a_model(tmp_path: Path) -> None:
    def build() -> Any:
        ids = keras.Input((), dtype="int64", name="dense1_zeros")
        config = {"dense1_zeros": FeatureConfig(TableConfig(7, DIM, "users_mean"), out_of_vocabulary="zeros")}
        return keras.Model(ids, TPUEmbedding(config, "sgd")({"dense1_zeros": ids}))

    made = build()
    rows = fill(next(one for one in made.layers if isinstance(one, TPUEmbedding)))
    checkpoint = tf.train.Checkpoint(model=made).write(str(tmp_path / "ckpt"))
    feature = {"table": "users_mean", "input": "id"}
    config = {"features": {"dense1_zeros": feature | {"out_of_vocabulary": 4}, "new": feature}}
    path = export_saved_model(checkpoint, tmp_path / "overridden", serving_config=config).path
    call = tf.saved_model.load(str(path)).signatures["serving_default"]
    found = call(dense1_zeros=tf.constant([99, 1], tf.int64), new=tf.constant([0, 1], tf.int64))
    np.testing.assert_array_equal(found["dense1_zeros"], rows["users_mean"][[4, 1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature new: id 7 of row 1 is not in table users_mean"):
        call(dense1_zeros=tf.constant([99, 1], tf.int64), new=tf.constant([0, 7], tf.int64))
    stated = {"features": {"dense1_zeros": feature | {"out_of_vocabulary": "error"}}}
    with refused(ConfigError):
        export_saved_model(checkpoint, tmp_path / "refused", model=build, serving_config=stated)
