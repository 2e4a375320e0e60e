"""Ids, names and compilers at their limits."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError


def _layer(optimizer: Any = "sgd", **tables: str) -> Any:
    features = {key: FeatureConfig(TableConfig(4, 2, name)) for key, name in (tables or {"x": "t"}).items()}
    return TPUEmbedding(features, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_xla_answers_no_neighbours_row_for_an_id_outside_the_table(optimizer: Any) -> None:
    layer = _layer(optimizer)
    (table,) = layer.embedding_tables.values()
    rows = tf.function(layer, jit_compile=True)({"x": tf.constant([1, 4, -1, 3])})["x"].numpy()
    assert np.isnan(rows[1:3]).all()
    np.testing.assert_array_equal(rows[[0, 3]], table.numpy()[[1, 3]])


@pytest.mark.parametrize("optimizer", ["sgd", None])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_an_unsigned_id_beyond_int64_is_not_taken_for_padding(kind: str, optimizer: Any) -> None:
    ragged = tf.ragged.constant([[1], [2**63 + 5]], dtype=tf.uint64)
    ids = {"dense": ragged.to_tensor()[:, 0], "ragged": ragged, "sparse": ragged.to_sparse()}[kind]
    with pytest.raises(tf.errors.InvalidArgumentError):
        _layer(optimizer)({"x": ids})


def test_ids_of_unknown_rank_are_refused_with_the_remedy() -> None:
    layer = _layer()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def look_up(ids: Any) -> Any:
        return layer({"x": ids})["x"]

    with refused(ConfigError, match="feature 'x'"):
        look_up(tf.constant([1], tf.int64))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"a": "t", "b": "t/momenta"}, "'t/momenta' would be saved over 't/momenta'"),
        ({"a": "x/y", "b": "x|y"}, "'x|y' would be saved over 'x/y'"),
        ({"a": "/updates"}, "'/updates' would be saved over the layer's count of updates"),
        ({"a": "_sparse_core_table_layouts"}, "would be saved over how tables lie in SparseCores"),
        ({"a": "_engine"}, "'_engine' would be saved over the accelerator's own variables"),
        ({"a": "."}, "'.' would be saved over all of a layer's variables"),
    ],
)
def test_two_variables_are_never_saved_under_one_name(tables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _layer("adam", **tables)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("way", ["eager", "graph", "XLA"])
def test_float_ids_that_are_no_row_numbers_are_refused(kind: str, way: str) -> None:
    """NaN and infinity became 0 or padding, 3.9999 row 3. XLA has no errors: there the rows are NaN."""
    layer = _layer()
    rows = next(iter(layer.embedding_tables.values())).numpy()

    def look_up(values: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_splits(values, [0, 1, 2])
        sparse = tf.SparseTensor([[0, 0], [1, 0]], values, [2, 1])
        return layer({"x": {"dense": values, "ragged": ragged, "sparse": sparse}[kind]})["x"]

    call = {"eager": look_up, "graph": tf.function(look_up), "XLA": tf.function(look_up, jit_compile=True)}[way]
    np.testing.assert_array_equal(call(tf.constant([3.0, -0.0])), rows[[3, 0]])
    for bad in (np.nan, np.inf, -np.inf, -1.0, 0.5, -0.5, 3.9999, 1e30):
        if way == "XLA":
            found = call(tf.constant([3.0, bad])).numpy()
            np.testing.assert_array_equal(found[0], rows[3])
            assert np.isnan(found[1]).all(), bad
        else:
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="feature x: float ids must be whole numbers from 0; got"
            ):
                call(tf.constant([3.0, bad]))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
@pytest.mark.parametrize("kind", ["dense", "matrix", "ragged", "sparse"])
def test_a_batch_without_ids_compiles_and_changes_nothing(kind: str, optimizer: Any) -> None:
    features = {"x": FeatureConfig(TableConfig(4, 2, "t")), "y": FeatureConfig(TableConfig(4, 2, "u"))}
    layer = TPUEmbedding(features, optimizer=optimizer)
    before = {config.name: table.numpy() for config, table in layer.embedding_tables.items()}
    none = tf.zeros([0], tf.int64)
    ids = {
        "dense": none,
        "matrix": tf.zeros([0, 3], tf.int64),
        "ragged": tf.RaggedTensor.from_row_splits(none, [0, 0, 0]),
        "sparse": tf.SparseTensor(tf.zeros([0, 2], tf.int64), none, [2, 3]),
    }[kind]

    @tf.function(jit_compile=True)
    def step() -> Any:
        with tf.GradientTape() as tape:
            found = layer({"x": ids, "y": tf.constant([1])})
            loss = tf.reduce_sum(found["x"]) + tf.reduce_sum(found["y"])
        gradients = tape.gradient(loss, layer.trainable_variables)
        if optimizer is not None:
            layer.apply_gradients(gradients)
        return found["x"]

    found = step()
    assert found.shape == {"dense": (0, 2), "matrix": (0, 3, 2), "ragged": (2, 2), "sparse": (2, 2)}[kind]
    assert not found.numpy().any()
    for config, table in layer.embedding_tables.items():
        if config.name == "t" or optimizer is None:
            np.testing.assert_array_equal(table, before[config.name])
        else:
            assert (table.numpy()[1] != before[config.name][1]).all()


def test_a_step_traced_before_xla_compiles_it_is_refused_where_it_would_be_wrong() -> None:
    """XLA gives wrong unique ids of those that are left when negative ones are dropped."""
    layer = _layer()
    indices, shape = [[0, 0], [0, 1], [1, 0]], [2, 2]

    def step(values: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"x": tf.SparseTensor(indices, values, shape)})["x"])
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    values = tf.constant([1, -1, 1], tf.int64)
    traced = tf.function(step)
    traced(values)
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced_before_jit_compile__decorate_the_inner_function"):
        tf.function(lambda: traced(values), jit_compile=True)()
    tf.function(step, jit_compile=True)(values)
