"""Whole models in fit: the tables and the dense weights, against the same models with keras.layers.Embedding."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError

Array = np.ndarray[Any, Any]

ROWS, DIM, BATCH, STEPS = 40, 4, 8, 5
_RANDOM = np.random.default_rng(2)
USERS = np.concatenate([_RANDOM.permutation(ROWS)[:BATCH] for _ in range(STEPS)])  # no row twice in a batch
ITEMS = np.concatenate([_RANDOM.permutation(ROWS)[:BATCH] for _ in range(STEPS)])
LABELS = _RANDOM.normal(size=(STEPS * BATCH, 1)).astype(np.float32)
BEGIN: dict[str, Array] = {
    "users": _RANDOM.normal(size=(ROWS, DIM)).astype(np.float32),
    "items": _RANDOM.normal(size=(ROWS, DIM)).astype(np.float32),
    "kernel": _RANDOM.normal(size=(2 * DIM, 1)).astype(np.float32),
}


def begin(name: str) -> Callable[..., Array]:
    return lambda *_, **__: BEGIN[name]


def scored(rows: list[Any]) -> Any:
    kernel = keras.initializers.Constant(BEGIN["kernel"])
    return keras.layers.Dense(1, kernel_initializer=kernel, name="score")(keras.layers.Concatenate()(rows))


def inputs() -> dict[str, Any]:
    return {name: keras.Input((), dtype="int64", name=name) for name in ("users", "items")}


def our_model(optimizer: Any, **options: Any) -> tuple[Any, TPUEmbedding]:
    features = {
        name: FeatureConfig(TableConfig(ROWS, DIM, name, initializer=begin(name))) for name in ("users", "items")
    }
    layer, ids = TPUEmbedding(features, optimizer, name="embedding", **options), inputs()
    return keras.Model(ids, scored(list(layer(ids).values()))), layer


def keras_model() -> Any:
    ids = inputs()
    rows = [
        keras.layers.Embedding(ROWS, DIM, keras.initializers.Constant(BEGIN[name]), name=f"of_{name}")(ids[name])
        for name in ("users", "items")
    ]
    return keras.Model(ids, scored(rows))


def fit(model: Any, optimizer: Any, **options: Any) -> list[float]:
    model.compile(optimizer, "mse", **options)
    data = {"users": USERS, "items": ITEMS}
    losses: list[float] = model.fit(data, LABELS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses


def tables_of(layer: TPUEmbedding) -> dict[str, Array]:
    return {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}


def assert_trained_as(truth: Any, model: Any, layer: TPUEmbedding) -> None:
    for name, rows in tables_of(layer).items():
        expected = np.asarray(truth.get_layer(f"of_{name}").embeddings)
        assert np.abs(expected - BEGIN[name]).max() > 1e-3
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for mine, theirs in zip(model.get_layer("score").weights, truth.get_layer("score").weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.2),
}


@functools.cache
def trained_keras_model(name: str) -> tuple[Any, list[float]]:
    """The model of Keras alone, and its losses. It is the same for all ways to compile."""
    truth = keras_model()
    return truth, fit(truth, OPTIMIZERS[name]())


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {}), ("sgd", {"run_eagerly": True}), ("adagrad", {}), ("adagrad", {"steps_per_execution": 3})],
    ids=["sgd", "sgd, eager", "adagrad", "adagrad, 3 steps at once"],
)
def test_a_model_is_trained_as_with_keras_embeddings(name: str, options: dict[str, Any]) -> None:
    truth, losses = trained_keras_model(name)
    model, layer = our_model(OPTIMIZERS[name]())
    np.testing.assert_allclose(fit(model, OPTIMIZERS[name](), **options), losses, rtol=1e-4)
    assert_trained_as(truth, model, layer)


def test_without_an_optimizer_tables_are_ordinary_variables() -> None:
    truth = keras_model()
    model, layer = our_model(None)
    assert [tuple(weight.shape) for weight in layer.trainable_variables] == [(ROWS, DIM)] * 2
    assert len(layer.weights) == 2  # no slots
    np.testing.assert_allclose(fit(model, "adam"), fit(truth, "adam"), rtol=1e-4)
    assert_trained_as(truth, model, layer)


def test_the_optimizer_of_compile_trains_the_dense_part_alone() -> None:
    """A table whose optimizer stands still keeps its rows, whatever trains the rest of the model."""
    model, layer = our_model(SGD(0.0))
    kernel = model.get_layer("score").kernel.numpy()
    fit(model, keras.optimizers.Adam(0.1))
    for name, rows in tables_of(layer).items():
        np.testing.assert_array_equal(rows, BEGIN[name])
    assert np.abs(model.get_layer("score").kernel.numpy() - kernel).max() > 0.01


def test_a_subclassed_model_learns() -> None:
    class TwoTowers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            features = {name: FeatureConfig(TableConfig(12, 8, name)) for name in ("query", "candidate")}
            self.towers = TPUEmbedding(features, keras.optimizers.Adagrad(0.5))

        def call(self, ids: Any) -> Any:
            rows = self.towers(ids)
            return tf.matmul(rows["query"], rows["candidate"], transpose_b=True)

    model = TwoTowers()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pairs = {"query": np.arange(8), "candidate": np.arange(8)[::-1].copy()}
    model.fit(tf.data.Dataset.from_tensors((pairs, np.arange(8))).repeat(40), shuffle=False, verbose=0)
    scores = model.predict(pairs, batch_size=8, verbose=0)
    np.testing.assert_array_equal(scores.argmax(1), np.arange(8))


def test_evaluate_and_predict_move_nothing() -> None:
    model, layer = our_model("adam")
    model.compile("sgd", "mse")
    data = {"users": USERS, "items": ITEMS}
    model.evaluate(data, LABELS, verbose=0)
    model.predict(data, verbose=0)
    model({name: ids[:3] for name, ids in data.items()}, training=True)
    for name, rows in tables_of(layer).items():
        np.testing.assert_array_equal(rows, BEGIN[name])


def test_a_frozen_layer_does_not_train() -> None:
    model, layer = our_model("adagrad")
    layer.trainable = False
    assert layer.trainable_variables == []
    kernel = model.get_layer("score").kernel.numpy()
    fit(model, "sgd")
    for name, rows in tables_of(layer).items():
        np.testing.assert_array_equal(rows, BEGIN[name])
    assert (model.get_layer("score").kernel.numpy() != kernel).any()
    layer.trainable = True
    fit(model, "sgd")
    for name, rows in tables_of(layer).items():
        assert (rows != BEGIN[name]).any(1)[USERS if name == "users" else ITEMS].all()


def test_a_step_that_a_loss_scale_skips_changes_no_row() -> None:
    """Under mixed_float16 the first loss is scaled beyond float16. The second scale is small enough."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, layer = our_model("adagrad")
        for scale, moves in ((2.0**20, False), (2.0, True)):
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=scale)
            model.compile(optimizer, "mse")
            model.train_on_batch({"users": USERS[:8], "items": ITEMS[:8]}, LABELS[:8])
            for name, rows in tables_of(layer).items():
                assert (rows != BEGIN[name]).any() == moves, (scale, name)
    finally:
        keras.config.set_dtype_policy("float32")


def test_mixed_bfloat16_keeps_tables_in_float32() -> None:
    features = {"x": FeatureConfig(TableConfig(ROWS, DIM, "users", initializer=begin("users")))}
    layer = TPUEmbedding(features, "sgd", dtype="mixed_bfloat16")
    found = layer({"x": np.arange(ROWS)})["x"]
    assert found.dtype == tf.bfloat16
    np.testing.assert_array_equal(found, tf.cast(BEGIN["users"], tf.bfloat16))
    np.testing.assert_array_equal(next(iter(layer.embedding_tables.values())), BEGIN["users"])


# ---- tables of one name


class TwoLayers(keras.Model):
    """Two layers, each in a block or a model of its own if `inside` makes one, of tables of these names."""

    def __init__(self, names: tuple[str, str], inside: Any = None) -> None:
        super().__init__(name="two")
        for attribute, table in zip(("first", "second"), names, strict=True):
            layer = TPUEmbedding({"u": FeatureConfig(TableConfig(9, 2, name=table))}, "sgd", name=f"rows_{attribute}")
            setattr(self, attribute, layer if inside is None else inside(layer))

    def build(self, _: Any) -> None:
        """There is nothing to build. Without this method, Keras first tries a call, and warns of its error."""

    def call(self, inputs: Any) -> Any:
        return sum(part({"u": inputs["u"]})["u"] for part in (self.first, self.second))


class Holds:
    """What looks up in the layer that it is given."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rows = layer
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.rows(inputs)


class Block(Holds, keras.layers.Layer):
    pass


class Tower(Holds, keras.Model):
    pass


@pytest.mark.parametrize("inside", [None, Block])
def test_two_layers_with_a_table_of_one_name_are_refused_before_the_first_step(inside: Any) -> None:
    """No export could tell them apart after it."""
    model, ids = TwoLayers(("users", "users"), inside), {"u": np.arange(9)}
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"'rows_first' and 'rows_second' of model 'two' both have a table 'users'"):
        model.fit(ids, np.zeros([9, 2]), verbose=0)


@pytest.mark.parametrize(("names", "inside"), [(("users", "items"), None), (("users", "users"), Tower)])
def test_layers_of_two_tables_or_two_models_train(names: tuple[str, str], inside: Any) -> None:
    """Of a teacher and its student, for example, an export chooses one by `root`."""
    model, ids = TwoLayers(names, inside), {"u": np.arange(9)}
    model.compile("sgd", "mse")
    before = model.predict(ids, verbose=0)
    model.fit(ids, np.ones([9, 2]), verbose=0)
    assert np.abs(model.predict(ids, verbose=0) - before).max() > 1e-4
