"""Training on simulated SparseCores gives the tables and slots that the host's backend gives, for every optimizer.

The host's rules are TensorFlow's ops, the simulation's are numpy in float64, written apart from them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.models import OPTIMIZERS
from tests.support.layer.simulated import EXAMPLES, Array, Ids
from tests.support.layer.simulated_training import Model, batches, state, train
from tests.support.messages import refused
from tpuembed import SGD, Adagrad, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import TrainingError
from tpuembed.testing import simulated_tpu

REFUSED = {"ftrl from zero", "sgd, clipped and decayed", "adagrad, clipped and decayed", "adam, every row"}
"""Optimizers that SparseCores do not have."""


def tables() -> dict[str, TableConfig]:
    """Feature -> table: one for each optimizer, some with a second one in their stack, and one of another width."""
    kinds = [kind for kind in OPTIMIZERS if kind not in REFUSED]
    made: dict[str, TableConfig] = {}
    for number, kind in enumerate(kinds):
        for part, (rows, dim) in enumerate([(37, 5), (12, 8)][: 1 + (number < 7)]):
            name = f"{number}_{part}"
            combiner = ("sum", "mean", "sqrtn")[(number + part) % 3]
            made[name] = TableConfig(rows, dim, name, combiner=combiner, optimizer=OPTIMIZERS[kind])
    made["wide"] = TableConfig(21, 12, "wide", optimizer=Adagrad(learning_rate=0.1))
    made["again"] = made["0_0"]
    return made


def trained_on_host(features: Mapping[str, TableConfig], ids: list[dict[str, Ids]], **options: Any) -> dict[str, Array]:
    return train(tf.distribute.get_strategy(), Model(features, **options), ids)


def assert_same(found: Mapping[str, Array], truth: Mapping[str, Array]) -> None:
    assert set(found) == set(truth)
    for name, expected in truth.items():
        unit = max(1.0, float(np.abs(expected).max()))  # FTRL's linears are in the hundreds
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6 * unit, err_msg=name)


@pytest.mark.parametrize(("replicas", "sparse_cores"), [(1, 4), (2, 2), pytest.param(4, 4, marks=pytest.mark.nightly)])
@pytest.mark.sampled(1)
def test_every_optimizer_trains_as_on_the_host(replicas: int, sparse_cores: int) -> None:
    features = tables()
    ids = batches(features, replicas)
    truth = trained_on_host(features, ids)
    with simulated_tpu(replicas=replicas, sparse_cores=sparse_cores) as strategy:
        with strategy.scope():
            model = Model(features)
        untrained = state(model)
        assert_same(train(strategy, model, ids), truth)
    assert all(np.abs(truth[name] - untrained[name]).max() > 1e-5 for name in truth)
    slots = {"/".join(name.split("/")[1:]) for name in truth}
    assert slots == {"", "accumulators", "momenta", "velocities", "linears"}


def small() -> dict[str, TableConfig]:
    shared = TableConfig(37, 5, "shared", combiner="sum")
    return {"a": shared, "b": TableConfig(10, 8, "small"), "again": shared}


def schedule() -> Any:
    return Adagrad(learning_rate=keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.3, 0.02, 0.1]))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("make", [schedule, lambda: keras.optimizers.Adagrad(0.2, epsilon=1e-7)])
def test_a_live_learning_rate_is_read_at_every_step(make: Callable[[], Any], replicas: int) -> None:
    features, ids = small(), batches(small(), replicas, steps=6)
    truth = trained_on_host(features, ids, optimizer=make())
    with simulated_tpu(replicas=replicas) as strategy:
        with strategy.scope():
            model = Model(features, optimizer=make())
        assert_same(train(strategy, model, ids), truth)
        assert int(model.embedding._tpu_embedding.updates.numpy()) == 6


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_small_tables_are_replicated(replicas: int) -> None:
    features, ids = small(), batches(small(), replicas, steps=4)
    truth = trained_on_host(features, ids, optimizer="adam")
    with simulated_tpu(replicas=replicas) as strategy:
        with strategy.scope():
            model = Model(features, optimizer="adam", size_threshold=10)
        children = set(model.embedding._tpu_embedding._trackable_children())
        assert children >= {"small", "small/momenta", "shared", "shared/momenta", "_sparse_core_table_layouts"}
        assert_same(train(strategy, model, ids), truth)
        copies = model.embedding.core.backend.states["small"].variable.values
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())


def test_tpus_without_embedding_hardware() -> None:
    features, ids = small(), batches(small(), 2, steps=4)
    truth = trained_on_host(features, ids, optimizer="adagrad")
    with simulated_tpu("UNSUPPORTED", replicas=2) as strategy:
        with strategy.scope():
            model = Model(features, optimizer="adagrad")
        assert_same(train(strategy, model, ids), truth)


def test_a_frozen_layer_is_looked_up_and_not_trained() -> None:
    features, ids = small(), batches(small(), 1, steps=2)
    with simulated_tpu() as strategy:
        with strategy.scope():
            model = Model(features, optimizer="adagrad")
        model.embedding.trainable = False
        before = state(model)
        after = train(strategy, model, ids)
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name != "kernel"), name


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_fit(replicas: int) -> None:
    """One process' batches of dense ids, divided among the replicas by Keras; the mean of all examples' losses."""

    def fitted(strategy: Any, **options: Any) -> tuple[list[float], Array]:
        keras.utils.set_random_seed(2)
        with strategy.scope():
            table = TableConfig(37, 5, "t", initializer=keras.initializers.RandomNormal(seed=4))
            layer = TPUEmbedding(FeatureConfig(table), optimizer="adagrad", **options)
            (variable,) = layer.embedding_tables.values()
            variable.assign(np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32))
            inputs_ = keras.Input((), dtype="int64", name="x")
            model = keras.Model(inputs_, keras.layers.Dense(1)(layer(inputs_)))
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        random = np.random.default_rng(3)
        x, y = random.integers(0, 37, 8 * EXAMPLES), random.normal(size=(8 * EXAMPLES, 1))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(EXAMPLES * replicas, drop_remainder=True)
        return model.fit(data, epochs=2, verbose=0, shuffle=False).history["loss"], variable.numpy()

    truth = fitted(tf.distribute.get_strategy())
    with simulated_tpu(replicas=replicas) as strategy:
        losses, rows = fitted(strategy, batch_size=EXAMPLES)
    np.testing.assert_allclose(losses, truth[0], rtol=1e-6)
    np.testing.assert_allclose(rows, truth[1], rtol=1e-5, atol=1e-6)


def test_a_second_gradient_through_one_call_is_refused() -> None:
    with simulated_tpu() as strategy:
        with strategy.scope():
            layer = TPUEmbedding(FeatureConfig(TableConfig(9, 4, "t", optimizer=SGD())), batch_size=EXAMPLES)

        def step() -> None:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(layer(tf.zeros(EXAMPLES, tf.int64)))
            tape.gradient(loss, layer.trainable_variables)
            with refused(TrainingError):
                tape.gradient(loss, layer.trainable_variables)

        strategy.run(step)


class Unbuilt(keras.Model):
    """Keras builds its layers when it is called first, by a symbolic call of it."""

    def __init__(self) -> None:
        super().__init__()
        table = TableConfig(40, 8, "t", initializer="ones")
        self.embedding = TPUEmbedding({"t": FeatureConfig(table)}, SGD(learning_rate=1.0), batch_size=EXAMPLES)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, ids: Any) -> Any:
        return self.dense(self.embedding(ids)["t"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_may_be_built_by_its_first_step(replicas: int) -> None:
    with simulated_tpu(replicas=replicas) as strategy:
        with strategy.scope():
            model = Unbuilt()

        def step(ids: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model({"t": ids}))
            tape.gradient(loss, model.trainable_variables)

        strategy.run(step, args=(tf.range(EXAMPLES),))
        (rows,) = (state.variable.numpy() for state in model.embedding.core.backend.states.values())
    np.testing.assert_array_equal(rows[:EXAMPLES], np.full((EXAMPLES, 8), 1.0 - replicas))
    np.testing.assert_array_equal(rows[EXAMPLES:], np.ones((40 - EXAMPLES, 8)))
