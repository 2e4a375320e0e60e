"""Strategies that the layer refuses by name, and what TensorFlow logs while a step is traced."""

import subprocess
import sys

import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

_UNSUPPORTED = """
import os, socket
import tensorflow as tf
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import keras_rs, tfrs
from tpuembed.errors import ConfigError

class Mirrored(tf.distribute.MirroredStrategy):
    pass

def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"

def parameter_server():
    cluster = tf.train.ClusterSpec({"ps": [address()], "worker": [address()], "chief": [address()]})
    servers.extend(tf.distribute.Server(cluster, job_name=job, task_index=0, protocol="grpc") for job in ("ps", "worker"))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver)

servers = []
outside = TPUEmbedding(FeatureConfig(TableConfig(3, 2, "t")), None)
strategies = {
    "one central": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0"),
    "central": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
    "subclass": lambda: Mirrored(["CPU:0"]),
    "v1": lambda: tf.compat.v1.distribute.OneDeviceStrategy("CPU:0"),
    "workers": tf.distribute.MultiWorkerMirroredStrategy,
    "parameter server": parameter_server,
}
feature = FeatureConfig(TableConfig(3, 2, "t"))
rs = keras_rs.FeatureConfig("f", keras_rs.TableConfig("t", 3, 2), (4,), (4, 2))
uses = {
    "sgd": lambda: TPUEmbedding(feature, "sgd"),
    "none": lambda: TPUEmbedding(feature, None),
    "partial": lambda: tfrs.PartialTPUEmbedding({"f": feature}, "sgd", size_threshold=None),
    "keras-rs": lambda: keras_rs.DistributedEmbedding(rs),
    "called": lambda: outside(tf.constant([1])),
}
for name, make in strategies.items():
    with make().scope():
        for use, run in uses.items():
            try:
                run()
            except ConfigError as error:
                print(name, use, " ".join(str(error).split()), sep="|")
os._exit(0)
"""


def test_a_strategy_that_is_not_supported_is_refused_by_name() -> None:
    """A ParameterServerStrategy was taken, and lost updates."""
    done = subprocess.run([sys.executable, "-u", "-c", _UNSUPPORTED], capture_output=True, text=True, timeout=240)
    said = {tuple(line.split("|")[:2]): line.split("|")[2] for line in done.stdout.splitlines() if line.count("|") == 2}
    names = {
        "one central": "CentralStorageStrategy",
        "central": "CentralStorageStrategy",
        "subclass": "Mirrored",
        "v1": "OneDeviceStrategyV1",
        "workers": "CollectiveAllReduceStrategy",
        "parameter server": "ParameterServerStrategyV2",
    }
    assert set(said) == {(name, use) for name in names for use in ("sgd", "none", "partial", "keras-rs", "called")}, (
        done.stderr[-2000:]
    )
    for (name, _), error in said.items():
        assert f".{names[name]} is not supported. Use no strategy" in error


def test_tensorflow_logs_nothing_while_a_step_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        tables = {name: TableConfig(10, width, name) for name, width in (("a", 4), ("b", 8))}
        layer = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, optimizer="sgd")
        tf.function(layer)({"a": tf.constant([1]), "b": tf.constant([2])})
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
