"""Two small tables that are trained, saved and restored in branches."""

import itertools
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding

ROWS = 4
SAMPLES = 8
"""Of a batch for SparseCores."""
_numbers = itertools.count()


def make(track_rows: bool = True) -> TPUEmbedding:
    tables = [TableConfig(ROWS, 2, name) for name in "ab"]
    return TPUEmbedding([FeatureConfig(table) for table in tables], SGD(learning_rate=0.37), track_rows=track_rows)


def make_in_sparse_cores(strategy: Any) -> TPUEmbedding:
    tables = [TableConfig(ROWS, 2, name) for name in "ab"]
    with strategy.scope():
        features = [FeatureConfig(table, output_shape=(SAMPLES,)) for table in tables]
        return TPUEmbedding(features, SGD(learning_rate=0.37), track_rows=True)


def step(layer: TPUEmbedding, ids: list[int], strategy: Any = None) -> None:
    def run(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(rows * rows + rows) for rows in layer(ids))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    if strategy is None:
        run([tf.constant(ids), tf.constant(ids[:1])])
    else:
        strategy.run(run, args=([tf.constant((ids * SAMPLES)[:SAMPLES]), tf.constant(ids[:1] * SAMPLES)],))


def rows_of(layer: TPUEmbedding) -> dict[str, Any]:
    return {config.name: table.numpy().copy() for config, table in layer.embedding_tables.items()}


def write_save(layer: TPUEmbedding, kind: str, folder: Path) -> tuple[str, str]:
    path = folder / f"save-{next(_numbers)}"
    if kind == "h5":
        inputs = [keras.Input((), dtype="int64") for _ in range(2)]
        keras.Model(inputs, layer(inputs)).save_weights(f"{path}.weights.h5")
        return kind, f"{path}.weights.h5"
    if kind == "untracked":
        other = make(track_rows=False)
        other.updates.assign(layer.updates)
        for config, table in other.embedding_tables.items():
            table.assign(rows_of(layer)[config.name])
        layer = other
    return kind, tf.train.Checkpoint(layer=layer).write(str(path))


def restore(layer: TPUEmbedding, kind: str, path: str) -> None:
    if kind == "h5":
        inputs = [keras.Input((), dtype="int64") for _ in range(2)]
        keras.Model(inputs, layer(inputs)).load_weights(path)
    else:
        tf.train.Checkpoint(layer=layer).read(path).expect_partial()
