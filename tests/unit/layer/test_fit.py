"""`fit` trains the tables by their own rule, whatever optimizer the rest of the model is compiled with."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding

ROWS, DIM, BATCH, STEPS, RATE = 12, 3, 8, 3, 0.5
IDS = np.random.default_rng(1).integers(0, ROWS, BATCH * STEPS)
SLOPES = np.random.default_rng(2).normal(size=(BATCH * STEPS, DIM)).astype(np.float32)


def _slope_loss(slopes: Any, rows: Any) -> Any:
    return keras.ops.sum(slopes * rows)


def _model() -> tuple[Any, Any]:
    """A model that answers the rows, and a weight of the user's beside them."""
    layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, DIM, "items")), optimizer=SGD(learning_rate=RATE))
    ids = keras.Input((), dtype="int64", name="item")
    shift = keras.layers.Dense(DIM, kernel_initializer="zeros", name="shift")(keras.ops.ones((1, 1)))
    (table,) = layer.embedding_tables.values()
    return keras.Model(ids, layer(ids) + shift), table


def _trained(rows: Any) -> Any:
    """The table after every example: a row moves by RATE times the slopes of its examples."""
    expected = rows.astype(np.float64)
    np.subtract.at(expected, IDS, RATE * SLOPES.astype(np.float64))
    return expected


OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "nadam", "rmsprop", "sgd",
)  # fmt: skip


def _ranked(optimizer: str, *, eagerly: bool) -> Any:
    """The table of a model with weights behind its rows, after `fit`."""
    keras.utils.set_random_seed(3)
    layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, DIM, "items")), optimizer="adagrad")
    ids = keras.Input((), dtype="int64", name="item")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    (table,) = layer.embedding_tables.values()
    before = table.numpy()
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    model.fit(IDS, SLOPES[:, :1], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert (table.numpy() != before).any(1)[IDS].all()
    return table.numpy()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_graphs_train_as_eager_steps_do(optimizer: str) -> None:
    """TensorFlow's graph optimizer drops ops: beside Adam, AdamW, Ftrl and Lion it once dropped the tables' updates."""
    np.testing.assert_allclose(_ranked(optimizer, eagerly=False), _ranked(optimizer, eagerly=True), atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_every_optimizer_of_keras_beside_the_tables(optimizer: str) -> None:
    model, table = _model()
    expected = _trained(table.numpy())
    model.compile(optimizer, _slope_loss)
    model.fit(IDS, SLOPES, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(table.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": STEPS},
        {"run_eagerly": True},
        {"jit_compile": False},
        {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)},
        {"optimizer": keras.optimizers.Adam(weight_decay=0.1, use_ema=True)},
        {"optimizer": keras.optimizers.Adam(clipnorm=1.0)},
        {"optimizer": keras.optimizers.Adam(global_clipnorm=1.0)},
    ],
    ids=["steps at once", "eager", "no jit", "momentum", "weight decay and ema", "clipnorm", "global clipnorm"],
)
@pytest.mark.sampled(3)
def test_ways_to_compile(options: dict[str, Any]) -> None:
    model, table = _model()
    expected = _trained(table.numpy())
    model.compile(**{"optimizer": "adam", "loss": _slope_loss, **options})
    model.fit(IDS, SLOPES, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(table.numpy(), expected, atol=2e-6)


def test_batch_by_batch() -> None:
    model, table = _model()
    expected = _trained(table.numpy())
    model.compile("adam", _slope_loss)
    for start in range(0, len(IDS), BATCH):
        model.train_on_batch(IDS[start : start + BATCH], SLOPES[start : start + BATCH])
    np.testing.assert_allclose(table.numpy(), expected, atol=2e-6)


def test_a_summary_counts_what_the_layer_trains_as_the_docs_say() -> None:
    """One weight of a layer is "trainable", the one that its gradients come through; tables and slots are not."""
    table = FeatureConfig(TableConfig(10, 4, "t"))
    for optimizer, trainable, others in (("adam", 1 + 5, 3 * 10 * 4 + 1), (None, 10 * 4 + 5, 0)):
        x = keras.Input((), dtype="int64")
        model = keras.Model(x, keras.layers.Dense(1)(TPUEmbedding(table, optimizer=optimizer)(x)))
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        said = [line.strip() for line in "\n".join(lines).splitlines()]
        assert any(line.startswith(f"Trainable params: {trainable} ") for line in said)
        assert any(line.startswith(f"Non-trainable params: {others} ") for line in said)


class Retrieval(keras.Model):
    """As docs/compat.md writes a retrieval task of TensorFlow Recommenders."""

    def __init__(self) -> None:
        super().__init__()
        features = {"query": FeatureConfig(TableConfig(9, 4, "q")), "candidate": FeatureConfig(TableConfig(20, 4, "c"))}
        self.rows = TPUEmbedding(features, optimizer=keras.optimizers.Adagrad(0.5))

    def call(self, inputs: Any) -> Any:
        rows = self.rows(inputs)
        return tf.matmul(rows["query"], rows["candidate"], transpose_b=True)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        del x, y, sample_weight, training
        labels = tf.range(tf.shape(y_pred)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred))


def test_a_retrieval_task_is_a_loss() -> None:
    model = Retrieval()
    model.compile("sgd")
    batch = {"query": np.arange(8), "candidate": np.arange(8) + 10}
    scores = model(batch).numpy().astype(np.float64)
    truth = np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores))
    losses = model.fit(batch, epochs=60, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses[0], truth, rtol=1e-5)
    assert losses[-1] < 0.2
    assert (model.predict(batch, verbose=0).argmax(1) == np.arange(8)).all()
