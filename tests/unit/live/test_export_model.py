"""Exports of models in memory: they answer what the model answers, and leave it as it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.simulated import EXAMPLES
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.compat import keras_rs, tfrs
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.testing import simulated_tpu

TABLES = {
    "user": TableConfig(50, 4, "users", combiner="sum"),
    "item": TableConfig(30, 8, "items"),
    "tag": TableConfig(20, 4, "tags", optimizer="sgd"),
}
IDS = {name: np.random.default_rng(5).integers(0, table.vocabulary_size, 16) for name, table in TABLES.items()}


def _layer(optimizer: Any = "adam") -> TPUEmbedding:
    return TPUEmbedding({name: FeatureConfig(table) for name, table in TABLES.items()}, optimizer=optimizer, name="emb")


def _functional(layer: Any) -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in TABLES}
    x = keras.layers.Concatenate()(list(layer(inputs).values()))
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(x))


def _trained(model: Any, epochs: int = 1) -> Any:
    model.compile("adam", "mse")
    model.fit(IDS, np.linspace(0, 1, 16)[:, None], epochs=epochs, verbose=0)
    return model


def _answers(path: Path, inputs: Mapping[str, Any] = IDS) -> dict[str, Any]:
    call = tf.saved_model.load(str(path)).signatures["serving_default"]
    return {name: rows.numpy() for name, rows in call(**{k: tf.constant(v) for k, v in inputs.items()}).items()}


def test_a_layer_answers_lookups(tmp_path: Path) -> None:
    layer = _layer()
    _trained(_functional(layer))
    config = {"features": {"liked": {"table": "items", "combiner": "sum"}, "who": {"table": "users", "input": "id"}}}
    report = export_saved_model(layer, tmp_path, serving_config=config)
    rows = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    found = _answers(report.path, {"liked": np.array([[3, 4], [29, -1]]), "who": np.array([49, 0])})
    np.testing.assert_allclose(
        found["liked"], [rows["items"][3] + rows["items"][4], rows["items"][29]], rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(found["who"], rows["users"][[49, 0]])


class Tower(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = _layer(), keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return {"out": self.dense(self.embedding(inputs)["user"])}


def test_a_subclassed_model(tmp_path: Path) -> None:
    model = Tower()
    expected = model({name: tf.constant(ids) for name, ids in IDS.items()})["out"].numpy()
    specs = {name: tf.TensorSpec([None], tf.int64) for name in TABLES}
    report = export_saved_model((model, specs), tmp_path)
    np.testing.assert_allclose(_answers(report.path)["out"], expected, rtol=1e-6, atol=1e-6)
    with refused(ConfigError):
        export_saved_model(model, tmp_path)


class _Private(Tower):
    pass


def test_a_name_that_no_variable_may_have(tmp_path: Path) -> None:
    model = _Private()
    model({name: tf.constant(ids) for name, ids in IDS.items()})
    specs = {name: tf.TensorSpec([None], tf.int64) for name in TABLES}
    with refused(ConfigError):
        export_saved_model((model, specs), tmp_path)


@pytest.mark.parametrize("kind", ["keras_rs", "tfrs"])
def test_models_of_the_other_libraries_names(tmp_path: Path, kind: str) -> None:
    if kind == "tfrs":
        model = _functional(
            tfrs.PartialTPUEmbedding(
                {n: FeatureConfig(t) for n, t in TABLES.items()}, optimizer="adam", size_threshold=25
            )
        )
    else:
        table = keras_rs.TableConfig("users", 50, 4, optimizer="adam")
        feature = keras_rs.FeatureConfig("user", table, input_shape=(16, 1), output_shape=(16, 4))
        inputs = {"user": keras.Input((1,), dtype="int64", name="user")}
        rows = keras_rs.DistributedEmbedding({"user": feature})(inputs)["user"]
        model = keras.Model(inputs, keras.layers.Dense(1, name="score")(rows))
    ids = {n: IDS[n] if kind == "tfrs" else IDS[n][:, None] for n in model.input}
    report = export_saved_model(model, tmp_path)
    expected = model.predict(ids, verbose=0, batch_size=16)
    np.testing.assert_allclose(_answers(report.path, ids)["score"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("feature", ["V2", "UNSUPPORTED"])
@pytest.mark.sampled(1)
def test_tables_on_simulated_tpus(tmp_path: Path, feature: str) -> None:
    with simulated_tpu(feature, replicas=2) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(
                {n: FeatureConfig(t, output_shape=(EXAMPLES,)) for n, t in TABLES.items()}, optimizer="adagrad"
            )
        values = {t.name: np.random.rand(t.vocabulary_size, t.dim).astype(np.float32) for t in TABLES.values()}
        for name, rows in values.items():
            layer.assign_rows(name, 0, rows)
        report = export_saved_model(layer, tmp_path, serving_config={"features": {n: {"table": n} for n in values}})
    for name, rows in values.items():
        every = {n: np.arange(len(r))[:, None] if n == name else np.array([[0]]) for n, r in values.items()}
        np.testing.assert_array_equal(_answers(report.path, every)[name], rows)


def test_mirrored_tables(tmp_path: Path) -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = _functional(_layer())
    report = export_saved_model(model, tmp_path)
    np.testing.assert_allclose(_answers(report.path)["score"], model(dict(IDS)), rtol=1e-6, atol=1e-6)


# ---- refusals: nothing is published


@pytest.mark.nightly
def test_training_meanwhile_is_noticed(tmp_path: Path) -> None:
    layer = _layer()
    model = _trained(_functional(layer))
    with refused(CheckpointMismatchError):
        export_saved_model(model, tmp_path, on_progress=lambda *_: _trained(model) and None)
    assert list(tmp_path.iterdir()) == []


def test_two_tables_of_one_name(tmp_path: Path) -> None:
    layers = [TPUEmbedding(FeatureConfig(TableConfig(5, 2, "same")), optimizer="sgd", name=name) for name in "ab"]
    inputs = [keras.Input((), dtype="int64", name=name) for name in "xy"]
    model = keras.Model(inputs, keras.layers.Add()([layer(x) for layer, x in zip(layers, inputs, strict=True)]))
    with refused(ConfigError, match="layers 'a'"):
        export_saved_model(model, tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": keras.Sequential([keras.layers.Dense(1)], name="plain")},
        {"model": None},
        {"storage": "float8"},
        {"engine": "ray"},
        {"workers": 0},
        {"nonsense": 1},
        {"tables": ["users"]},
        {"serving_config": {"features": {"userz": {"table": "users"}}}},
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    given = {"model": _functional(_layer()), **arguments}
    with refused(ConfigError):
        export_saved_model(given.pop("model"), tmp_path / "models", **given)
    assert not any(path.name.isdecimal() for path in tmp_path.rglob("*"))


def test_in_a_graph_it_is_refused(tmp_path: Path) -> None:
    layer = _layer()
    with refused(ConfigError, match=r"tf\.function"):
        tf.function(lambda: export_saved_model(layer, tmp_path), autograph=False)()
