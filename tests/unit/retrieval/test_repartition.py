"""Partitions that have to fit into the blocks that there are."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpuembed.retrieval.partitions import BLOCK_ROWS, assign, centroids_of
from tpuembed.retrieval.repartition import fit


@pytest.mark.parametrize("seed", range(12))
def test_candidates_fit_into_the_blocks_that_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, dim = int(rng.integers(1, 9)), int(rng.integers(2, 6))
    vectors = rng.normal(size=(int(rng.integers(1, 4000)), dim)).astype(np.float32)
    centroids = centroids_of(vectors, count)
    nearest = assign(vectors, centroids)
    least = -(-len(vectors) // BLOCK_ROWS)
    blocks = least + int(rng.integers(0, count + 1))

    def batches() -> Iterator[tuple[int, Any]]:
        for start in range(0, len(vectors), 700):
            yield start, vectors[start : start + 700]

    found = nearest.copy()
    fit(found, centroids, SimpleNamespace(rows=blocks * BLOCK_ROWS, batches=batches))  # type: ignore[arg-type]
    sizes = np.bincount(found, minlength=count)
    assert (-(-sizes // BLOCK_ROWS)).sum() <= blocks
    wanted = (-(-np.bincount(nearest, minlength=count) // BLOCK_ROWS)).sum()
    assert (found == nearest).all() == (wanted <= blocks)
    assert (found != nearest).sum() <= BLOCK_ROWS * max(0, wanted - blocks), "few move"
