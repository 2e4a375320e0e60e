"""Writes the checkpoints under tests/golden/tfrs with the real classes; see README.md beside it for how to run it."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

E = tf.tpu.experimental.embedding
ROOT = Path(__file__).parent / "tfrs"
VIDEO = E.TableConfig(vocabulary_size=11, dim=4, name="video/table.v1", combiner="mean")
USER = E.TableConfig(vocabulary_size=7, dim=3, name="user", combiner="sqrtn")
UNNAMED = E.TableConfig(vocabulary_size=5, dim=2, combiner="sum")
FEATURES = {
    "fav": E.FeatureConfig(table=VIDEO),
    "friends": E.FeatureConfig(table=USER),
    "tags": E.FeatureConfig(table=UNNAMED),
    "watched": E.FeatureConfig(table=VIDEO),
}
"""TensorFlow names the third table `table_2`: its place among the tables in order of flattened features is 2."""

IDS: dict[str, list[list[int]]] = {
    "fav": [[10], [0], [3]],
    "friends": [[6, 0, 6], [2], []],
    "tags": [[4, 4], [0, 1], [2]],
    "watched": [[1, 2, 3, 10], [], [5, 5]],
}
WEIGHTS: dict[str, list[list[float]]] = {
    "friends": [[0.5, 2.0, 1.0], [3.0], []],
    "watched": [[1.0, 0.25, 4.0, 1.0], [], [2.0, 6.0]],
}


class Golden:
    """One folder: a checkpoint, the truth as .npy files, and truth.json, which says what each is."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.truth: dict[str, Any] = {"tables": {}}

    def array(self, stem: str, value: Any) -> str:
        np.save(self.folder / f"{stem}.npy", np.asarray(value))
        return f"{stem}.npy"

    def table(self, name: str, value: Any, slots: dict[str, Any]) -> None:
        stem = f"table{len(self.truth['tables'])}"
        files = {slot: self.array(f"{stem}-{slot}", array) for slot, array in slots.items()}
        self.truth["tables"][name] = {"rows": self.array(stem, value), "slots": files}

    def finish(self, checkpoint: str) -> None:
        self.truth["checkpoint"] = checkpoint
        (self.folder / "truth.json").write_text(json.dumps(self.truth, indent=1, sort_keys=True) + "\n")


def randomise(variables: Any, seed: int) -> None:
    """Every value different, so that a slot or a row that is mixed up shows; above 0, as accumulators have to be."""
    rng = np.random.default_rng(seed)
    for variable in variables:
        variable.assign(rng.uniform(0.1, 1.0, variable.shape))


def layer_and_ids(optimizer: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    layer = tfrs.layers.embedding.TPUEmbedding(FEATURES, optimizer=optimizer)
    ids = {name: tf.constant([row[0] if row else 0 for row in rows]) for name, rows in IDS.items()}
    layer(ids)
    randomise((v for slots in layer._tpu_embedding._variables.values() for v in slots.values()), seed)
    return layer, ids


def add_mid_level_tables(
    golden: Golden, layer: Any, optimizer: Any = None, names: dict[str, str] | None = None
) -> None:
    """The tables and slots as the live objects hold them; those of a Keras optimizer as it calls them -> `names`."""
    for name, variables in layer._tpu_embedding._variables.items():
        slots = {slot: variable.numpy() for slot, variable in variables.items() if slot != "parameters"}
        for theirs, ours in (names or {}).items():
            slots[ours] = optimizer.get_slot(variables["parameters"], theirs).numpy()
        golden.table(name, variables["parameters"].numpy(), slots)


def no_optimizer() -> None:
    golden = Golden("no_optimizer")
    layer, _ = layer_and_ids(None, 1)
    add_mid_level_tables(golden, layer)
    tf.train.Checkpoint(layer).write(str(golden.folder / "ckpt"))
    golden.finish("ckpt")


def keras_optimizer(name: str, optimizer: Any, slots: dict[str, str], seed: int) -> None:
    """One real step of a legacy Keras optimizer, which goes into the checkpoint."""
    golden = Golden(name)
    layer, ids = layer_and_ids(optimizer, seed)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in layer(ids).values()])
    variables = layer.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    add_mid_level_tables(golden, layer, optimizer, slots)
    tf.train.Checkpoint(model=layer, optimizer=optimizer).write(str(golden.folder / "ckpt"))
    golden.finish("ckpt")


def scheduled(name: str, optimizer: Any, slots: dict[str, str], seed: int) -> None:
    """Five steps of a legacy Keras optimizer whose learning rate is a schedule, and is no variable then."""
    golden = Golden(name)
    layer, ids = layer_and_ids(optimizer, seed)
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(value) for value in layer(ids).values()])
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    add_mid_level_tables(golden, layer, optimizer, slots)
    tf.train.Checkpoint(model=layer, optimizer=optimizer).write(str(golden.folder / "ckpt"))
    golden.finish("ckpt")


def schedule() -> Any:
    return tf.keras.optimizers.schedules.PiecewiseConstantDecay([3, 5], [0.5, 0.25, 0.125])


def mid_level_optimizer(name: str, optimizer: Any, seed: int) -> None:
    golden = Golden(name)
    layer, _ = layer_and_ids(optimizer, seed)
    add_mid_level_tables(golden, layer)
    tf.train.Checkpoint(nested=tf.train.Checkpoint(tower=layer)).save(str(golden.folder / "ckpt"))
    golden.finish("ckpt-1")


def lookups() -> None:
    """Mid-level Adam, and what TFRS's layer looks up: dense, sparse and ragged ids, weighted and not."""
    golden = Golden("adam_lookups")
    layer, _ = layer_and_ids(E.Adam(0.1), 4)
    add_mid_level_tables(golden, layer)
    tf.train.Checkpoint(layer=layer).write(str(golden.folder / "ckpt"))
    ragged = {name: tf.ragged.constant(rows, tf.int64, ragged_rank=1) for name, rows in IDS.items()}
    plain = layer(ragged)
    weighted = layer(
        {name: value.to_sparse() for name, value in ragged.items()},
        {
            name: tf.ragged.constant(WEIGHTS[name], tf.float32, ragged_rank=1).to_sparse() if name in WEIGHTS else None
            for name in IDS
        },
    )
    dense = layer({name: tf.constant([rows[0][0]] * 2) for name, rows in IDS.items()})
    golden.truth["lookups"] = {
        name: {
            "table": {"fav": "video/table.v1", "friends": "user", "tags": "table_2", "watched": "video/table.v1"}[name],
            "combiner": config.table.combiner,
            "ids": IDS[name],
            "weights": WEIGHTS.get(name),
            "activations": golden.array(f"{name}-plain", plain[name]),
            "weighted_activations": golden.array(f"{name}-weighted", weighted[name]),
            "first_id_activations": golden.array(f"{name}-first", dense[name][0]),
        }
        for name, config in FEATURES.items()
    }
    golden.finish("ckpt")


def keras_model() -> None:
    """A functional model through Keras 2's `save_weights`: a `checkpoint` file, a dense layer, another key prefix."""
    golden = Golden("keras_model")
    layer = tfrs.layers.embedding.TPUEmbedding(FEATURES, optimizer=E.Adagrad(0.1))
    inputs = {name: tf.keras.Input(shape=(), dtype=tf.int32, name=name) for name in FEATURES}
    outputs = tf.keras.layers.Dense(1)(tf.concat(list(layer(inputs).values()), -1))
    model = tf.keras.Model(inputs, outputs)
    randomise((v for slots in layer._tpu_embedding._variables.values() for v in slots.values()), 6)
    add_mid_level_tables(golden, layer)
    model.save_weights(str(golden.folder / "weights"))
    golden.finish("weights")


def partial() -> None:
    """PartialTPUEmbedding: the tables up to 7 rows in Keras layers, known by their feature's name."""
    golden = Golden("partial")
    layer = tfrs.experimental.layers.embedding.PartialTPUEmbedding(FEATURES, optimizer=E.Adam(0.1), size_threshold=7)
    layer({name: tf.constant([0, 1]) for name in FEATURES})
    randomise(layer.variables, 7)
    add_mid_level_tables(golden, layer.tpu_embedding)
    for feature, keras_layer in layer.keras_embedding_layers.items():
        golden.table(feature, keras_layer.embeddings.numpy(), {})
    tf.train.Checkpoint(model=layer).write(str(golden.folder / "ckpt"))
    golden.finish("ckpt")


def main() -> None:
    legacy = tf.keras.optimizers.legacy
    no_optimizer()
    keras_optimizer("keras_adagrad", legacy.Adagrad(0.1), {"accumulator": "accumulators"}, 2)
    keras_optimizer("keras_ftrl", legacy.Ftrl(0.1), {"accumulator": "accumulators", "linear": "linears"}, 3)
    keras_optimizer("keras_adam", legacy.Adam(0.1), {"m": "momenta", "v": "velocities"}, 5)
    lookups()
    mid_level_optimizer("string_adagrad", "adagrad", 8)
    mid_level_optimizer("ftrl", E.FTRL(0.1), 9)
    keras_model()
    partial()
    scheduled("schedule_sgd", legacy.SGD(schedule()), {}, 10)
    scheduled("schedule_adagrad", legacy.Adagrad(schedule()), {"accumulator": "accumulators"}, 11)


if __name__ == "__main__":
    main()
