"""The lookup against TensorFlow's own: `embedding_lookup_sparse`, and the TPU embedding's CPU lookup."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig
from tpuembed.errors import ConfigError
from tpuembed.lookup import FlatIds, gather_grouped, ids_of
from tpuembed.lookup.ids import PaddedIds
from tpuembed.lookup.pooling import AdjacentSegments

COMBINERS = ("sum", "mean", "sqrtn")
TABLE = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
RAGGED = tf.ragged.constant([[3, 1, 3], [], [7], [0, 19]], dtype=tf.int64)
WEIGHTS = tf.ragged.constant([[0.5, 2.0, 1.0], [], [3.0], [0.25, 0.0]], dtype=tf.float32)


def _config(combiner: str, **options: Any) -> FeatureConfig:
    return FeatureConfig(TableConfig(20, 4, "t", combiner), **options)


def _flat(ids: object, weights: object, combiner: str, **options: object) -> FlatIds:
    return ids_of("x", _config(combiner, **options), ids, weights).flatten()


def _padded(ids: object, weights: object, combiner: str, length: int = 0) -> FlatIds:
    return PaddedIds("x", _config(combiner, max_sequence_length=length), ids, weights).flatten()


def _activations(ids: object, weights: object, combiner: str, **options: object) -> npt.NDArray[np.float32]:
    flat = _flat(ids, weights, combiner, **options)
    return flat.combine(tf.gather(TABLE, flat.row_ids())).numpy()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_combiners_equal_tensorflows(kind: str, combiner: str, weighted: bool) -> None:
    ids: Any = RAGGED
    weights: Any = WEIGHTS if weighted else None
    truth = tf.nn.safe_embedding_lookup_sparse(
        TABLE, ids.to_sparse(), WEIGHTS.to_sparse() if weighted else None, combiner=combiner
    )
    if kind == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse() if weighted else None
    np.testing.assert_allclose(_activations(ids, weights, combiner), truth, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_sparse_ids_of_rank_three_are_combined_over_their_last_axis(combiner: str) -> None:
    ids = tf.SparseTensor([[0, 0, 0], [0, 0, 4], [0, 2, 1], [1, 1, 0]], tf.constant([3, 5, 7, 9], tf.int64), [3, 3, 5])
    truth = tf.nn.safe_embedding_lookup_sparse(TABLE, ids, combiner=combiner)
    found = _activations(ids, None, combiner)
    assert found.shape == (3, 3, 4)
    np.testing.assert_allclose(found, truth, atol=1e-6)


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


def test_dense_ids_are_gathered_one_by_one() -> None:
    ids = tf.constant([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], tf.int64)
    np.testing.assert_array_equal(_activations(ids, None, "mean"), TABLE[ids.numpy()])


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_negative_ids_are_dropped_even_where_row_zero_is_not_a_number(kind: str) -> None:
    table = TABLE.copy()
    table[0] = np.nan
    ids = tf.ragged.constant([[3, -1], [-5], [1]], dtype=tf.int64)
    truth = tf.nn.safe_embedding_lookup_sparse(table, ids.to_sparse(), combiner="mean")
    flat = _flat(ids if kind == "ragged" else ids.to_sparse(), None, "mean")
    np.testing.assert_allclose(flat.combine(tf.gather(table, flat.row_ids())), truth, atol=1e-6)


def test_without_validation_a_negative_id_is_looked_up_and_fails() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        _activations(tf.ragged.constant([[3, -1]], dtype=tf.int64), None, "sum", validate_weights_and_indices=False)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_sequences_equal_the_tpu_embeddings_cpu_lookup(kind: str, length: int) -> None:
    table = tf.tpu.experimental.embedding.TableConfig(20, 4, name="t")
    feature = tf.tpu.experimental.embedding.FeatureConfig(table, max_sequence_length=length)
    ids = RAGGED if kind == "ragged" else RAGGED.to_sparse()
    truth = tf.tpu.experimental.embedding.serving_embedding_lookup(
        {"x": ids}, None, {table: tf.Variable(TABLE)}, {"x": feature}
    )["x"]
    found = _activations(ids, None, "sum", max_sequence_length=length)
    assert found.shape == (4, length, 4)
    np.testing.assert_array_equal(found, truth)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_padded_ids_equal_ragged_ones(combiner: str, weighted: bool) -> None:
    weights = WEIGHTS.to_tensor() if weighted else None
    flat = _padded(RAGGED.to_tensor(-1), weights, combiner)
    truth = tf.nn.safe_embedding_lookup_sparse(
        TABLE, RAGGED.to_sparse(), WEIGHTS.to_sparse() if weighted else None, combiner=combiner
    )
    np.testing.assert_allclose(flat.combine(tf.gather(TABLE, flat.row_ids())), truth, atol=1e-6)


@pytest.mark.parametrize("length", [2, 5])
def test_padded_sequences_are_cut_and_filled_with_zeros(length: int) -> None:
    flat = _padded(RAGGED.to_tensor(-1), None, "sum", length)
    found = flat.combine(tf.gather(TABLE, flat.row_ids())).numpy()
    truth = np.zeros((4, length, 4), np.float32)
    for row, ids in enumerate(RAGGED.to_list()):
        for column, i in enumerate(ids[:length]):
            truth[row, column] = TABLE[i]
    np.testing.assert_array_equal(found, truth)


def test_padding_ignores_row_zero_that_is_not_a_number() -> None:
    table = TABLE.copy()
    table[0] = np.nan
    flat = _padded(tf.constant([[1, -1], [-1, -1]], tf.int64), None, "mean")
    np.testing.assert_array_equal(flat.combine(tf.gather(table, flat.row_ids())), [table[1], np.zeros(4)])


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", ["ragged", "sparse", "dense", "sequence"])
def test_spread_is_the_gradient_that_tensorflow_takes(kind: str, combiner: str) -> None:
    ids = {
        "ragged": RAGGED,
        "sparse": RAGGED.to_sparse(),
        "dense": tf.constant([3, 3, 1], tf.int64),
        "sequence": RAGGED,
    }[kind]
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


@pytest.mark.parametrize(
    ("ids", "weights", "options", "message"),
    [
        (tf.constant([1]), tf.constant([1.0]), {}, "weights were given for dense ids"),
        (tf.constant([1]), None, {"max_sequence_length": 2}, "needs sparse or ragged ids"),
        (RAGGED, WEIGHTS.to_sparse(), {}, "Make both ragged"),
        (RAGGED.to_sparse(), WEIGHTS, {}, "Make both sparse"),
        (RAGGED, WEIGHTS, {"max_sequence_length": 2}, "weights have no meaning with max_sequence_length"),
        (RAGGED, None, {"output_shape": (3,)}, r"output_shape \(3,\): the ids give activations of \(4,\)"),
        (RAGGED.to_sparse(), None, {"output_shape": (4, 2)}, r"output_shape \(4, 2\): the ids give"),
        (tf.RaggedTensor.from_row_splits(RAGGED, [0, 4]), None, {}, "ragged ids must have rank 2"),
    ],
)
def test_a_combination_without_meaning_is_refused_by_name(
    ids: object, weights: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _activations(ids, weights, "sum", **options)


def test_weights_that_stand_elsewhere_are_refused() -> None:
    moved = tf.ragged.constant([[0.5, 2.0], [1.0], [3.0], [0.25, 0.0]], dtype=tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="have different positions"):
        _activations(RAGGED, moved, "sum")
