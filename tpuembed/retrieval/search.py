"""Finds the best candidates for query vectors with stock operations of TensorFlow.

Scores are computed in pieces of bounded memory. The best of many scores are found by blocks: the blocks with the largest
maxima hold them.
"""

from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

from tpuembed.retrieval.partitions import BLOCK_ROWS

__all__ = ["best", "search_all", "search_partitions"]

Tensor = Any
Rows = Callable[[Tensor, Tensor], Tensor]
"""(first row, number of rows) -> float32 [rows, dim] of the index."""

_PIECE_BLOCKS: Final = 256
_PIECE_ROWS: Final = _PIECE_BLOCKS * BLOCK_ROWS
_LOWEST: Final = float("-inf")


def best(scores: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `k` largest of float32 [batch, n] and their positions, int32 [batch, k], the largest first.

    Of equal scores the lower position comes first, as with `tf.math.top_k`. If n is less than k, the rest is -infinity at
    position 0.
    """
    missing = tf.maximum(k - tf.shape(scores)[1], 0)
    odd = tf.math.floormod(-(tf.shape(scores)[1] + missing), BLOCK_ROWS)
    scores = tf.pad(scores, [[0, 0], [0, missing + odd]], constant_values=_LOWEST)
    blocks = tf.reshape(scores, [tf.shape(scores)[0], tf.shape(scores)[1] // BLOCK_ROWS, BLOCK_ROWS])
    few = tf.minimum(k, tf.shape(blocks)[1])
    chosen = tf.sort(tf.math.top_k(tf.reduce_max(blocks, 2), few).indices, axis=1)  # in order, for equal scores
    among = tf.reshape(tf.gather(blocks, chosen, batch_dims=1), [tf.shape(blocks)[0], few * BLOCK_ROWS])
    found, place = tf.math.top_k(among, k)
    positions = tf.gather(chosen, place // BLOCK_ROWS, batch_dims=1) * BLOCK_ROWS + place % BLOCK_ROWS
    return found, tf.where(found > _LOWEST, positions, 0)


def search_all(queries: Tensor, rows: Rows, count: int, passes: Callable[[Tensor, Tensor], Tensor], k: Tensor) -> Any:
    """Return scores and places of the `k` best of all `count` rows for `queries`, float32 [batch, dim].

    Args:
        queries: the vectors.
        rows: returns rows of the index.
        count: the number of rows.
        passes: (first row, number of rows) -> bool [batch or 1, rows]: which rows may be found.
        k: how many, int32.
    """

    def piece(first: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        scores = tf.matmul(queries, rows(first, size), transpose_b=True)
        found, place = best(tf.where(passes(first, size) & (scores > _LOWEST), scores, _LOWEST), k)  # nor NaN
        return found, tf.cast(place, tf.int64) + first

    if count <= _PIECE_ROWS:
        return piece(tf.constant(0, tf.int64), tf.constant(count, tf.int64))
    step = tf.constant(_PIECE_ROWS, tf.int64)

    def body(first: Tensor, scores: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, place = piece(first, tf.minimum(step, count - first))
        joined, order = tf.math.top_k(tf.concat([scores, found], 1), k)
        return first + step, joined, tf.gather(tf.concat([places, place], 1), order, batch_dims=1)

    shape = [tf.shape(queries)[0], k]
    start = (tf.constant(0, tf.int64), tf.fill(shape, _LOWEST), tf.zeros(shape, tf.int64))
    _, scores, places = tf.while_loop(
        lambda first, *_: first < count,
        body,
        start,
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None]), tf.TensorShape([None, None])),
        parallel_iterations=1,
    )
    return scores, places


def search_partitions(
    queries: Tensor,
    centroids: Tensor,
    first_blocks: Tensor,
    blocks: Callable[[Tensor], Tensor],
    passes: Callable[[Tensor, Tensor], Tensor],
    probes: Tensor,
    k: Tensor,
    search_all_for: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return scores and places of the `k` best rows of the `probes` partitions that are nearest to each query.

    Queries are searched one after the other, so that the memory does not grow with the batch. A query for which these partitions
    have fewer than `k` rows that pass is compared with all rows.

    Args:
        queries: float32 [batch, dim].
        centroids: float32 [partitions, dim].
        first_blocks: int64 [partitions + 1], see `partitions.in_order`.
        blocks: int64 [n] -> float32 [n * BLOCK_ROWS, dim] of these blocks.
        passes: (places, int64 [n]; the number of the query) -> bool [n]: which rows may be found.
        probes: int32.
        k: how many, int32.
        search_all_for: returns scores [k] and places [k] of the best of all rows for the query of a number.
    """
    nearest = tf.math.top_k(tf.matmul(queries, centroids, transpose_b=True), probes).indices

    def one(number: Tensor) -> tuple[Tensor, Tensor]:
        partitions = tf.cast(nearest[number], tf.int64)
        starts, ends = tf.gather(first_blocks, partitions), tf.gather(first_blocks, partitions + 1)
        chosen = tf.ragged.range(starts, ends).flat_values
        scores = tf.linalg.matvec(blocks(chosen), queries[number])
        places = tf.reshape(chosen[:, None] * BLOCK_ROWS + tf.range(BLOCK_ROWS, dtype=tf.int64), [-1])
        scores = tf.where(passes(places, number) & (scores > _LOWEST), scores, _LOWEST)  # nor NaN
        found, at = best(scores[None], k)
        places = tf.gather(tf.concat([places, [0]], 0), at[0])  # there may be no row at all
        is_enough = tf.reduce_all(found > _LOWEST) | tf.equal(probes, tf.shape(centroids)[0])
        return tf.cond(is_enough, lambda: (found[0], places), lambda: search_all_for(number))

    batch = tf.shape(queries)[0]
    # TensorArray.stack fails on no elements of an unknown shape, so an empty batch searches once for nothing.
    found, at = tf.map_fn(
        lambda number: tf.cond(
            number < batch, lambda: one(number), lambda: (tf.fill([k], _LOWEST), tf.zeros([k], tf.int64))
        ),
        tf.range(tf.maximum(batch, 1)),
        fn_output_signature=(tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int64)),
        parallel_iterations=1,
    )
    return found[:batch], at[:batch]
