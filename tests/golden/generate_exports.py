"""The model of the golden exports, and its checkpoint: `python -m tests.golden.generate_exports FOLDER`.

Beside the checkpoint, truth.npz has a request, what the trained model answers, and the tables. README.md has the commands that
export the checkpoint.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

ROWS = {"users": (20, 4), "videos": (30, 4)}


def build() -> Any:
    """Dense and ragged ids, a number, two heads."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "watched": keras.Input((None,), dtype="int64", ragged=True, name="watched"),
        "age": keras.Input((1,), dtype="float32", name="age"),
    }
    features = {
        "user": FeatureConfig(TableConfig(*ROWS["users"], "users")),
        "watched": FeatureConfig(TableConfig(*ROWS["videos"], "videos", combiner="mean")),
    }
    rows = TPUEmbedding(features, optimizer="adagrad", name="embedding")({key: inputs[key] for key in features})
    joined = keras.ops.concatenate([rows["user"], rows["watched"], inputs["age"]], -1)
    hidden = keras.layers.Dense(6, activation="relu", name="hidden")(joined)
    return keras.Model(
        inputs,
        {"click": keras.layers.Dense(1, name="click")(hidden), "watch": keras.layers.Dense(2, name="watch")(hidden)},
    )


def main(folder: Path) -> None:
    """Write the checkpoint and truth.npz into `folder`."""
    random = np.random.default_rng(5)
    model = build()
    model.compile(optimizer="adam", loss="mse")
    user = random.integers(0, 20, 8)
    lists = [random.integers(0, 30, n).tolist() for n in (1, 0, 3, 2, 1, 4, 2, 1)]
    watched = tf.ragged.constant(lists, tf.int64)
    age = random.normal(size=(8, 1)).astype(np.float32)
    batch = {"user": tf.constant(user), "watched": watched, "age": tf.constant(age)}
    goals = {"click": random.normal(size=(8, 1)), "watch": random.normal(size=(8, 2))}
    model.fit(tf.data.Dataset.from_tensors((batch, goals)).repeat(3), verbose=0)
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint" / "ckpt"))
    padded = watched.to_tensor(-1).numpy()
    answers = {name: np.array(value) for name, value in model(batch).items()}
    tables = {config.name: np.array(table) for config, table in model.get_layer("embedding").embedding_tables.items()}
    arrays: dict[str, Any] = {"ids": user, "watched": padded, "age": age, **answers, **tables}
    np.savez(folder / "truth.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
