"""The best of scores, and partitions, against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from tpuembed.retrieval.partitions import BLOCK_ROWS, assign, centroids_of, in_order, ranks, true_neighbours
from tpuembed.retrieval.search import best

RANDOM = np.random.default_rng(3)


def test_the_best_scores_are_those_of_a_stable_sort() -> None:
    function = tf.function(best, input_signature=[tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([], tf.int32)])
    for _ in range(150):
        batch, n, k = (int(RANDOM.integers(*limits)) for limits in ((0, 4), (0, 1500), (1, 40)))
        scores = RANDOM.integers(0, RANDOM.integers(2, 200), (batch, n)).astype(np.float32)  # with many ties
        scores[RANDOM.random(scores.shape) < RANDOM.choice([0, 0.5])] = -np.inf
        found, places = (value.numpy() for value in function(scores, k))
        wider = np.pad(scores, ((0, 0), (0, max(k - n, 0))), constant_values=-np.inf)
        order = np.argsort(-wider, axis=1, kind="stable")[:, :k]
        wanted = np.take_along_axis(wider, order, 1)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(places, np.where(wanted > -np.inf, order, 0))


def test_partitions_have_whole_blocks_and_every_vector_once() -> None:
    vectors = RANDOM.standard_normal((3000, 6)).astype(np.float32)
    count = 9
    centroids = centroids_of(vectors, count)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-5)
    partitions = assign(vectors, centroids)
    np.testing.assert_array_equal(partitions, (vectors @ centroids.T).argmax(1))
    first = in_order(partitions, count + 1, lambda size: np.empty(size, np.int64))  # the last one is empty
    order = np.empty(int(first[-1]) * BLOCK_ROWS, np.int64)
    in_order(partitions, count + 1, lambda _: order)
    assert sorted(order[order >= 0]) == list(range(3000))
    assert first[-1] == first[-2]
    for number in range(count):
        own = order[first[number] * BLOCK_ROWS : first[number + 1] * BLOCK_ROWS]
        np.testing.assert_array_equal(own[own >= 0], np.flatnonzero(partitions == number))


def test_more_centroids_than_vectors_are_all_of_length_1() -> None:
    centroids = centroids_of(np.eye(3, 4, dtype=np.float32), 7)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 50])
def test_true_neighbours_have_the_largest_products(k: int) -> None:
    vectors = RANDOM.integers(-2, 3, (50, 3)).astype(np.float32)  # with ties
    queries = RANDOM.integers(-2, 3, (11, 3)).astype(np.float32)
    found = true_neighbours(queries, ((start, vectors[start : start + 8]) for start in range(0, 50, 8)), k)
    products = queries @ vectors.T
    np.testing.assert_array_equal(np.take_along_axis(products, found, 1), -np.sort(-products, axis=1)[:, :k])
    assert all(len(set(row)) == k for row in found.tolist())


def test_ranks_are_the_order_of_the_search() -> None:
    queries, centroids = (RANDOM.standard_normal((count, 5)).astype(np.float32) for count in (20, 13))
    partitions = RANDOM.integers(0, 13, (20, 4)).astype(np.int32)
    found = ranks(queries, centroids, partitions)
    for query in range(20):
        order = np.argsort(-(queries[query] @ centroids.T), kind="stable").tolist()
        assert found[query].tolist() == [order.index(one) for one in partitions[query]]
