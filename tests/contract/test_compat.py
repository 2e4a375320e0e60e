"""The names of TensorFlow Recommenders and of keras-rs, against what these libraries wrote and against numpy."""

import importlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden import generate_keras_rs_training as keras_rs_golden
from tests.support.contract_refusals import assert_each_is_refused
from tests.support.goldens import read_golden
from tpuembed import TPUEmbedding
from tpuembed.compat import keras_rs, tfrs
from tpuembed.errors import ConfigError, TpuEmbedError

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding

MODULES = {
    "tpuembed.compat.tfrs.layers.embedding": ["TPUEmbedding"],
    "tpuembed.compat.tfrs.layers.embedding.tpu_embedding_layer": ["TPUEmbedding", "translate_keras_optimizer"],
    "tpuembed.compat.tfrs.experimental.layers.embedding": ["PartialTPUEmbedding", "partial_tpu_embedding"],
    "tpuembed.compat.tfrs.experimental.layers.embedding.partial_tpu_embedding": ["PartialTPUEmbedding"],
    "tpuembed.compat.keras_rs.layers": ["DistributedEmbedding", "FeatureConfig", "TableConfig"],
}


def test_imports_need_one_change() -> None:
    for module, names in MODULES.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    assert tfrs.layers.embedding.TPUEmbedding is TPUEmbedding
    assert tfrs.tpu_embedding_layer is tfrs.layers.embedding.tpu_embedding_layer
    assert tfrs.tpu_embedding_layer.translate_keras_optimizer is tfrs.translate_keras_optimizer
    assert tfrs.experimental.layers.embedding.PartialTPUEmbedding is tfrs.PartialTPUEmbedding
    assert keras_rs.layers.DistributedEmbedding is keras_rs.DistributedEmbedding


# ---- TensorFlow Recommenders


class PartialModel(keras.Model):
    """The model that wrote tests/golden/tfrs/partial_model, its imports changed."""

    def __init__(self) -> None:
        super().__init__()
        country, kind = E.TableConfig(5, 2, name="country"), E.TableConfig(7, 3, name="kind")
        video, user = E.TableConfig(11, 4, name="video"), E.TableConfig(9, 3, name="user", combiner="sum")
        tables = {"born": country, "fav": video, "kind": kind, "lives": country, "user": user}
        features = {name: E.FeatureConfig(table) for name, table in tables.items()}
        self.embedding_layer = tfrs.PartialTPUEmbedding(features, E.Adagrad(0.1), size_threshold=7)
        self.logits = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.logits(tf.concat(tf.nest.flatten(self.embedding_layer(ids)), axis=1))


def test_a_partial_model_scores_what_tensorflow_recommenders_did() -> None:
    golden, model = read_golden("tfrs/partial_model"), PartialModel()
    truth = json.loads((golden.path.parent / "truth.json").read_text())
    ids = {name: tf.constant(values) for name, values in truth["ids"].items()}
    model(ids)
    tf.train.Checkpoint(model=model).restore(str(golden.path)).expect_partial()
    saved = tf.train.load_checkpoint(str(golden.path))
    for variable in model.logits.variables:  # Keras 2 named them otherwise
        variable.assign(saved.get_tensor(f"model/logits/{variable.name}/.ATTRIBUTES/VARIABLE_VALUE"))
    for name, rows in model.embedding_layer(ids).items():
        np.testing.assert_allclose(rows, np.load(golden.path.parent / truth["activations"][name]), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model(ids), truth["scores"], rtol=1e-6, atol=1e-7)


def test_small_tables_are_trained_by_the_models_optimizer() -> None:
    """Tables of more rows than the threshold have the optimizer of the layer."""
    large, small = E.TableConfig(20, 2, name="large"), E.TableConfig(5, 2, name="small")
    features = {"a": E.FeatureConfig(large), "b": E.FeatureConfig(small)}
    layer = tfrs.PartialTPUEmbedding(features, E.SGD(0.5), size_threshold=5)
    before = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    ids, optimizer = {"a": np.array([1, 1]), "b": np.array([4, 4])}, keras.optimizers.SGD(0.125)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(rows) for rows in layer(ids).values()])
    gradients = tape.gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    for table, row, rate in ((large, 1, 0.5), (small, 4, 0.125)):
        before[table.name][row] -= 2 * rate
        np.testing.assert_allclose(layer.embedding_tables[table], before[table.name], atol=1e-6)
    assert {name: one.input_dim for name, one in layer.keras_embedding_layers.items()} == {"b": 5}


def test_keras_optimizers_are_translated_to_tensorflows() -> None:
    cases: list[tuple[Any, Any, dict[str, float]]] = [
        (keras.optimizers.SGD(0.2), E.SGD, {}),
        (keras.optimizers.Adagrad(0.2, 0.3), E.Adagrad, {"initial_accumulator_value": 0.3}),
        (keras.optimizers.Adam(0.2, beta_1=0.5, epsilon=1e-3), E.Adam, {"beta_1": 0.5, "epsilon": 1e-3}),
        (keras.optimizers.Ftrl(0.2, beta=0.25), E.FTRL, {"beta": 0.25}),
    ]
    for optimizer, theirs, fields in cases:
        translated = tfrs.translate_keras_optimizer(optimizer)
        assert type(translated) is theirs
        assert {name: getattr(translated, name) for name in fields} == pytest.approx(fields)
        optimizer.learning_rate = 0.1
        assert float(tf.convert_to_tensor(translated.learning_rate())) == pytest.approx(0.1)
    assert_each_is_refused(
        ConfigError,
        [
            (lambda: tfrs.translate_keras_optimizer(keras.optimizers.RMSprop()), "RMSprop"),
            (lambda: tfrs.translate_keras_optimizer(keras.optimizers.SGD(momentum=0.9)), "momentum"),
            (lambda: tfrs.translate_keras_optimizer(E.SGD(0.1)), "SGD"),
        ],
    )


# ---- keras-rs


@pytest.mark.parametrize("name", keras_rs_golden.OPTIMIZERS)
def test_a_model_of_keras_rs_trains_and_predicts_the_same(name: str) -> None:
    """keras-rs' own layer trained the golden, with weights and three combiners, and its tables with the model's optimizer."""
    model = keras_rs_golden.Model(keras_rs, keras_rs_golden.OPTIMIZERS[name])
    found, expected = keras_rs_golden.trained(model, name), np.load(keras_rs_golden.FOLDER / f"{name}.npz")
    begun = keras_rs_golden.start()
    np.testing.assert_allclose(found["before"], expected["before"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["predictions"], expected["predictions"], rtol=1e-4, atol=1e-5)
    for table, rows in model.embedding_layer.get_embedding_tables().items():
        assert np.abs(expected[table] - begun[table]).max() > 0.1
        np.testing.assert_allclose(rows, expected[table], rtol=0, atol=1e-5, err_msg=table)


def keras_rs_layer(**options: Any) -> Any:
    table = keras_rs.TableConfig("t", 10, 2, **options)
    return keras_rs.DistributedEmbedding({"f": keras_rs.FeatureConfig("f", table, (2, 3), (2, 2))})


def test_tables_of_keras_rs_are_set_and_read_by_name(tmp_path: Path) -> None:
    rows = np.random.default_rng(7).normal(size=(10, 2)).astype(np.float32)
    layer, ids = keras_rs_layer(), np.array([[1, 2, 2], [9, 0, 3]])
    layer.set_embedding_tables({"t": rows})
    np.testing.assert_array_equal(layer.get_embedding_tables()["t"], rows)
    np.testing.assert_allclose(layer({"f": ids})["f"], rows[ids].mean(1), rtol=1e-6)
    again = keras_rs.DistributedEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
    prefix = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(layer=again).read(prefix).assert_existing_objects_matched()
    np.testing.assert_array_equal(again.get_embedding_tables()["t"], rows)


def test_what_keras_rs_layers_cannot_do_is_refused_by_name() -> None:
    layer = keras_rs_layer()
    assert_each_is_refused(
        ConfigError,
        [
            (lambda: layer.set_embedding_tables({"t": np.zeros((3, 2), np.float32)}), "'t'"),
            (lambda: layer({"f": np.zeros((2, 4), int)}), "'f'"),
        ],
    )
    with pytest.raises(TpuEmbedError, match="'u'") as caught:
        layer.set_embedding_tables({"u": np.zeros((10, 2), np.float32)})
    assert isinstance(caught.value, KeyError)
