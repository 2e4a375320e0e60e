"""What keras-rs asks of its DistributedEmbedding in its own tests, asked of ours.

Source: keras_rs/src/layers/embedding/distributed_embedding_test.py of github.com/keras-team/keras-rs at 812d35b. Each test says
which of them it restates; docs/compat.md lists those that differ. Numbers are compared with numpy.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tests.support.simulated_tpu.simulation import simulated_tpu
from tpuembed.compat import keras_rs
from tpuembed.errors import ConfigError

BATCH, ROWS, HOT = 16, 23, 13
DIMS = {"feature1": 7, "feature2": 11}


def _configs(kind: str, placement: str) -> dict[str, Any]:
    """Two features of a table each; dense ones have an id per example, the others up to HOT."""
    hot = 1 if kind == "dense" else HOT
    features = {}
    for name, dim in DIMS.items():
        table = keras_rs.TableConfig(f"{name}_table", ROWS, dim, placement=placement)
        features[name] = keras_rs.FeatureConfig(name, table, (BATCH, hot), (BATCH, dim))
    return {"feature_group": features}


def _lengths(kind: str) -> list[int]:
    return [1 + example % HOT for example in range(BATCH)] if kind == "ragged" else [1] * BATCH


def _values(kind: str, seed: int, of_ids: bool) -> Any:
    """Ids, all 1, or random weights: in the form `kind`."""
    count = sum(_lengths(kind))
    random = np.random.default_rng(seed).uniform(size=count).astype(np.float32)
    values = np.ones(count, np.int32) if of_ids else random
    if kind == "dense":
        return values[:, None]
    if kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(values, _lengths(kind))
    return tf.SparseTensor([[example, example % HOT] for example in range(BATCH)], values, (BATCH, HOT))


def _batch(kind: str, of_ids: bool = True) -> dict[str, Any]:
    return {"feature_group": {name: _values(kind, seed, of_ids) for seed, name in enumerate(DIMS)}}


@pytest.mark.parametrize("placement", ["auto", "default_device", "sparsecore"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.sampled(3)
def test_basics(kind: str, placement: str) -> None:
    """Of `test_basics`: shapes, and "sparsecore" refused on a CPU. Which variables the layer has differs."""
    configs = _configs(kind, placement)
    expected = refused(ConfigError) if placement == "sparsecore" else contextlib.nullcontext()
    with expected:
        layer = keras_rs.DistributedEmbedding(configs)
        found = tf.function(layer)(_batch(kind), _batch(kind, of_ids=False))
        assert {name: tuple(rows.shape) for name, rows in found["feature_group"].items()} == {
            name: (BATCH, dim) for name, dim in DIMS.items()
        }
        tables = layer.get_embedding_tables()
        assert {name: rows.shape for name, rows in tables.items()} == {
            f"{name}_table": (ROWS, dim) for name, dim in DIMS.items()
        }


@pytest.mark.nightly
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_model_fit(kind: str, weighted: bool) -> None:
    """Of `test_model_fit`: a functional model of nested inputs, with weights or without, trains its tables in `fit`."""
    configs = _configs(kind, "default_device")
    layer = keras_rs.DistributedEmbedding(configs)

    def inputs(dtype: str) -> dict[str, Any]:
        options = {"dtype": dtype, "ragged": kind == "ragged", "sparse": kind == "sparse"}
        shapes = {name: config.input_shape[1:] for name, config in configs["feature_group"].items()}
        return {"feature_group": {name: keras.Input(shape, **options) for name, shape in shapes.items()}}

    ids, weights = inputs("int32"), inputs("float32") if weighted else None
    model = keras.Model((ids, weights) if weighted else ids, layer(ids, weights))
    model.compile("adam", "mse")
    given = (_batch(kind), _batch(kind, of_ids=False)) if weighted else _batch(kind)
    labels = {"feature_group": {name: np.ones((BATCH, dim), np.float32) for name, dim in DIMS.items()}}
    before = tf.function(model)(given)
    model.fit(tf.data.Dataset.from_tensors((given, labels)), steps_per_epoch=1, shuffle=False, verbose=0)
    after = tf.function(model)(given)
    for name in DIMS:
        assert np.abs(after["feature_group"][name] - before["feature_group"][name]).max() > 1e-4


IDS = [[1], [2, 3, 4, 5]] * (BATCH // 2)
WEIGHTS = [[1.0], [1.0, 2.0, 3.0, 4.0]] * (BATCH // 2)
ONE_ID = [[2], [3]] * (BATCH // 2)
ITS_WEIGHT = [[1.0], [2.0]] * (BATCH // 2)


def _expected(rows: Any, ids: list[list[int]], weights: list[list[float]], combiner: str) -> Any:
    out = []
    for of_ids, of_weights in zip(ids, weights, strict=True):
        total = sum(weight * rows[row].astype(np.float64) for row, weight in zip(of_ids, of_weights, strict=True))
        divisor = {"sum": 1.0, "mean": sum(of_weights), "sqrtn": math.sqrt(sum(w * w for w in of_weights))}[combiner]
        out.append(total / divisor)
    return np.array(out)


def _as(kind: str, values: Any, dtype: Any) -> Any:
    """`values`, a list per example, as tensors; sparse ones as wide as the longest, which is less than input_shape."""
    if kind == "dense of rank 1":
        return tf.constant([value for (value,) in values], dtype)
    if kind == "dense of rank 2":
        return tf.constant(values, dtype)
    ragged = tf.ragged.constant(values, dtype)
    return ragged if kind == "ragged" else ragged.to_sparse()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "jit_compile"),
    [
        *((kind, False) for kind in ("dense of rank 1", "dense of rank 2", "ragged", "sparse")),
        *((kind, True) for kind in ("dense of rank 1", "dense of rank 2", "sparse")),
    ],
)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.sampled(4)
def test_correctness(combiner: str, kind: str, weighted: bool, jit_compile: bool) -> None:
    """Of `test_correctness`, which skips ragged and sparse ids under XLA; sparse ones work here."""
    dense = kind.startswith("dense")
    table = keras_rs.TableConfig("table", ROWS, 7, combiner=combiner, placement="default_device")
    config = keras_rs.FeatureConfig("feature", table, (BATCH, 1 if dense else HOT), (BATCH, 7))
    layer = keras_rs.DistributedEmbedding(config)
    ids, weights = (ONE_ID, ITS_WEIGHT) if dense else (IDS, WEIGHTS)
    given = _as(kind, weights, tf.float32) if weighted else None
    found = tf.function(layer, jit_compile=jit_compile)(_as(kind, ids, tf.int32), given)
    ones = [[1.0] * len(of) for of in ids]
    truth = _expected(layer.get_embedding_tables()["table"], ids, weights if weighted else ones, combiner)
    assert found.shape == (BATCH, 7)
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-6)


def test_shared_table() -> None:
    """Of `test_shared_table`: three features, one table."""
    table = keras_rs.TableConfig("table1", ROWS, 7, placement="default_device")
    names = ("feature1", "feature2", "feature3")
    layer = keras_rs.DistributedEmbedding(
        {name: keras_rs.FeatureConfig(name, table, (BATCH, 1), (BATCH, 7)) for name in names}
    )
    found = tf.function(layer)({name: np.full((BATCH, 1), row, np.int32) for row, name in enumerate(names)})
    (rows,) = layer.get_embedding_tables().values()
    for row, name in enumerate(names):
        np.testing.assert_array_equal(found[name], np.broadcast_to(rows[row], (BATCH, 7)))


def test_mixed_placement() -> None:
    """Of `test_mixed_placement`, which needs a TPU; here it is simulated."""
    with simulated_tpu(replicas=2, sparse_cores=1) as strategy, strategy.scope():
        batch = BATCH * strategy.num_replicas_in_sync
        places = {
            "feature1": ("default_device", 16),
            "feature2": ("sparsecore", 32),
            "feature3": ("default_device", 64),
        }
        configs = {
            name: keras_rs.FeatureConfig(
                name, keras_rs.TableConfig(f"{name}_table", ROWS, dim, placement=place), (batch, 1), (batch, dim)
            )
            for name, (place, dim) in places.items()
        }
        layer = keras_rs.DistributedEmbedding(configs)
        ids = {name: np.arange(BATCH, dtype=np.int32)[:, None] + row for row, name in enumerate(places)}
        found = strategy.run(layer, args=(ids,))
        tables = layer.get_embedding_tables()
        for name, rows in found.items():
            for of_replica in strategy.experimental_local_results(rows):
                truth = tables[f"{name}_table"][ids[name][:, 0]]
                assert of_replica.shape == (BATCH, places[name][1])
                np.testing.assert_allclose(of_replica, truth, atol=1e-6)


def test_save_load_model(tmp_path: Path) -> None:
    """Of `test_save_load_model`: a `.keras` file gives the same model."""
    configs = _configs("dense", "default_device")
    inputs = {"feature_group": {name: keras.Input((1,), dtype="int32") for name in DIMS}}
    model = keras.Model(inputs, keras_rs.DistributedEmbedding(configs)(inputs))
    before = tf.function(model)(_batch("dense"))
    model.save(tmp_path / "model.keras")
    after = tf.function(keras.models.load_model(tmp_path / "model.keras"))(_batch("dense"))
    for name in DIMS:
        np.testing.assert_array_equal(after["feature_group"][name], before["feature_group"][name])


def test_update_stats_init() -> None:
    """Of `test_update_stats_init`: refused where JAX is not the backend."""
    with refused(ValueError, match="update_stats=True"):
        keras_rs.DistributedEmbedding(_configs("dense", "default_device"), update_stats=True)
