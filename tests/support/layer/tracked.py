"""Train a tracking layer on N logical CPUs: `python -m tests.support.layer.tracked N FOLDER`.

A process of its own, because logical devices are made before TensorFlow starts. FOLDER/stamps.npz holds every replica's
stamps, and FOLDER/ckpt-1 is a checkpoint.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

ROWS = 13
STEPS: list[list[list[int]]] = [[[1, 2, 1], [3]], [[2], [5, 5]], [[], [7]], [[0], []]]
"""The ids of each step, by replica."""


def expected_stamps() -> Any:
    """The number of the last step of any replica that touched each row."""
    stamps = np.zeros(ROWS, np.int32)
    for number, replicas in enumerate(STEPS, 1):
        stamps[sorted({i for ids in replicas for i in ids})] = number
    return stamps


def main(replicas: int, folder: Path) -> None:
    """Train, and save."""
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, 2, "t")), "adam", track_rows=True)

    def replica_step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        return tape.gradient(loss, layer.trainable_variables)

    step = tf.function(lambda ids: strategy.run(replica_step, args=(ids,)), reduce_retracing=True)
    for ids in STEPS:
        step(
            strategy.experimental_distribute_values_from_function(
                lambda context, ids=ids: tf.constant(ids[context.replica_id_in_sync_group], tf.int64)
            )
        )
    (stamps,) = (state.stamps for state in layer.live_tables("test").states.values())
    np.savez(folder / "stamps.npz", copies=np.stack([copy.numpy() for copy in stamps.values]))
    tf.train.Checkpoint(layer=layer).save(str(folder / "ckpt"))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
