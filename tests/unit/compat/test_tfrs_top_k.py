"""The best candidates of TensorFlow Recommenders' layers, against numpy. Its own tests are in tests/e2e/test_tfrs_suite.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed.compat import tfrs
from tpuembed.compat.tfrs_top_k import BruteForce, ScaNN, Streaming
from tpuembed.errors import ConfigError

Array = np.ndarray[Any, Any]
KINDS: dict[str, Any] = {
    "brute": BruteForce,
    "streaming": Streaming,
    "scann": lambda **options: ScaNN(num_leaves=9, num_leaves_to_search=9, **options),
}


def best_of(queries: Array, vectors: Array, names: Array, exclude: Array | None, k: int) -> tuple[Array, Array]:
    missing = "" if names.dtype == object else -1
    scores, found = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), missing, names.dtype)
    for number, query in enumerate(queries):
        left = [at for at in range(len(names)) if exclude is None or names[at] not in exclude[number].tolist()]
        left.sort(key=lambda at: -float(vectors[at] @ query))  # stable
        for place, at in enumerate(left[:k]):
            scores[number, place], found[number, place] = vectors[at] @ query, names[at]
    return scores, found


def check(layer: Any, rng: np.random.Generator, vectors: Array, names: Array, k: int | None = None) -> None:
    queries = rng.normal(size=(int(rng.integers(0, 5)), vectors.shape[1])).astype(np.float32)
    scores, found = best_of(queries, vectors, names, None, k or 6)
    np.testing.assert_allclose(layer(queries, k=k)[0], scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(_text(layer(queries, k=k)[1]), found)
    exclude = rng.choice([*names, "nobody" if names.dtype == object else -1], (len(queries), 4))
    exclude = exclude.astype(names.dtype)
    scores, found = best_of(queries, vectors, names, exclude, k or 6)
    np.testing.assert_array_equal(_text(layer.query_with_exclusions(queries, exclude, k=k)[1]), found)


def _text(found: Any) -> Array:
    return (
        np.array([[each.decode() for each in row] for row in found.numpy()], object).reshape(found.shape)
        if found.dtype == tf.string
        else found.numpy()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_without_identifiers_they_are_numbers(kind: str) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(23, 4)).astype(np.float32)
    layer = KINDS[kind](k=6).index_from_dataset(tf.data.Dataset.from_tensor_slices(vectors).batch(5))
    check(layer, rng, vectors, np.arange(23, dtype=np.int32))
    scores, found = layer(vectors[3])
    assert scores.shape == found.shape == (6,)


@pytest.mark.parametrize("kind", ["brute", "scann"])
@pytest.mark.sampled(1)
def test_a_saved_model_takes_batches_of_any_size(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(30, 4)).astype(np.float32)
    layer = KINDS[kind](k=3).index(vectors)
    with refused(ConfigError):
        layer.save(str(tmp_path / "m"))
    layer.query_with_exclusions(tf.constant(vectors[:3]), tf.constant([[1]] * 3))
    layer.save(str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))  # its functions do not keep its variables
    without = loaded.query_with_exclusions(tf.constant(vectors[:7]), tf.constant([[n, 29] for n in range(7)]))
    excluded = np.array([[number, 29] for number in range(7)])
    np.testing.assert_array_equal(without[1], best_of(vectors[:7], vectors, np.arange(30), excluded, 3)[1])
    found = capi.predict(tmp_path / "m", {"input_1": vectors[:7]})
    scores, names = best_of(vectors[:7], vectors, np.arange(30), None, 3)
    np.testing.assert_allclose(found["output_1"], scores, rtol=1e-5)
    np.testing.assert_array_equal(found["output_2"], names)
    np.testing.assert_array_equal(loaded(tf.constant(vectors[:7]))[1], names)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 3, 20, 50, 100, 1600])
def test_scann_finds_as_many_as_there_are(count: int) -> None:
    rng = np.random.default_rng(count)
    vectors, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (count, 40))
    vectors[: count // 2] = vectors[0]  # k-means leaves partitions of these empty
    layer = ScaNN(k=10).index(rng.normal(size=(2000, 8)).astype(np.float32)).index(vectors)
    for k in (1, 10, 300):
        found = layer(queries, k=k)[1].numpy()
        assert ((found >= 0).sum(1) == min(k, count)).all()
        assert all(len({*row.tolist()} - {-1}) == min(k, count) for row in found)
    if count <= 100:
        np.testing.assert_allclose(layer(queries)[0], BruteForce(k=10).index(vectors)(queries)[0], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_is_nan_finds_none(kind: str) -> None:
    vectors = np.eye(4, dtype=np.float32)
    layer = KINDS[kind](k=2).index_from_dataset(tf.data.Dataset.from_tensor_slices(vectors).batch(3))
    scores, found = layer(np.array([[np.nan] * 4, [0, 2, 1, 0]], np.float32))
    assert scores.numpy().tolist() == [[-np.inf] * 2, [2, 1]]
    assert found.numpy().tolist() == [[-1, -1], [1, 2]]


def test_exclusions_of_another_integer_type() -> None:
    layer = BruteForce(k=2).index(np.eye(3, dtype=np.float32))
    found = layer.query_with_exclusions(np.array([[3, 2, 1]], np.float32), np.array([[0]], np.int64))[1]
    assert found.numpy().tolist() == [[1, 2]]
    for wrong in (np.array([0]), np.array([["a"]], object)):
        with refused(ConfigError):
            layer.query_with_exclusions(np.ones((1, 3), np.float32), wrong)


def test_a_streaming_layer_reads_its_dataset_anew() -> None:
    vectors = tf.Variable(np.eye(3, dtype=np.float32))
    layer = Streaming(k=1).index_from_dataset(
        tf.data.Dataset.range(3).batch(2).map(lambda ids: (ids, tf.gather(vectors, ids)))
    )
    assert layer(np.eye(3, dtype=np.float32))[1].numpy().tolist() == [[0], [1], [2]]
    vectors.assign(vectors[::-1])
    assert layer(np.eye(3, dtype=np.float32))[1].numpy().tolist() == [[2], [1], [0]]


def test_fewer_partitions_find_fewer() -> None:
    rng = np.random.default_rng(2)
    vectors, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (3000, 50))
    truth = BruteForce(k=10).index(vectors)(queries)[1].numpy()
    recalls = []
    for searched in (1, 10, 100):
        layer = ScaNN(k=10, num_leaves=100, num_leaves_to_search=searched, num_reordering_candidates=100).index(vectors)
        found = layer(queries)[1].numpy()
        recalls.append(np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, truth, strict=True)]))
        assert not layer.is_exact()
    assert recalls[0] < recalls[1] < recalls[2] == 1.0


def test_wrong_arguments_are_refused() -> None:
    vectors = np.ones((4, 2), np.float32)
    pairs = tf.data.Dataset.from_tensor_slices((np.arange(4), vectors))
    indexed = BruteForce().index(vectors, np.arange(4))
    for wrong in (
        lambda: BruteForce(k=0),
        lambda: BruteForce()(vectors),
        lambda: Streaming()(vectors),
        lambda: ScaNN()(vectors),
        lambda: ScaNN(distance_measure="squared_l2"),
        lambda: ScaNN(num_leaves=0),
        lambda: ScaNN().index(vectors[:0]),
        lambda: BruteForce().index(vectors[:0]),
        lambda: BruteForce().index(vectors * [1, np.inf]),
        lambda: ScaNN().index(vectors * [1, np.nan]),
        lambda: Streaming().index_from_dataset(pairs.map(lambda a, b: (tf.cast(a, tf.uint8), b)).batch(2)),
        lambda: Streaming().save("m"),
        lambda: BruteForce().index(vectors[0]),
        lambda: BruteForce().index(vectors, np.arange(3)),
        lambda: BruteForce().index(vectors, np.arange(4, dtype=np.uint64)),
        lambda: BruteForce().index_from_dataset(pairs.map(lambda a, b: (a, b, b)).batch(2)),
        lambda: BruteForce().index_from_dataset(pairs.take(0).batch(2)),
        lambda: indexed.index(vectors, np.array(["a"] * 4, object)),
        lambda: indexed.index(np.ones((4, 3), np.float32), np.arange(4)),
    ):
        with refused(ConfigError):
            wrong()
    with pytest.raises(NotImplementedError, match="index_from_dataset"):
        Streaming().index(vectors)
    assert tfrs.layers.factorized_top_k.BruteForce is BruteForce
