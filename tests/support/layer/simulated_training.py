"""A model of many tables, trained for some steps under any strategy."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.layer.simulated import EXAMPLES, Array, Ids, inputs, make_layer, random_ids
from tpuembed import TableConfig

STEPS = 10


def batches(features: Mapping[str, TableConfig], replicas: int, steps: int = STEPS) -> list[dict[str, Ids]]:
    random = np.random.default_rng(7)
    kinds = ["ragged", "sparse", "dense"]
    return [
        {
            name: random_ids(
                random, kinds[i % 3], table.vocabulary_size, EXAMPLES * replicas, weighted=i % 2 == 0 and i % 3 < 2
            )
            for i, (name, table) in enumerate(features.items())
        }
        for _ in range(steps)
    ]


class Model(keras.Model):
    """Tables, and a dense layer."""

    def __init__(self, features: Mapping[str, TableConfig], **options: Any) -> None:
        super().__init__()
        random = np.random.default_rng(1)
        rows = {t.name: random.normal(size=(t.vocabulary_size, t.dim)).astype(np.float32) for t in features.values()}
        self.embedding = make_layer(features, rows, **options)
        # One unit and a loss whose slope is between 1 and 3: gradients of one column have one sign and do not cancel, where
        # AdagradMomentum's first step divides by their size.
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(stddev=0.05, seed=3))
        self.dense.build((None, sum(table.dim for table in features.values())))
        self.features = list(features)
        self.built = True  # Keras up to 3.12 cannot build a model by a call with a None in its arguments, as in weights

    def call(self, features: Any, weights: Any = None) -> Any:
        activations = self.embedding(features, weights)
        return self.dense(keras.ops.concatenate([activations[name] for name in self.features], -1))


def train(strategy: Any, model: Model, ids: list[dict[str, Ids]]) -> dict[str, Array]:
    """STEPS steps by the sum of all examples' losses; the tables, slots and dense weights then."""
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(features: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(features, weights)
            loss = tf.reduce_sum(2.0 * scores + tf.sqrt(1.0 + scores**2))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for batch in ids:
        strategy.run(step, args=inputs(strategy, batch))
    return state(model)


def state(model: Model) -> dict[str, Array]:
    found = {
        name: variable.numpy()
        for table in model.embedding.core.backend.states.values()
        for name, variable in table.named_variables().items()
    }
    return {**found, "kernel": model.dense.kernel.numpy()}
