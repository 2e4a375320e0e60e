"""Checkpoints, weight files, configs: what one layer saved, another one has."""

import contextlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError


def _live(kind: str) -> Any:
    rate = tf.Variable(0.25) if kind == "variable" else keras.Variable(0.25)
    return keras.optimizers.Adagrad(0.25) if kind == "optimizer" else SGD(learning_rate=lambda: rate)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "strategy", "saved"),
    [
        ("optimizer", "none", "anywhere"),
        ("variable", "none", "anywhere"),
        ("Keras variable", "none", "anywhere"),
        ("sgd", "OneDeviceStrategy", "outside of its scope"),
        ("optimizer", "OneDeviceStrategy", "outside of its scope"),
        ("sgd", "MirroredStrategy", "outside of its scope"),
        ("optimizer", "MirroredStrategy", "outside of its scope"),
        ("optimizer", "MirroredStrategy", "inside of its scope"),
    ],
)
def test_a_model_with_a_live_rate_is_saved_whatever_strategy_trained_it(
    tmp_path: Path, optimizer: str, strategy: str, saved: str
) -> None:
    strategies = {
        "none": tf.distribute.get_strategy,
        "OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "MirroredStrategy": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    }
    scope = strategies[strategy]()
    with scope.scope():
        x = keras.Input((), dtype="int64", name="x")
        table = FeatureConfig(TableConfig(7, 3, "t"))
        rows = TPUEmbedding(table, optimizer=optimizer if optimizer == "sgd" else _live(optimizer))(x)
        model = keras.Model(x, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    model.fit(np.arange(7), np.ones(7), verbose=0)
    truth = model.predict(np.arange(7), verbose=0)
    with scope.scope() if saved.startswith("inside") else contextlib.nullcontext():
        model.export(tmp_path / "exported", verbose=False)
        tf.saved_model.save(model, str(tmp_path / "saved"))
    (found,) = capi.predict(tmp_path / "exported", {"x": np.arange(7)}).values()
    np.testing.assert_allclose(found, truth, atol=1e-6)
    tf.saved_model.load(str(tmp_path / "saved"))


def test_a_saved_model_refuses_to_train_its_tables(tmp_path: Path) -> None:
    """It updated them by the rate of the moment, twice where two gradients were taken, and apart in every replica."""
    module = tf.Module()
    module.layer = TPUEmbedding(FeatureConfig(TableConfig(7, 3, "t")), optimizer="sgd")
    module.look_up = tf.function(module.layer, input_signature=[tf.TensorSpec([None], tf.int64)])
    ids = tf.constant([1, 2], tf.int64)
    truth = module.look_up(ids)
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    with tf.GradientTape() as tape:
        found = loaded.look_up(ids)
    np.testing.assert_array_equal(found, truth)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a SavedModel cannot train its tables"):
        tape.gradient(found, tape.watched_variables())
    np.testing.assert_array_equal(loaded.look_up(ids), truth)


@pytest.mark.parametrize(
    "values",
    [np.arange(8.0), np.arange(8).reshape(4, 2), np.arange(8, dtype=np.float32).reshape(2, 4), np.float32(3), 2.5],
)
def test_a_model_whose_tables_begin_with_given_values_is_cloned(tmp_path: Path, values: Any) -> None:
    """TensorFlow lays the values out in the table, whatever their shape."""
    table = tf.tpu.experimental.embedding.TableConfig(4, 2, initializer=tf.constant_initializer(values), name="t")
    x = keras.Input((), dtype="int64")
    model = keras.Model(x, TPUEmbedding(tf.tpu.experimental.embedding.FeatureConfig(table), optimizer="sgd")(x))
    truth = tf.constant_initializer(values)((4, 2)).numpy()
    model.save(tmp_path / "m.keras")
    for made in (model, keras.models.clone_model(model), keras.models.load_model(tmp_path / "m.keras")):
        np.testing.assert_array_equal(made(np.arange(4)), truth)
    json.dumps(model.layers[-1].get_config())


def test_an_initializer_that_is_only_code_cannot_be_saved_in_a_config() -> None:
    table = TableConfig(3, 2, "t", initializer=lambda shape, dtype: tf.ones(shape, dtype))
    layer = TPUEmbedding({"x": FeatureConfig(table)}, optimizer="sgd")
    np.testing.assert_array_equal(layer.embedding_tables[table].numpy(), np.ones((3, 2)))
    with refused(ConfigError, match="table 't': initializer"):
        layer.get_config()
