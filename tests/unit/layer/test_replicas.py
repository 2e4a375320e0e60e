"""MirroredStrategy: one update of the gradients of all replicas together, in every copy."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer import replicas
from tests.support.layer.models import OPTIMIZERS, Reference, assert_same_numbers, one_table
from tests.support.messages import refused
from tpuembed import TPUEmbedding
from tpuembed.errors import TrainingError

ROOT = Path(__file__).parents[3]


# Replicas, and how many optimizers they train with: one of each kind, or all.
KINDS, ALL = 5, len(OPTIMIZERS)
LONG = [(2, ALL), (4, ALL)]
RUNS = [(2, KINDS), *(pytest.param(run, marks=pytest.mark.nightly) for run in LONG)]


@pytest.fixture(scope="module", params=RUNS, ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, Path]:
    folder = tmp_path_factory.mktemp("replicas")
    number, optimizers = request.param
    command = [sys.executable, "-m", "tests.support.layer.replicas", str(number), str(folder), str(optimizers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return number, optimizers, folder


@pytest.mark.sampled(1)
def test_every_optimizer_equals_the_reference_in_every_copy(trained: tuple[int, int, Path]) -> None:
    number, optimizers, folder = trained
    assert len({type(optimizer) for optimizer in list(OPTIMIZERS.values())[:KINDS]}) == KINDS
    ids = np.array([i for row in replicas.IDS for i in row])
    gradients = np.array([replicas.SLOPES[e] for e, row in enumerate(replicas.IDS) for _ in row], np.float64)
    for index, (kind, optimizer) in enumerate(list(OPTIMIZERS.items())[:optimizers]):
        with np.load(folder / f"{index}.npz") as found:
            if kind == replicas.TRACKED:
                stamps = np.where(np.isin(np.arange(replicas.ROWS), ids), replicas.STEPS, 0)
                np.testing.assert_array_equal(found["stamps"], [stamps] * number)
            reference = Reference(found["before"], optimizer)
            for _ in range(replicas.STEPS):
                reference.step(ids, gradients)
            for name, truth in {"table": reference.table, **reference.slots}.items():
                assert len(found[name]) == number
                for copy in found[name]:
                    np.testing.assert_array_equal(copy, found[name][0], err_msg=f"{kind}: {name}")
                assert_same_numbers(found[name][0], truth, f"{kind}: {name}")


@pytest.mark.sampled(1)
def test_every_copy_is_restored_and_saved(trained: tuple[int, int, Path]) -> None:
    number, _, folder = trained
    with np.load(folder / "restored.npz") as found:
        for way in ("checkpoint", "restore_tables"):
            for seed, name in enumerate(("t", "t/momenta", "t/velocities")):
                copies = found[f"{way} {name}"]
                assert len(copies) == number + 1
                truth = np.random.default_rng(seed).normal(size=copies.shape[1:]).astype(np.float32)
                for copy in copies:
                    np.testing.assert_array_equal(copy, truth, err_msg=f"{way}: {name}")
            assert found[f"{way} updates"].tolist() == [7, 7]


@pytest.mark.parametrize("model", ["fit", "fit_padded"])
def test_fit_gives_the_numbers_of_training_without_replicas(trained: tuple[int, int, Path], model: str) -> None:
    number, _, folder = trained
    with np.load(folder / f"{model}.npz") as found, np.load(folder / f"{model}_alone.npz") as truth:
        np.testing.assert_allclose(found["loss"], truth["loss"], rtol=1e-5, atol=1e-6)
        assert len(found["table"]) == number
        for copy in found["table"]:
            np.testing.assert_allclose(copy, truth["table"][0], rtol=1e-5, atol=1e-6)


def test_a_fit_that_applies_no_gradient_is_warned_of(trained: tuple[int, int, Path]) -> None:
    with np.load(trained[2] / "warnings.npz") as found:
        (text,) = found["texts"]
    assert "fit has ended" in text


def test_training_under_another_strategy_than_the_layers_is_refused() -> None:
    layer = TPUEmbedding(one_table(), optimizer="sgd")
    inputs = {"first": tf.constant([1]), "second": tf.constant([2])}

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(inputs)["first"])
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    with refused(TrainingError, match="1 replica"):
        tf.distribute.OneDeviceStrategy("CPU:0").run(step)
    assert issubclass(TrainingError, RuntimeError)


WITHOUT_IDS = """
import sys
import numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from tpuembed import Adagrad, FeatureConfig, TableConfig, TPUEmbedding
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
lists = {"both": [[[1, 2], [2]], [[2], [7]]], "one": [[[], []], [[3], []]], "none": [[[], []], [[], []]]}

def trained(replicas, wrap):
    with strategy.scope() if replicas == 2 else tf.distribute.get_strategy().scope():
        config = TableConfig(8, 4, "tags", combiner="sum", initializer=tf.constant_initializer(0.5))
        layer = TPUEmbedding({"tags": FeatureConfig(config), "more": FeatureConfig(config)}, optimizer=Adagrad(0.1))
    def step(tags):
        with tf.GradientTape() as tape:
            found = layer({"tags": tags, "more": tags[:0] if sys.argv[1] == "empty" else tags})
            loss = tf.reduce_sum(tf.square(found["tags"])) + tf.reduce_sum(found["more"])
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        return loss
    for shares in lists.values():
        if replicas == 1:
            parts = [tf.ragged.constant(shares[0] + shares[1], dtype=tf.int64, ragged_rank=1)]
            wrap(step)(parts[0])
            continue
        parts = [tf.ragged.constant(share, dtype=tf.int64, ragged_rank=1) for share in shares]
        def of_replica(first, second):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            values = tf.cond(tf.equal(replica, 0), lambda: first.values, lambda: second.values)
            splits = tf.cond(tf.equal(replica, 0), lambda: first.row_splits, lambda: second.row_splits)
            return step(tf.RaggedTensor.from_row_splits(values, splits))
        wrap(lambda *both: strategy.run(of_replica, both))(*parts)
    tables = next(iter(layer.embedding_tables.values()))
    return [copy.numpy() for copy in getattr(tables, "values", [tables])]

def dense(replicas, batches):
    with strategy.scope() if replicas == 2 else tf.distribute.get_strategy().scope():
        table = TableConfig(8, 4, "t", initializer=tf.constant_initializer(0.5))
        layer = TPUEmbedding(FeatureConfig(table), optimizer=Adagrad(0.1))
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(ids)))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        return loss
    for shares in batches:
        if replicas == 1:
            step(tf.constant(sum(shares, []), tf.int64))
            continue
        arrays = [tf.constant(share, tf.int64, shape=[len(share)]) for share in shares]
        each = strategy.experimental_distribute_values_from_function(
            lambda context: arrays[context.replica_id_in_sync_group]
        )
        (strategy.run if sys.argv[1] == "full" else tf.function(strategy.run))(step, (each,))
    table = next(iter(layer.embedding_tables.values()))
    return [copy.numpy() for copy in getattr(table, "values", [table])]

batches = [[[1, 2, 2], []], [[], [3]], [[], []], [[4], [1, 5]]]
(one,) = dense(1, batches)
for copy in dense(2, batches):
    np.testing.assert_allclose(copy, one, rtol=0, atol=1e-6)
(truth,) = trained(1, lambda step: step)
for wrap in (lambda step: step, lambda step: tf.function(step, reduce_retracing=True)):
    for copy in trained(2, wrap):
        np.testing.assert_allclose(copy, truth, rtol=0, atol=1e-6)
assert np.abs(truth[[1, 2, 3, 7]] - 0.5).min() > 1e-3
np.testing.assert_array_equal(truth[[0, 4, 5, 6]], 0.5)
"""


@pytest.mark.parametrize("second_feature", ["full", "empty"])
def test_a_step_without_ids_on_any_replica(second_feature: str) -> None:
    """TensorFlow's all_gather ends the process if no replica has anything to gather."""
    command = [sys.executable, "-c", WITHOUT_IDS, second_feature]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
