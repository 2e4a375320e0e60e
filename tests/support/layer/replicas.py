"""Train on N logical CPUs and save what came out: `python -m tests.support.layer.replicas N FOLDER [OPTIMIZERS]`.

A process of its own, because logical devices are made before TensorFlow starts. Per optimizer, FOLDER/<i>.npz holds the table
before, and the table and slots of every replica after. With OPTIMIZERS only so many of them, the first ones.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.layer.models import OPTIMIZERS
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import TrainingWarning

ROWS, DIM, STEPS, EXAMPLES = 9, 3, 20, 8
IDS: list[list[int]] = [[1, 2, 1], [], [3], [0, 0, 0, 5], [1], [8, 7], [2, 3], [4]]
TRACKED = "adam, defaults"
SLOPES = np.random.default_rng(4).normal(size=(EXAMPLES, DIM)).astype(np.float32)


def train(strategy: Any, kind: str) -> dict[str, Any]:
    """STEPS steps of one loss, sum(activation * slope) over all examples, each replica with its share of them."""
    with strategy.scope():
        table = TableConfig(ROWS, DIM, "t", combiner="sum", initializer=keras.initializers.RandomNormal(seed=1))
        layer = TPUEmbedding(FeatureConfig(table), OPTIMIZERS[kind], track_rows=kind == TRACKED)
    (variable,) = layer.embedding_tables.values()
    before = variable.values[0].numpy()
    replicas = strategy.num_replicas_in_sync
    share = EXAMPLES // replicas

    def of_replica(context: Any) -> Any:
        rows = slice(context.replica_id_in_sync_group * share, (context.replica_id_in_sync_group + 1) * share)
        return tf.ragged.constant(IDS[rows], dtype=tf.int64), tf.constant(SLOPES[rows])

    inputs = strategy.experimental_distribute_values_from_function(of_replica)

    def replica_step(ids: Any, slopes: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * slopes)
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    @tf.function
    def step() -> None:
        strategy.run(replica_step, args=inputs)

    for _ in range(STEPS):
        step()
    found = {"before": before}
    for weight in layer.weights:
        if weight.path == "t" or weight.path.startswith("t_"):
            name = "table" if weight.path == "t" else weight.path.removeprefix("t_")
            found[name] = copies(weight.value)
    if kind == TRACKED:
        (state,) = layer.live_tables("test").states.values()
        found["stamps"] = copies(state.stamps)
    return found


def copies(variable: Any) -> Any:
    """[replicas, ...] of a variable."""
    return np.stack([copy.numpy() for copy in getattr(variable, "values", (variable,))])


def fit(strategy: Any) -> dict[str, Any]:
    """Keras' own training loop under the strategy: the same numbers whatever the number of replicas."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        inputs = keras.Input((), dtype="int64", name="x")
        layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, DIM, "t")), optimizer="adagrad")
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.arange(EXAMPLES) % ROWS, np.ones((EXAMPLES, 1)))).batch(EXAMPLES)
    history = model.fit(data, epochs=4, verbose=0, shuffle=False).history["loss"]
    (variable,) = layer.embedding_tables.values()
    return {"loss": np.array(history), "table": copies(variable)}


class Padded(keras.Model):
    """Ids come padded with -1, because Keras' `fit` fails on sparse and ragged batches of several replicas."""

    def __init__(self) -> None:
        super().__init__()
        table = TableConfig(ROWS, DIM, "t", combiner="sum", initializer=keras.initializers.RandomNormal(seed=1))
        self.embedding = TPUEmbedding(FeatureConfig(table), optimizer="adagrad")
        self.head = keras.layers.Dense(1)

    def call(self, padded: Any) -> Any:
        return self.head(self.embedding(tf.RaggedTensor.from_tensor(padded, padding=-1)))


def fit_padded(strategy: Any) -> dict[str, Any]:
    """`fit` of ids that the model makes ragged."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = Padded()
        model.compile("sgd", "mse")
    padded = tf.ragged.constant(IDS, dtype=tf.int64).to_tensor(-1)
    data = tf.data.Dataset.from_tensor_slices((padded, np.ones((EXAMPLES, 1)))).batch(EXAMPLES)
    history = model.fit(data, epochs=4, verbose=0, shuffle=False).history["loss"]
    (variable,) = model.embedding.embedding_tables.values()
    return {"loss": np.array(history), "table": copies(variable)}


class Forgetful(Padded):
    """Takes gradients and never applies them."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(data[0]))
        tape.gradient(loss, self.trainable_variables)
        return {"loss": loss}


def warnings_of_a_forgetful_fit(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = Forgetful()
        model.compile("sgd", "mse")
    padded = tf.ragged.constant(IDS, dtype=tf.int64).to_tensor(-1)
    with warnings.catch_warnings(record=True) as caught:
        model.fit(tf.data.Dataset.from_tensors((padded, np.ones((EXAMPLES, 1)))), verbose=0)
    return {"texts": np.array([str(one.message) for one in caught if one.category is TrainingWarning])}


def restored(strategy: Any, folder: Path) -> dict[str, Any]:
    """What the host saved, in every copy after a restore; and as the host reads it after the replicas saved it."""

    def make(seed: int) -> TPUEmbedding:
        table = TableConfig(ROWS, DIM, "t", initializer=keras.initializers.RandomNormal(seed=seed))
        return TPUEmbedding(FeatureConfig(table), "adam")

    host, found = make(1), {}
    for number, variable in enumerate(host.named_variables().values()):
        variable.assign(np.random.default_rng(number).normal(size=(ROWS, DIM)))
    host.updates.assign(7)
    path = tf.train.Checkpoint(layer=host).write(str(folder / "host"))
    for way in ("checkpoint", "restore_tables"):
        with strategy.scope():
            layer = make(2)
        tf.train.Checkpoint(layer=layer).read(path) if way == "checkpoint" else layer.restore_tables(path)
        again = make(3)
        tf.train.Checkpoint(layer=again).read(tf.train.Checkpoint(layer=layer).write(str(folder / way)))
        for name, variable in layer.named_variables().items():
            found[f"{way} {name}"] = np.stack([*copies(variable), again.named_variables()[name].numpy()])
        found[f"{way} updates"] = np.array([layer.updates.numpy(), again.updates.numpy()])
    return found


def main(replicas: int, folder: Path, optimizers: int) -> None:
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    for index, kind in enumerate(list(OPTIMIZERS)[:optimizers]):
        np.savez(folder / f"{index}.npz", **train(strategy, kind))
    np.savez(folder / "restored.npz", **restored(strategy, folder))
    for train_model in (fit, fit_padded):
        for name, under in (("", strategy), ("_alone", tf.distribute.get_strategy())):
            np.savez(folder / f"{train_model.__name__}{name}.npz", **train_model(under))
    np.savez(folder / "warnings.npz", **warnings_of_a_forgetful_fit(strategy))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else len(OPTIMIZERS))
