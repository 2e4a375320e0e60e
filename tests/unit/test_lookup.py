"""What no layer shows of its lookups: gradients of rows, and how much of a graph features share."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig
from tpuembed.lookup import FlatIds, gather_grouped, ids_of
from tpuembed.lookup.pooling import AdjacentSegments

TABLE = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
RAGGED = tf.ragged.constant([[3, 1, 3], [], [7], [0, 19]], dtype=tf.int64)
WEIGHTS = tf.ragged.constant([[0.5, 2.0, 1.0], [], [3.0], [0.25, 0.0]], dtype=tf.float32)


def _flat(ids: object, weights: object, combiner: str, **options: Any) -> FlatIds:
    return ids_of("x", FeatureConfig(TableConfig(20, 4, "t", combiner), **options), ids, weights).flatten()


def test_sums_of_lists_share_their_functions() -> None:
    width, count = 11, tf.constant(3, tf.int64)
    rows = tf.constant(np.arange(3 * width, dtype=np.float32).reshape(3, width))
    found = AdjacentSegments(tf.constant([0, 0, 2], tf.int64), count).add(rows)
    np.testing.assert_array_equal(found, [rows[0] + rows[1], np.zeros(width), rows[2]])

    @tf.function(input_signature=[tf.TensorSpec([None, width]), tf.TensorSpec([None], tf.int64)], autograph=False)
    def add(rows: Any, segments: Any) -> list[Any]:
        return [AdjacentSegments(ids, count).add(rows) for ids in (segments, 2 - segments)]

    functions = add.get_concrete_function().graph.as_graph_def().library.function
    assert len(functions) == 2  # for segments in order, and for others
    first, second = add(rows, tf.constant([0, 0, 2], tf.int64))
    np.testing.assert_array_equal(first, found)
    np.testing.assert_array_equal(second, [rows[2], np.zeros(width), rows[0] + rows[1]])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["ragged", "sparse", "dense", "sequence"])
def test_spread_is_the_gradient_that_tensorflow_takes(kind: str, combiner: str) -> None:
    dense = tf.constant([3, 3, 1], tf.int64)
    ids = {"ragged": RAGGED, "sparse": RAGGED.to_sparse(), "dense": dense, "sequence": RAGGED}[kind]
    weights = {"ragged": WEIGHTS, "sparse": WEIGHTS.to_sparse()}.get(kind)
    flat = _flat(ids, weights, combiner, max_sequence_length=2 if kind == "sequence" else 0)
    rows = tf.gather(TABLE, flat.row_ids())
    with tf.GradientTape() as tape:
        tape.watch(rows)
        activations = flat.combine(rows)
    upstream = tf.random.stateless_normal(activations.shape, [1, 2])
    truth = tape.gradient(activations, rows, upstream)
    keep = (flat.ids >= 0)[:, None]
    np.testing.assert_allclose(tf.where(keep, flat.spread(upstream), 0.0), truth, atol=1e-6)


def test_features_of_one_group_share_one_gather() -> None:
    calls: list[tuple[str, int]] = []

    def gather(group: str, ids: tf.Tensor) -> tf.Tensor:
        calls.append((group, int(tf.size(ids))))
        return tf.gather(TABLE, ids)

    features = [_flat(tf.constant(i, tf.int64), None, "sum") for i in ([1, 2], [3], [4, 5, 6])]
    found = gather_grouped(features, ["a", "b", "a"], gather)
    assert calls == [("a", 5), ("b", 1)]
    np.testing.assert_array_equal(found[2], TABLE[[4, 5, 6]])
