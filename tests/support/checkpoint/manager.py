"""Checkpoints of a directory, by TensorFlow's CheckpointManager."""

from pathlib import Path

import tensorflow as tf


def save(directory: Path, *values: float) -> list[str]:
    """Checkpoints ckpt-1, ckpt-2, ... by a CheckpointManager, each with table [1, 1] of one of `values`."""
    checkpoint = tf.train.Checkpoint(table=tf.Variable([[0.0]]))
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=100)
    paths = []
    for value in values:
        checkpoint.table.assign([[value]])
        paths.append(manager.save())
    return paths
