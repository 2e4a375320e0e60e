"""Train under one strategy, save, restore under another, train on: `python -m tests.support.layer.resumed N FOLDER`.

A process of its own, because logical devices are made before TensorFlow starts, and one for each N, because TensorFlow
takes no second MirroredStrategy of several replicas. Strategies are called by their number of replicas, and the default one
"default". FOLDER/<from>-<to>-<how>.npz holds what came out.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.layer.replicas import DIM, EXAMPLES, IDS, ROWS, SLOPES
from tpuembed import Adam, FeatureConfig, TableConfig, TPUEmbedding

STEPS = 4
WAYS = ("checkpoint", "restore_tables")
ENDINGS = ("weights.h5", "keras")
SLOTS = {"momenta": "t/momenta", "velocities": "t/velocities"}


def schedule() -> Any:
    """A learning rate that needs the count of updates to go on right."""
    return keras.optimizers.schedules.ExponentialDecay(0.4, 3, 0.5)


def first_rows() -> Any:
    """What the table begins with: float32 [ROWS, DIM]."""
    return np.random.default_rng(6).normal(size=(ROWS, DIM)).astype(np.float32)


def make(strategy: Any, seed: int | None = None) -> TPUEmbedding:
    """A layer under `strategy`; with a seed other rows, which a restore has to overwrite."""
    initializer = keras.initializers.Zeros() if seed is None else keras.initializers.RandomNormal(seed=seed)
    with strategy.scope():
        table = TableConfig(ROWS, DIM, "t", combiner="sum", initializer=initializer)
        return TPUEmbedding(FeatureConfig(table), optimizer=Adam(learning_rate=schedule(), epsilon=1e-2))


def train(strategy: Any, layer: TPUEmbedding, steps: int = STEPS) -> None:
    """Steps of one loss, sum(activation * slope) over all examples, each replica with its share of them."""
    share = EXAMPLES // strategy.num_replicas_in_sync

    def of_replica(context: Any) -> Any:
        rows = slice(context.replica_id_in_sync_group * share, (context.replica_id_in_sync_group + 1) * share)
        return tf.ragged.constant(IDS[rows], dtype=tf.int64), tf.constant(SLOPES[rows])

    inputs = strategy.experimental_distribute_values_from_function(of_replica)

    def replica_step(ids: Any, slopes: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * slopes)
        return tape.gradient(loss, layer.trainable_variables)

    @tf.function
    def step() -> None:
        strategy.run(replica_step, args=inputs)

    for _ in range(steps):
        step()


def copies(variable: Any) -> Any:
    """[replicas, ...] of a variable."""
    return np.stack([one.numpy() for one in getattr(variable, "values", (variable,))])


def held(layer: TPUEmbedding) -> dict[str, Any]:
    """The table, its slots and the count, in every copy."""
    node = layer._tpu_embedding
    found = {name: copies(node._lookup_dependency(child)) for name, child in SLOTS.items()}
    return {"table": copies(node._lookup_dependency("t")), **found, "updates": copies(node.updates)}


def restore(layer: TPUEmbedding, prefix: str, how: str) -> None:
    """Restore by one of WAYS."""
    if how == "checkpoint":
        tf.train.Checkpoint(layer=layer).read(prefix).assert_existing_objects_matched()
    else:
        layer.restore_tables(prefix)


def pairs(replicas: str) -> list[tuple[str, str]]:
    """From where to where; with four replicas more than with two, which the default suite runs."""
    ends = [("default", replicas), (replicas, "default")]
    return [*ends, ("1", replicas), (replicas, replicas)] if replicas == "4" else ends


def strategies(replicas: str) -> dict[str, Any]:
    """By name; the default one trains too."""
    counts = sorted({"1", replicas})
    mirrored = {n: tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(int(n))]) for n in counts}
    return {"default": tf.distribute.get_strategy(), **mirrored}


def layers(folder: Path, replicas: str, by_name: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pair of strategies, every way."""
    prefixes = {name: saved(folder / name, strategy) for name, strategy in by_name.items()}
    for source, target in pairs(replicas):
        for how in WAYS:
            layer = make(by_name[target], seed=3)
            restore(layer, prefixes[source], how)
            train(by_name[target], layer)
            yield f"{source}-{target}-{how}", held(layer)


def saved(prefix: Path, strategy: Any) -> str:
    """The checkpoint of a layer that was trained under `strategy`."""
    layer = make(strategy)
    layer.assign_rows("t", 0, first_rows())
    train(strategy, layer)
    return str(tf.train.Checkpoint(layer=layer).write(str(prefix)))


# ---- whole models, with Keras' own training loop


def model_under(strategy: Any) -> Any:
    """A compiled model; the same numbers whatever the strategy."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        inputs = keras.Input((), dtype="int64", name="x")
        layer = TPUEmbedding(
            FeatureConfig(TableConfig(ROWS, DIM, "t")), optimizer=Adam(learning_rate=schedule()), name="e"
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model: Any, epochs: int = 3) -> None:
    """Train the model."""
    data = tf.data.Dataset.from_tensor_slices((np.arange(EXAMPLES) % ROWS, np.ones((EXAMPLES, 1)))).batch(EXAMPLES)
    model.fit(data, epochs=epochs, verbose=0, shuffle=False)


def loaded(strategy: Any, model: Any, folder: Path, ending: str) -> Any:
    """`model` through a file, under `strategy`."""
    path = folder / f"model.{ending}"
    if ending == "keras":
        model.save(path)
        with strategy.scope():
            return keras.models.load_model(path)
    model.save_weights(path)
    with strategy.scope():
        other = model_under(strategy)
        other.load_weights(path)
    return other


def models(folder: Path, replicas: str, by_name: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Weight files between strategies, and "unbroken": the same without a break."""
    for source, target in [("default", replicas), (replicas, "default")]:
        model = model_under(by_name[source])
        fit(model)
        for ending in ENDINGS:
            other = loaded(by_name[target], model, folder, ending)
            fit(other)
            yield (
                f"{source}-{target}-{ending}",
                {**held(other.get_layer("e")), "kernel": other.layers[-1].kernel.numpy()},
            )
    unbroken = model_under(by_name["default"])
    fit(unbroken, 6)
    yield "unbroken", {**held(unbroken.get_layer("e")), "kernel": unbroken.layers[-1].kernel.numpy()}


def main(replicas: str, folder: Path) -> None:
    """Write everything to `folder`."""
    cpus = [tf.config.LogicalDeviceConfiguration()] * int(replicas)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    by_name = strategies(replicas)
    for make_results in (layers,) if replicas == "2" else (layers, models):
        for name, arrays in make_results(folder, replicas, by_name):
            np.savez(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
