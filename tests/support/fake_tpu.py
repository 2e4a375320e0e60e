"""A TPUStrategy over TPUs that are not there: steps can be traced for it, never run.

The topology is made up, the strategy is TensorFlow's own. Everything happens in a graph: nothing may be placed on a device.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2

from tpuembed.testing.simulation import FakeCluster

__all__ = ["fake_tpu"]


@contextlib.contextmanager
def fake_tpu(feature: str, replicas: int = 1, sparse_cores: int = 4) -> Iterator[Any]:
    """A graph, and a TPUStrategy in it whose TPUs have the embedding hardware `feature`: UNSUPPORTED, V1 or V2."""
    with tf.Graph().as_default(), mock.patch.object(tpu_embedding_v2.tpu_ops, "is_tpu_embedding_initialized", bool):
        cluster = FakeCluster(feature, replicas, sparse_cores)
        yield tf.distribute.TPUStrategy(cluster, experimental_device_assignment=cluster.assignment())
