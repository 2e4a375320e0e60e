"""keras-rs' names with their meanings; activations and updates against the formulas written out in numpy."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import SGD, export_saved_model
from tpuembed.compat.keras_rs import DistributedEmbedding, FeatureConfig, TableConfig
from tpuembed.errors import ConfigError
from tpuembed.testing import simulated_tpu

BATCH, DIM = 4, 2
ROWS = np.arange(20, dtype=np.float32).reshape(10, DIM) + 1
tf_embedding = tf.tpu.experimental.embedding


def table(name: str = "t", **fields: Any) -> TableConfig:
    return TableConfig(name, 10, DIM, **fields)


def feature(of: TableConfig, hot: int | None = None, out: tuple[int | None, ...] = (BATCH, DIM)) -> FeatureConfig:
    return FeatureConfig("f", of, (BATCH,) if hot is None else (BATCH, hot), out)


def layer_of(config: FeatureConfig, **arguments: Any) -> DistributedEmbedding:
    layer = DistributedEmbedding(config, **arguments)
    layer.set_embedding_tables({config.table.name: ROWS})
    return layer


# ---- configs


def test_defaults_are_keras_rss() -> None:
    config = table()
    assert (config.optimizer, config.combiner, config.placement) == ("adam", "mean", "auto")
    assert (config.max_ids_per_partition, config.max_unique_ids_per_partition) == (256, 256)
    initializer = config.initializer.get_config()
    assert type(config.initializer) is keras.initializers.VarianceScaling
    assert (initializer["mode"], initializer["scale"], initializer["distribution"]) == (
        "fan_out",
        1.0,
        "truncated_normal",
    )


def test_two_tables_begin_differently() -> None:
    layer = DistributedEmbedding([feature(table("a")), feature(table("b"))])
    found = layer.get_embedding_tables()
    assert not np.array_equal(found["a"], found["b"])
    assert found["a"].std() > 0


def of_shapes(given: Any, out: Any) -> FeatureConfig:
    return FeatureConfig("clicks", table(), given, out)


def layer_with(**arguments: Any) -> DistributedEmbedding:
    return DistributedEmbedding(feature(table()), **arguments)


def of_tensorflow() -> Any:
    theirs = tf_embedding.TableConfig(10, DIM, name="t", optimizer=tf_embedding.SGD(0.1))
    return tf_embedding.FeatureConfig(theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: table(optimizer="rmsprop"),
        lambda: table(optimizer=keras.optimizers.RMSprop()),
        lambda: table(optimizer=keras.optimizers.SGD(nesterov=True, momentum=0.1)),
        lambda: table(optimizer=keras.optimizers.Adam(weight_decay=0.1)),
        lambda: table(placement="tpu"),
        lambda: table(combiner="max"),
        lambda: table(max_ids_per_partition=0),
        lambda: table(max_unique_ids_per_partition=1.5),
        lambda: table(initializer=3),
        lambda: TableConfig("t", 10, 0),
        lambda: TableConfig("t", 10, "x"),  # type: ignore[arg-type]
        lambda: of_shapes((4,), (4, 3)),
        lambda: of_shapes((4,), (4,)),
        lambda: of_shapes((4, 5, 6), (4, 2)),
        lambda: of_shapes((4,), (8, 2)),
        lambda: of_shapes((4, 5), (4, 6, 2)),
        lambda: of_shapes(4, (4, 2)),
        lambda: of_shapes((4.0,), (4, 2)),
        lambda: FeatureConfig("f", 3, (4,), (4, 2)),  # type: ignore[arg-type]
        lambda: layer_with(update_stats=True),
        lambda: layer_with(table_stacking=[["t", "u"]]),
        lambda: layer_with(table_stacking="none"),
        lambda: layer_with(sparse_core_embedding_config=3),
        lambda: layer_with(optimizer="rmsprop"),
        lambda: DistributedEmbedding([feature(table()), of_tensorflow()]),
        lambda: DistributedEmbedding({}),
        lambda: DistributedEmbedding(feature(table(placement="sparsecore"))),
        lambda: DistributedEmbedding(feature(table(optimizer=None))),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(make: Any) -> None:
    with refused(ConfigError):
        make()


# ---- lookups


def combined(ids: list[list[int]], weights: list[list[float]], combiner: str) -> Any:
    """Keras-rs: sum of w row, divided by sum of w (mean) or by its norm (sqrtn)."""
    out = np.zeros((len(ids), DIM))
    for row, (of_ids, of_weights) in enumerate(zip(ids, weights, strict=True)):
        out[row] = sum((w * ROWS[i] for i, w in zip(of_ids, of_weights, strict=True)), np.zeros(DIM))
        divisor = {"sum": 1.0, "mean": sum(of_weights), "sqrtn": np.sqrt(np.square(of_weights).sum())}[combiner]
        out[row] /= divisor or 1.0
    return out


DENSE = [[1, 2, 2], [0, 9, 3], [4, 4, 4], [5, 6, 7]]
WEIGHTS = [[1.0, 0.5, 2.0], [3.0, 1.0, 1.0], [0.5, 0.5, 0.25], [1.0, 2.0, 3.0]]
ONES = [[1.0] * 3] * 4


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_the_weight_of_a_single_id_counts_in_a_sum_alone(combiner: str) -> None:
    layer, ids, weights = layer_of(feature(table(combiner=combiner))), [1, 2, 3, 9], [2.0, -1.0, 0.0, 0.5]
    found = layer(np.array(ids), np.array(weights, np.float32))
    truth = ROWS[ids] * (np.array(weights)[:, None] if combiner == "sum" else 1.0)
    np.testing.assert_allclose(found, truth, rtol=1e-6)


def test_ids_that_are_not_combined_keep_their_place() -> None:
    layer = layer_of(feature(table(), 3, (BATCH, 3, DIM)))
    np.testing.assert_array_equal(layer(np.array(DENSE)), ROWS[np.array(DENSE)])


def test_ragged_ids_are_cut_at_the_input_shape() -> None:
    layer = layer_of(feature(table(combiner="sum"), 2))
    ids = tf.ragged.constant([[1, 2, 3], [4], [], [5, 5]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 2.0, 9.0], [3.0], [], [1.0, 1.0]])
    np.testing.assert_allclose(layer(ids), combined([[1, 2], [4], [], [5, 5]], [[1, 1], [1], [], [1, 1]], "sum"))
    truth = combined([[1, 2], [4], [], [5, 5]], [[1, 2], [3], [], [1, 1]], "sum")
    np.testing.assert_allclose(layer(ids, weights), truth)


def test_nested_structures_and_preprocessed_inputs() -> None:
    shared = table()
    configs = {"a": feature(shared), "b": [feature(shared, 3), feature(table("u", placement="default_device"))]}
    layer = DistributedEmbedding(configs)
    layer.set_embedding_tables({"t": ROWS, "u": -ROWS})
    inputs = {"a": np.array([0, 1, 2, 3]), "b": [np.array(DENSE), np.array([9, 8, 7, 6])]}
    for given in (inputs, layer.preprocess(inputs)):
        found = layer(given)
        np.testing.assert_array_equal(found["a"], ROWS[:4])
        np.testing.assert_allclose(found["b"][0], combined(DENSE, ONES, "mean"), rtol=1e-6)
        np.testing.assert_array_equal(found["b"][1], -ROWS[[9, 8, 7, 6]])
    assert list(layer.preprocess(inputs)) == ["preprocessed_inputs_per_placement"]
    assert set(layer.preprocess(inputs)["preprocessed_inputs_per_placement"]) == {"default_device"}


@pytest.mark.parametrize("ids", [np.zeros((BATCH, 4), int), np.zeros(BATCH, int)])
def test_ids_of_another_shape_are_refused(ids: Any) -> None:
    with refused(ConfigError, match="feature 'f'"):
        layer_of(feature(table(), 3))(ids)


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_ids_of_a_batch_are_those_of_one_column(combiner: str) -> None:
    layer, ids, weights = layer_of(feature(table(combiner=combiner), 1)), np.array([1, 2, 3, 9]), [2.0, -1.0, 0.5, 0.5]
    np.testing.assert_array_equal(layer(ids), layer(ids[:, None]))
    given = np.array(weights, np.float32)
    np.testing.assert_array_equal(layer(ids, given), layer(ids[:, None], given[:, None]))
    apart = layer_of(feature(table(combiner=combiner), 1, (BATCH, 1, DIM)))
    np.testing.assert_array_equal(apart(ids), ROWS[ids][:, None])
    with refused(ConfigError, match=r"\(3,\)"):
        layer(ids, given[:3])


def test_pythons_lists_are_ids_and_weights() -> None:
    layer = layer_of(feature(table(combiner="sum"), 3))
    truth = combined(DENSE, WEIGHTS, "sum")
    np.testing.assert_allclose(layer(DENSE, WEIGHTS), truth, rtol=1e-6)
    np.testing.assert_allclose(layer(layer.preprocess(DENSE, WEIGHTS)), truth, rtol=1e-6)
    with refused(ConfigError):
        layer([[1], [2, 3], [4], [5]])


def test_sparse_ids_may_be_narrower_than_the_input_shape_and_not_wider() -> None:
    layer = layer_of(feature(table(combiner="sum"), 3))
    values = tf.constant([1, 2], tf.int64)
    narrow = tf.SparseTensor([[0, 0], [3, 1]], values, [BATCH, 2])
    np.testing.assert_array_equal(layer(narrow), np.stack([ROWS[1], 0 * ROWS[0], 0 * ROWS[0], ROWS[2]]))
    with refused(ConfigError, match=r"\(4, 4\)"):
        layer(tf.SparseTensor([[0, 0], [3, 1]], values, [BATCH, 4]))


def test_another_batch_is_not_refused() -> None:
    assert layer_of(feature(table(), 3))(np.zeros((7, 3), int)).shape == (7, DIM)


def test_weights_of_another_shape_are_refused() -> None:
    with refused(ConfigError, match="feature 'f'"):
        layer_of(feature(table(), 3))(np.array(DENSE), np.ones(4, np.float32))


def test_symbolic_calls_know_their_shapes() -> None:
    shared = table()
    inputs = {"one": keras.Input((), dtype="int64", name="one"), "many": keras.Input((3,), dtype="int64", name="many")}
    configs = {"one": feature(shared), "many": feature(shared, 3)}
    layer = DistributedEmbedding(configs)
    outputs = layer(inputs)
    assert {name: output.shape for name, output in outputs.items()} == {"one": (None, DIM), "many": (None, DIM)}
    assert layer.compute_output_shape(None) == {"one": (BATCH, DIM), "many": (BATCH, DIM)}
    layer.set_embedding_tables({"t": ROWS})
    found = keras.Model(inputs, outputs)({"one": np.array([1, 2, 3, 4]), "many": np.array(DENSE)})
    np.testing.assert_array_equal(found["one"], ROWS[1:5])


# ---- training


@pytest.mark.parametrize("placement", ["auto", "default_device"])
def test_a_tables_optimizer_trains_it_wherever_it_is(placement: str) -> None:
    """Keras-rs leaves such a table to the model's optimizer off the TPU."""
    layer = layer_of(feature(table(optimizer=keras.optimizers.SGD(0.5), placement=placement, combiner="sum"), 3))
    model = keras.Sequential([layer])
    model.compile("adam", loss=lambda _, y: keras.ops.sum(y, -1) * BATCH)
    model.fit(np.array(DENSE), np.zeros((BATCH, DIM)), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
    counts = np.bincount(np.array(DENSE).ravel(), minlength=10)
    np.testing.assert_allclose(layer.get_embedding_tables()["t"], ROWS - 0.5 * counts[:, None], rtol=1e-6)


def test_the_layers_optimizer_is_for_tables_without() -> None:
    config = feature(table(optimizer=None))
    layer = layer_of(config, optimizer=SGD(learning_rate=1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([1, 2, 3, 4])))
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    np.testing.assert_allclose(layer.get_embedding_tables()["t"][1:5], ROWS[1:5] - 1)


def test_the_sparsecore_placement_needs_sparse_cores() -> None:
    with (
        fake_tpu("UNSUPPORTED") as strategy,
        strategy.scope(),
        refused(ConfigError, match="placement 'sparsecore'"),
    ):
        DistributedEmbedding(feature(table(placement="sparsecore")))


# ---- saving


@pytest.mark.parametrize(
    "optimizer",
    ["ftrl", keras.optimizers.Adam(0.25), SGD(learning_rate=0.5), tf_embedding.Adagrad(0.1), keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))],
)  # fmt: skip
def test_config_round_trip(optimizer: Any) -> None:
    shared = table(optimizer=optimizer, max_ids_per_partition=7, placement="default_device")
    configs = {"a": feature(shared), "b": [feature(shared, 3), feature(table("u", initializer="ones"))]}
    layer = DistributedEmbedding(configs, table_stacking=None, name="de")
    config = layer.get_config()
    assert [each["name"] for each in config["tables"]] == ["t", "u"]
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == config
    assert set(again.get_embedding_tables()) == {"t", "u"}


class Tower(keras.Model):
    """The tutorial's kind of model."""

    def __init__(self, configs: Any) -> None:
        super().__init__()
        self.embedding_layer, self.ratings = DistributedEmbedding(configs), keras.layers.Dense(1)

    def call(self, features: Any) -> Any:
        return self.ratings(self.embedding_layer(features)["x"])


def test_an_export_needs_no_hardware_for_the_sparsecore_placement(tmp_path: Path) -> None:
    trained = Tower({"x": feature(table())})
    ids = np.array([1, 2, 3, 4])
    truth = trained({"x": ids}).numpy()
    prefix = tf.train.Checkpoint(model=trained).write(str(tmp_path / "ckpt"))

    def build() -> Any:
        model = Tower({"x": feature(table(placement="sparsecore"))})
        return model, {"x": tf.TensorSpec([None], tf.int64, "x")}

    report = export_saved_model(prefix, tmp_path / "served", model=build)
    served = tf.saved_model.load(report.path).signatures["serving_default"](x=tf.constant(ids, tf.int64))
    np.testing.assert_allclose(next(iter(served.values())), truth, rtol=1e-6)


# ---- on TPUs, traced


def trace(hardware: str, configs: Any, ids: Any, replicas: int = 2, **arguments: Any) -> Any:
    """The ops of a training step, and the layer."""
    with fake_tpu(hardware, replicas) as strategy:
        with strategy.scope():
            layer = DistributedEmbedding(configs, **arguments)

        def step(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(each) for each in tf.nest.flatten(layer(ids))])
            gradients = tape.gradient(loss, layer.trainable_variables)
            layer.apply_gradients(gradients)
            return gradients

        strategy.run(step, args=(ids(),))
        return list(tf.compat.v1.get_default_graph().as_graph_def().node), layer


def placeholders() -> dict[str, Any]:
    return {"a": tf.compat.v1.placeholder(tf.int32, [8]), "b": tf.compat.v1.placeholder(tf.int32, [8, 3])}


def tpu_configs(**fields: Any) -> dict[str, FeatureConfig]:
    a, b = TableConfig("ta", 100, 8, **fields), TableConfig("tb", 50, 8, **fields)
    return {"a": FeatureConfig("a", a, (16,), (16, 8)), "b": FeatureConfig("b", b, (16, 3), (16, 8))}


@pytest.mark.parametrize("placement", ["auto", "sparsecore"])
def test_sparse_cores_take_the_global_batch_and_the_limits(placement: str) -> None:
    configs = tpu_configs(placement=placement, max_ids_per_partition=10, max_unique_ids_per_partition=6)
    nodes, layer = trace("V2", configs, placeholders)
    (lookup,) = [node for node in nodes if node.op == "XlaSparseDenseMatmulWithStaticBufferSize"]
    assert lookup.attr["max_ids_per_sparse_core"].i == 20  # of the two tables that are stacked
    assert lookup.attr["max_unique_ids_per_sparse_core"].i == 12
    assert lookup.attr["input_size"].i == 16  # two features of 8 examples, one replica's
    assert layer.part("default_device") is None
    rows = [node for node in nodes if node.op == "ConvertToListOfSparseCoreCooTensors"]
    assert {node.attr["sample_count"].i for node in rows} == {8}


@pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning")  # TensorFlow calls it
def test_table_stacking_none_stacks_none() -> None:
    nodes, _ = trace("V2", tpu_configs(), placeholders, table_stacking=None)
    assert sum(node.op == "XlaSparseDenseMatmulWithStaticBufferSize" for node in nodes) == 2


def test_placements_are_mixed_on_simulated_sparse_cores() -> None:
    with simulated_tpu(replicas=2, sparse_cores=1) as strategy, strategy.scope():
        batch = 16 * strategy.num_replicas_in_sync
        places = {
            "feature1": ("default_device", 16),
            "feature2": ("sparsecore", 32),
            "feature3": ("default_device", 64),
        }
        configs = {
            name: FeatureConfig(name, TableConfig(f"{name}_table", 23, dim, placement=place), (batch, 1), (batch, dim))
            for name, (place, dim) in places.items()
        }
        layer = DistributedEmbedding(configs)
        ids = {name: np.arange(16, dtype=np.int32)[:, None] + row for row, name in enumerate(places)}
        found = strategy.run(layer, args=(ids,))
        tables = layer.get_embedding_tables()
        for name, rows in found.items():
            for of_replica in strategy.experimental_local_results(rows):
                truth = tables[f"{name}_table"][ids[name][:, 0]]
                assert of_replica.shape == (16, places[name][1])
                np.testing.assert_allclose(of_replica, truth, atol=1e-6)


def ragged_ids() -> dict[str, Any]:
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    return {"a": tf.RaggedTensor.from_row_splits(ids, tf.compat.v1.placeholder(tf.int64, [9]))}


def test_older_tpus_refuse_ids_that_the_layer_would_have_to_change() -> None:
    with refused(ConfigError, match="feature 'b'"):
        trace("V1", tpu_configs(), placeholders)
    cut = {"a": FeatureConfig("a", TableConfig("ta", 100, 8), (16, 3), (16, 8))}
    with refused(ConfigError, match="feature 'a'"):
        trace("V1", cut, ragged_ids)
    nodes, _ = trace("V1", {"a": dataclasses.replace(cut["a"], input_shape=(16, None))}, ragged_ids)
    assert any(node.op == "EnqueueTPUEmbeddingArbitraryTensorBatch" for node in nodes)


def test_tpus_without_embedding_hardware_replicate() -> None:
    _, layer = trace("UNSUPPORTED", tpu_configs(), placeholders)
    assert layer.part("sparsecore") is None


def test_a_global_batch_that_replicas_cannot_share_is_refused() -> None:
    with (
        fake_tpu("V2", 3) as strategy,
        strategy.scope(),
        refused(ConfigError),
    ):
        DistributedEmbedding(tpu_configs())


def test_two_tables_of_one_name_are_refused_wherever_they_are_placed() -> None:
    def build() -> DistributedEmbedding:
        return DistributedEmbedding(
            [feature(table("t")), feature(TableConfig("t", 7, DIM, placement="default_device"))]
        )

    with refused(ConfigError, match="'t'"):
        build()
    with (
        fake_tpu("V2") as strategy,
        strategy.scope(),
        refused(ConfigError, match="'t'"),
    ):
        build()
