"""Optimizers of `compile` whose loops no accelerator can follow: refused in the step of `fit`, by name."""

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import TrainingError


@pytest.mark.parametrize("hardware", ["V1", "V2"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(loss_scale_factor=4.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
)
def test_loops_that_no_accelerator_can_follow_are_refused(hardware: str, make: Any) -> None:
    with fake_tpu(hardware) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(FeatureConfig(TableConfig(100, 8, "t"), output_shape=(16,)), "sgd")
            ids = keras.Input((), batch_size=16, dtype="int64")
            model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
            model.compile(make(), "mse")
        batch = (tf.compat.v1.placeholder(tf.int64, [16]), tf.compat.v1.placeholder(tf.float32, [16, 1]))
        with refused(TrainingError):
            strategy.run(lambda x, y: model.train_step((x, y)), args=batch)
