"""A layer that is created where Keras' own patterns create it: in `build`, inside name scopes, while shapes are computed."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat.tfrs import PartialTPUEmbedding

FEATURES = {"user": np.arange(10) % 7, "item": np.arange(10) % 5}
LABELS = np.linspace(-1, 1, 10, dtype=np.float32)[:, None]
ROWS, DIM = {"user": 7, "item": 5}, 3


def _initial(name: str) -> Any:
    return np.random.default_rng(len(name) + ROWS[name]).normal(size=(ROWS[name], DIM)).astype(np.float32)


class Rows:
    """An initializer that gives a table its rows, in Keras and in the layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.cast(_initial(self.name), dtype or tf.float32)


def _tables() -> dict[str, FeatureConfig]:
    return {name: FeatureConfig(TableConfig(ROWS[name], DIM, name, initializer=Rows(name))) for name in ROWS}


def _make(kind: str) -> Any:
    if kind == "keras":
        return {name: keras.layers.Embedding(ROWS[name], DIM, embeddings_initializer=Rows(name)) for name in ROWS}
    if kind == "partial":
        return PartialTPUEmbedding(_tables(), SGD(0.1), size_threshold=5)
    return TPUEmbedding(_tables(), SGD(0.1), track_rows=kind == "tracked")


class Tower(keras.layers.Layer):
    """Creates what looks rows up in `build`, as Keras' guides do."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def build(self, _: Any) -> None:
        self.lookups = _make(self.kind)

    def call(self, features: Mapping[str, Any]) -> Any:
        found = self.lookups if isinstance(self.lookups, dict) else self.lookups(features)
        rows = [found[name](features[name]) if self.kind == "keras" else found[name] for name in sorted(ROWS)]
        return tf.concat(rows, -1)


class Ranking(keras.Model):
    """Has a tower that is created in `build`, or whose rows are."""

    def __init__(self, kind: str, late: bool = True) -> None:
        super().__init__()
        self.kind, self.tower = kind, None if late else Tower(kind)
        self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=2))

    def build(self, _: Any) -> None:
        if self.tower is None:
            self.tower = Tower(self.kind)

    def call(self, features: Mapping[str, Any]) -> Any:
        assert self.tower is not None
        return self.head(self.tower(features))


def _fit(model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(FEATURES, LABELS, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.predict(FEATURES, verbose=0)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("kind", ["plain", "tracked", "partial"])
def test_a_layer_made_in_build_trains_as_kerass(kind: str, late: bool) -> None:
    np.testing.assert_allclose(_fit(Ranking(kind, late)), _fit(Ranking("keras", late)), rtol=0, atol=1e-5)


def test_a_functional_model_builds_the_layers_inside_its_layers() -> None:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ROWS}

    class Outer(keras.layers.Layer):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.tower = Tower(kind)

        def call(self, features: Any) -> Any:
            return self.tower(features)  # built while Keras computes the shapes of Outer

        def compute_output_shape(self, _: Any) -> Any:
            return (None, 2 * DIM)

    def model(kind: str) -> Any:
        head = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=2))
        return keras.Model(inputs, head(Outer(kind)(inputs)))

    np.testing.assert_allclose(_fit(model("plain")), _fit(model("keras")), rtol=0, atol=1e-5)


def test_an_own_loop_may_create_the_layer_in_its_first_step() -> None:
    model, optimizer = Ranking("plain"), keras.optimizers.SGD(0.1)

    @tf.function
    def step(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features) - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    features = {name: tf.constant(ids) for name, ids in FEATURES.items()}
    losses = [float(step(features, LABELS)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_a_checkpoint_of_a_layer_made_in_build_is_restored_before_and_after_the_build(tmp_path: Path) -> None:
    trained = Ranking("plain")
    truth = _fit(trained)
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "ckpt"))
    for is_built in (False, True):
        model = Ranking("plain")
        if is_built:
            model.predict(FEATURES, verbose=0)
        tf.train.Checkpoint(model=model).restore(path)
        np.testing.assert_array_equal(model.predict(FEATURES, verbose=0), truth)


def test_name_scopes_leave_no_trace_in_the_names_of_weights() -> None:
    with tf.name_scope("tower"), tf.name_scope("deep"):
        layer = TPUEmbedding(_tables(), "adam")
    outside = TPUEmbedding(_tables(), "adam")
    assert [weight.name for weight in layer.weights] == [weight.name for weight in outside.weights]
    assert sorted(layer.named_variables()) == sorted(outside.named_variables())


def test_many_large_tables_are_created_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """From 32 MB on, a table is made by a function of its own. TensorFlow warns at the fifth, in its log."""
    tables = [TableConfig(2_200_000, 4, f"t{index}") for index in range(7)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TPUEmbedding([FeatureConfig(table) for table in tables], "sgd")
    assert "retracing" not in caplog.text
