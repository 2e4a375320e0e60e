"""Calling the layer: structures, shapes, Keras graphs, serving_config, and input that does not fit."""

import subprocess
import sys
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, QuantizationConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError, UnknownTableError

E = tf.tpu.experimental.embedding
RAGGED = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int32)


def _layer() -> tuple[Any, Any]:
    table = TableConfig(10, 4, "t", combiner="mean")
    config = {
        "dense": FeatureConfig(table),
        "lists": [FeatureConfig(table), (FeatureConfig(table, max_sequence_length=2),)],
    }
    layer = TPUEmbedding(config, optimizer="adagrad")
    return layer, layer.embedding_tables[table]


def _inputs() -> dict[str, Any]:
    return {"dense": np.array([[1, 2], [3, 4], [5, 6]]), "lists": [RAGGED, (RAGGED.to_sparse(),)]}


def test_tfrs_code_runs_with_the_import_changed() -> None:
    one, two = E.TableConfig(10, 4, name="one"), E.TableConfig(6, 2, name="two")
    config = {"a": E.FeatureConfig(one), "b": E.FeatureConfig(one), "c": E.FeatureConfig(two)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = TPUEmbedding(config, E.Adam(0.1), pipeline_execution_with_tensor_core=True, batch_size=3)
    assert sorted(str(w.message).split()[1] for w in caught) == ["batch_size", "pipeline_execution_with_tensor_core"]
    inputs = {
        "a": keras.Input((), dtype="int32", name="a"),
        "b": keras.Input((None,), dtype="int32", ragged=True, name="b"),
        "c": keras.Input((), dtype="int32", name="c"),
    }
    rows = layer(inputs)
    assert [tuple(rows[key].shape) for key in "abc"] == [(None, 4), (None, 4), (None, 2)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate([rows["a"], rows["b"], rows["c"]], -1)))
    optimizer = keras.optimizers.SGD(0.1)
    before = {table: variable.numpy() for table, variable in layer.embedding_tables.items()}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model({"a": tf.constant([1, 2, 3]), "b": RAGGED, "c": tf.constant([0, 0, 5])}))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert set(before) == {one, two}
    changed = [np.flatnonzero((layer.embedding_tables[t].numpy() != before[t]).any(1)).tolist() for t in (one, two)]
    assert changed == [[1, 2, 3], [0, 5]]


def test_a_subclassed_model_fits() -> None:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = _layer()[0]

        def call(self, x: Any) -> Any:
            rows = self.embedding(x)
            return keras.ops.sum(rows["dense"], (1, 2)) + keras.ops.sum(rows["lists"][0], 1)

    model = Subclassed()
    model.compile("sgd", "mse")
    inputs = {"dense": _inputs()["dense"], "lists": tuple(_inputs()["lists"])}
    data = tf.data.Dataset.from_tensors((inputs, np.ones(3))).repeat(5)
    history = model.fit(data, verbose=0, shuffle=False, epochs=4).history["loss"]
    assert history[-1] < history[0]


def test_serving_config_looks_up_a_part_and_trains_nothing() -> None:
    layer, table = _layer()
    rows = table.numpy()
    served = {"only": FeatureConfig(TableConfig(10, 4, "t", combiner="sum"))}
    with tf.GradientTape() as tape:
        out = layer({"only": RAGGED}, serving_config=served)
        loss = tf.reduce_sum(out["only"])
    np.testing.assert_allclose(out["only"], [rows[[1, 2]].sum(0), np.zeros(4), rows[3]], atol=1e-6)
    assert tape.gradient(loss, layer.trainable_variables) == [None]
    np.testing.assert_array_equal(table.numpy(), rows)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"x": FeatureConfig(TableConfig(10, 4, "tt"))}, UnknownTableError),
        ({"x": FeatureConfig(TableConfig(11, 4, "t"))}, ConfigError),
    ],
)
def test_a_serving_config_of_other_tables_is_refused(config: Any, error: type[Exception]) -> None:
    with refused(error):
        _layer()[0]({"x": RAGGED}, serving_config=config)


@pytest.mark.parametrize(
    "change",
    [
        {"dense": None},
        {"dense": np.array(["a"])},
        {"lists": [RAGGED]},
        {"extra": np.array([1])},
        {"lists": RAGGED},
    ],
)
def test_features_of_another_structure_are_refused_by_path(change: dict[str, Any]) -> None:
    with refused((ConfigError, ValueError)):
        _layer()[0]({**_inputs(), **change})


@pytest.mark.parametrize(
    "arguments",
    [
        {"feature_config": {}},
        {"feature_config": {"x": 3}},
        {"embedding_feature": "V2"},
        {"size_threshold": -1},
        {"optimizer": "adamw"},
        {"feature_config": FeatureConfig(TableConfig(3, 2, "t", quantization_config=QuantizationConfig(4, 0.0, 1.0)))},
    ],
)
def test_a_constructor_argument_that_cannot_be_honoured_is_refused(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        TPUEmbedding(**{"feature_config": {"x": FeatureConfig(TableConfig(3, 2, "t"))}, **arguments})


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
