"""A training whose vocabulary grows, which saves and exports after some steps, to be killed.

`python -m tests.support.killed_names FOLDER RUN` continues what earlier runs left. Each run trains other names, so that a run that
restores an old step has another history than the exports of the run before.
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_model

ROWS, STEPS = 400, 1000
EXPORTED_EVERY, SAVED_EVERY, EVICTED_EVERY, MOST_AGE = 3, 2, 7, 5
CLOCK = b"clock"
"""A name that each step trains."""


def make_layer() -> TPUEmbedding:
    table = TableConfig(ROWS, 2, "names", initializer=keras.initializers.Ones(), optimizer=SGD(1.0))
    feature = FeatureConfig(table, vocabulary=Vocabulary(oov_buckets=1, grows=True))
    return TPUEmbedding({"f": feature}, track_rows=True, name="embedding")


def names_of(step: int, run: int) -> list[bytes]:
    """Return the names that a step trains, once each."""
    return [
        CLOCK,
        *(b"name %d" % number for number in np.random.default_rng([step, run]).choice(300, 9, replace=False)),
    ]


def truth_of(history: list[int]) -> dict[bytes, float]:
    """Return the value of each name's row after steps 1, 2, ... of the runs in `history`."""
    values: dict[bytes, float] = {}
    last: dict[bytes, int] = {}
    for step, run in enumerate(history, 1):
        for name in names_of(step, run):
            values[name], last[name] = values.get(name, 1.0) - 1, step
        if step % EVICTED_EVERY == 0:
            for name in [name for name in values if last[name] <= step - MOST_AGE]:
                del values[name]
    return values


def restored(folder: Path) -> tuple[TPUEmbedding, tf.Variable, tf.train.CheckpointManager]:
    """Return the layer, the runs of its steps, and the manager, after restoring the newest checkpoint."""
    layer, runs = make_layer(), tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
    layer.build(None)
    checkpoint = tf.train.Checkpoint(layer=layer, runs=runs)
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=2)
    manager.restore_or_initialize()
    return layer, runs, manager


def main(folder: Path, run: int) -> None:
    """Train until it is killed."""
    layer, runs, manager = restored(folder)
    vocabulary = layer.vocabularies["names"]
    while len(runs.numpy()) < STEPS:
        step = len(runs.numpy()) + 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"f": tf.constant(names_of(step, run))}, training=True)["f"])
        tape.gradient(loss, layer.trainable_variables)
        if step % EVICTED_EVERY == 0:
            vocabulary.evict(not_seen_for=MOST_AGE, update=step)
        runs.assign(tf.concat([runs, [run]], 0))
        if step % EXPORTED_EVERY == 0:
            newest = max([int(path.name) for path in (folder / "m").glob("[0-9]*")], default=0)
            with open(folder / "log", "a") as log:
                log.write(json.dumps([newest + 1, runs.numpy().tolist()]) + "\n")
            delta: dict[str, Any] = {"base": newest, "max_overlay": 0.9} if newest else {}
            export_model(layer, folder / "m", layout="mmap", version=newest + 1, **delta)
        if step % SAVED_EVERY == 0:
            manager.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
