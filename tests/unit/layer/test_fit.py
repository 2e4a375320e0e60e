"""`fit` trains the tables by their own rule, whatever optimizer the rest of the model is compiled with."""

from typing import Any

import keras
import numpy as np
import pytest

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


@pytest.mark.filterwarnings("ignore::tpuembed.errors.TrainingWarning")
@pytest.mark.parametrize(
    "optimizer",
    [
        *OPTIMIZERS,
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.0),
        keras.optimizers.Adam(weight_decay=0.1, global_clipnorm=1.0),
    ],
)
@pytest.mark.sampled(3)
def test_every_optimizer_of_keras_beside_the_tables(optimizer: Any) -> None:
    model, table = _model()
    expected = _trained(table.numpy())
    model.compile(optimizer, _slope_loss)
    model.fit(IDS, SLOPES, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(table.numpy(), expected, atol=2e-6)


def test_a_summary_counts_what_the_layer_trains_as_the_docs_say() -> None:
    """The weights that gradients come through are "trainable": one of the step, and one of each table. Tables and slots are not."""
    table = FeatureConfig(TableConfig(10, 4, "t"))
    for optimizer, trainable, others in (("adam", 1 + 5 + 5, 3 * 10 * 4 + 1), (None, 10 * 4 + 5, 0)):
        x = keras.Input((), dtype="int64")
        model = keras.Model(x, keras.layers.Dense(1)(TPUEmbedding(table, optimizer=optimizer)(x)))
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        said = [line.strip() for line in "\n".join(lines).splitlines()]
        assert any(line.startswith(f"Trainable params: {trainable} ") for line in said)
        assert any(line.startswith(f"Non-trainable params: {others} ") for line in said)
