"""Divides vectors into partitions by k-means, and measures what a search of some of them finds. Numpy alone.

A partition has a centroid, and the vectors whose product with it is larger than with any other centroid. A search reads the
partitions whose centroids have the largest products with the query.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK_ROWS",
    "CENTROID_ROWS",
    "Floats",
    "assign",
    "centroids_of",
    "count_for",
    "in_order",
    "ranks",
    "true_neighbours",
]

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

BLOCK_ROWS: Final = 256
"""Rows of a block. A partition has whole blocks, the last one padded with rows of zeros."""
CENTROID_ROWS: Final = 128
"""The rows of a sample for each centroid."""
_ROWS_OF_PARTITION: Final = 1024
"""The rows of a partition on average. Fewer make more padding; more make longer searches."""
_ROUNDS: Final = 10
_SCORES_BYTES: Final = 32 << 20


def count_for(rows: int) -> int:
    """Return the number of partitions for `rows` vectors."""
    return max(1, min(round(rows / _ROWS_OF_PARTITION), round(4 * rows**0.5)))


def centroids_of(sample: Floats, count: int, seed: int = 0) -> Floats:
    """Return `count` centroids, float32 [count, dim] of length 1, of the vectors `sample` by spherical k-means.

    A centroid that no vector is nearest to is put beside that of the largest partition. The result depends on the seed alone.
    """
    numbers = np.random.default_rng(seed)
    found = _unit(sample[np.sort(numbers.choice(len(sample), min(count, len(sample)), replace=False))])
    if len(found) < count:
        found = np.concatenate([found, _unit(numbers.standard_normal((count - len(found), sample.shape[1])))])
    for _ in range(_ROUNDS):
        nearest = assign(sample, found)
        sizes = np.bincount(nearest, minlength=count)
        sums = _sums(sample, nearest, count)
        found = np.where(sizes[:, None] > 0, _unit(sums), found).astype(np.float32)
        for number in np.flatnonzero(sizes == 0):
            largest = int(sizes.argmax())
            sizes[largest] //= 2
            shift = 1e-3 * numbers.standard_normal(sample.shape[1])
            found[number] = _unit(found[largest] + shift)[0]
    return found


def _sums(rows: Floats, groups: npt.NDArray[np.int32], count: int) -> Floats:
    """Return the sum of the rows of each group, [count, dim]."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(count))
    sums = np.add.reduceat(rows[order], np.minimum(starts, len(rows) - 1), axis=0)
    return np.asarray(sums, np.float32)


def _unit(rows: Any) -> Floats:
    rows = np.atleast_2d(np.asarray(rows, np.float32))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


def assign(rows: Floats, centroids: Floats) -> npt.NDArray[np.int32]:
    """Return the partition of each row, int32 [n]."""
    step = max(1, _SCORES_BYTES // (4 * len(centroids)))
    nearest = np.empty(len(rows), np.int32)
    for start in range(0, len(rows), step):
        scores = rows[start : start + step] @ centroids.T
        nearest[start : start + step] = scores.argmax(1)
    return nearest


def in_order(partitions: npt.NDArray[np.int32], count: int, out: Callable[[int], Integers]) -> Integers:
    """Put vectors in the order of their partitions, each of whole blocks.

    Args:
        partitions: of each vector.
        count: of partitions.
        out: returns an array for the result, of the size that it is given.

    Returns:
        The first block of each partition, and the number of blocks: int64 [count + 1]. The array of `out` gets the number of the
        vector at each place, or -1.
    """
    sizes = np.bincount(partitions, minlength=count)
    blocks = -(-sizes // BLOCK_ROWS)
    first = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    order = out(int(first[-1]) * BLOCK_ROWS)
    order[:] = -1
    by_partition = np.argsort(partitions, kind="stable")
    ends = np.cumsum(sizes)
    for number in range(count):
        size = int(sizes[number])
        place = int(first[number]) * BLOCK_ROWS
        order[place : place + size] = by_partition[ends[number] - size : ends[number]]
    return first


def true_neighbours(queries: Floats, batches: Iterator[tuple[int, Floats]], k: int) -> Integers:
    """Return the numbers of the `k` vectors with the largest products for each query, int64 [queries, k].

    Args:
        queries: [queries, dim].
        batches: the number of the first vector, and the vectors, in order.
        k: how many, at most as many as there are vectors.
    """
    best = np.full((len(queries), 0), -1, np.int64)
    scores = np.empty((len(queries), 0), np.float32)
    step = max(1, _SCORES_BYTES // (4 * max(1, len(queries))))
    pieces = ((first + at, rows[at : at + step]) for first, rows in batches for at in range(0, len(rows), step))
    for first, rows in pieces:
        found = queries @ rows.T
        few = min(k, found.shape[1])
        places = np.argpartition(-found, few - 1, axis=1)[:, :few]
        best = np.concatenate([best, places + first], 1)
        scores = np.concatenate([scores, np.take_along_axis(found, places, 1)], 1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best, scores = np.take_along_axis(best, order, 1), np.take_along_axis(scores, order, 1)
    return best


def ranks(queries: Floats, centroids: Floats, partitions: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return at which place each partition of `partitions` [queries, k] is searched for its query: 0 is the first.

    A search of n partitions finds those below n.
    """
    found = np.empty(partitions.shape, np.int64)
    step = max(1, _SCORES_BYTES // (16 * len(centroids)))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        order = np.argsort(-(queries[some] @ centroids.T), axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(len(centroids))[None], 1)
        found[some] = np.take_along_axis(place, partitions[some].astype(np.int64), 1)
    return found
