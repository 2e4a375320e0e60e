"""What decides an activation's shape, what a serving_config may name, and what from_config takes."""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError

E = tf.tpu.experimental.embedding
RAGGED = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)


def _layer(**options: Any) -> Any:
    return TPUEmbedding({"x": FeatureConfig(TableConfig(10, 4, "t"), **options)}, optimizer="sgd")


def _traced(layer: Any, spec: Any) -> Any:
    return tf.function(layer, input_signature=[{"x": spec}]).get_concrete_function().structured_outputs["x"].shape


# ---- shapes: output_shape, then build()'s, then the inputs'


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (tf.TensorSpec([None, 3], tf.int64), (2, 3, 4)),
        (tf.SparseTensorSpec([None, 3], tf.int64), (2, 4)),
        (tf.RaggedTensorSpec([None, None], tf.int64), (2, 4)),
    ],
)
def test_builds_shapes_complete_what_tracing_knows(spec: Any, shape: tuple[int, ...]) -> None:
    layer = _layer()
    layer.build({"x": (2, 3)})
    assert _traced(layer, spec) == shape


def test_builds_shapes_of_sequences() -> None:
    layer = _layer(max_sequence_length=5)
    layer.build({"x": [2, None]})
    assert _traced(layer, tf.RaggedTensorSpec([None, None], tf.int64)) == (2, 5, 4)


def test_an_output_shape_comes_first_and_builds_shape_second() -> None:
    layer = _layer(output_shape=(2, None))
    layer.build({"x": (None, 3)})
    assert _traced(layer, tf.TensorSpec([None, None], tf.int64)) == (2, 3, 4)
    assert layer({"x": keras.KerasTensor((None, None), "int64")})["x"].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("options", "built", "ids"),
    [
        ({}, (3,), tf.constant([1, 2])),
        ({}, (3, None), RAGGED),
        ({}, (2,), tf.constant([[1, 2]])),
        ({"output_shape": (3,)}, (None,), tf.constant([1, 2])),
        ({"output_shape": (3,)}, (2,), tf.constant([1, 2])),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(options: Any, built: Any, ids: Any) -> None:
    layer = _layer(**options)
    layer.build({"x": built})
    with refused(ConfigError) as error:
        layer({"x": ids})
    assert isinstance(error.value, ValueError)
    if isinstance(ids, tf.Tensor):
        with refused(ConfigError):
            layer({"x": keras.KerasTensor(tuple(ids.shape), "int64")})


def test_shapes_of_another_structure_are_refused() -> None:
    with refused(ConfigError, match="input_shape"):
        _layer().build({"y": (2,)})


def test_the_symbolic_shape_of_ragged_ids_laid_out_is_output_shapes() -> None:
    layer = _layer(output_shape=(2, 3))
    inputs = {"x": keras.Input((None,), 2, dtype="int64", ragged=True, name="x")}
    model = keras.Model(inputs, layer(inputs))
    assert model.output["x"].shape == (2, 3, 4)
    assert model({"x": RAGGED})["x"].shape == (2, 3, 4)


# ---- serving_config


def _two_tables(named: bool) -> tuple[Any, Any, Any]:
    one, two = (E.TableConfig(10, 4, name=name if named else None) for name in ("one", "two"))
    return one, two, TPUEmbedding({"a": E.FeatureConfig(one), "b": E.FeatureConfig(two)}, optimizer="sgd")


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
@pytest.mark.parametrize("named", [True, False])
def test_a_subset_of_features_keeps_its_tables(named: bool) -> None:
    """Without names, the place among the features must not be asked again: `two` would become the first table."""
    _, two, layer = _two_tables(named)
    rows = layer.embedding_tables[two].numpy()
    found = layer({"b": tf.constant([3])}, serving_config={"b": E.FeatureConfig(two)})
    np.testing.assert_array_equal(found["b"], rows[[3]])


@pytest.mark.parametrize(
    "table", [E.TableConfig(10, 4, name="two"), TableConfig(10, 4, "two"), TableConfig(10, 4, "two", optimizer="adam")]
)
def test_equal_tables_serve_whoever_made_them(table: Any) -> None:
    _, two, layer = _two_tables(named=True)
    feature = E.FeatureConfig(table) if isinstance(table, E.TableConfig) else FeatureConfig(table)
    found = layer([tf.constant([3]), (RAGGED,)], serving_config=[feature, (feature,)])
    rows = layer.embedding_tables[two].numpy()
    np.testing.assert_array_equal(found[0], rows[[3]])
    np.testing.assert_allclose(found[1][0], [rows[[1, 2]].mean(0), rows[3]], atol=1e-6)


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_an_unnamed_table_that_is_not_the_layers_is_refused() -> None:
    _, _, layer = _two_tables(named=False)
    served = {"b": E.FeatureConfig(E.TableConfig(10, 4))}
    with refused(ConfigError, match="feature 'b'"):
        layer({"b": tf.constant([3])}, serving_config=served)


def test_builds_shapes_do_not_bind_a_serving_config() -> None:
    layer = _layer()
    layer.build({"x": (2,)})
    served = {"x": FeatureConfig(TableConfig(10, 4, "t"))}
    assert layer({"x": tf.constant([1, 2, 3])}, serving_config=served)["x"].shape == (3, 4)


# ---- structures


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "structure",
    [
        lambda f: Pair(f, f),
        lambda f: {"x": Pair(f, f)},
        lambda f: {1: f},
    ],
)
def test_a_structure_that_json_would_change_is_looked_up_and_not_written(structure: Any) -> None:
    layer = TPUEmbedding(structure(FeatureConfig(TableConfig(10, 4, "t"))), optimizer="sgd")
    rows = next(iter(layer.embedding_tables.values())).numpy()
    found = tf.nest.flatten(layer(structure(np.array([3]))))
    assert found
    for activations in found:
        np.testing.assert_array_equal(activations, rows[[3]])
    with refused(ConfigError):
        layer.get_config()
