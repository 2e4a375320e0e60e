"""Tables as they are created: the initializer's numbers, and one copy of them in memory."""

import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

ROWS, DIM = 300_000, 32  # large enough to be filled in a graph


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.TruncatedNormal(0.5, 2.0, seed=3),
        keras.initializers.RandomUniform(-1.0, 3.0, seed=3),
        keras.initializers.GlorotNormal(seed=3),
        keras.initializers.Constant(0.25),
        lambda shape, dtype: np.random.default_rng(0).standard_normal(shape, tf.as_dtype(dtype).as_numpy_dtype),
    ],
)
@pytest.mark.sampled(3)
def test_a_large_table_begins_with_its_initializers_numbers(initializer: Any) -> None:
    options = tf.config.optimizer.get_experimental_options()
    layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, DIM, "t", initializer=initializer)))
    (rows,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(rows, initializer((ROWS, DIM), dtype=tf.float32))
    assert tf.config.optimizer.get_experimental_options() == {**options, "constant_folding": True}


_PEAK = """
import functools
import sys
from pathlib import Path
import keras
import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.backends.tpu.accelerator import ShardInitializer
def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
def host(rows):
    return TPUEmbedding(FeatureConfig(TableConfig(rows, 32, "t")), optimizer="sgd")
def tpu_v1(rows):
    create = tpu_embedding_v2.make_sharded_variable_creator(["CPU:0"])
    rows_of = functools.partial(ShardInitializer(keras.initializers.TruncatedNormal()), shape=(rows, 32), dtype=tf.float32)
    with tf.variable_creator_scope(create):
        return tf.Variable(rows_of, shape=(rows, 32), dtype=tf.float32, name="t", trainable=False)
make = {"host": host, "tpu_v1": tpu_v1}[sys.argv[1]]
keep = make(ROWS // 2)
before = peak()
table = make(4 * ROWS)
print((peak() - before) / (4 * ROWS * 32 * 4 / 1024))
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")
@pytest.mark.parametrize("where", ["host", "tpu_v1"])
def test_a_large_table_is_held_once_while_it_is_created(where: str) -> None:
    """On the host, and as TensorFlow creates a host's shard of a table of TPU v2 to v4."""
    code = _PEAK.replace("ROWS", str(ROWS))
    done = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 1.3
