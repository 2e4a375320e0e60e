"""Searches by the C library, against a stable sort in numpy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tpuembed.manifest import STORAGE_TYPES
from tpuembed.native.lookup import available
from tpuembed.native.search import SearchIndex, search_ranges

pytestmark = pytest.mark.skipif(bool(available()), reason=f"the C library is not compiled: {available()}")
RANDOM = np.random.default_rng(9)


def stored(values: Any, storage: str) -> tuple[Any, Any]:
    """Return the bytes of rows, and the values that they stand for."""
    if storage == "int8":
        codes = RANDOM.integers(-128, 128, values.shape).astype(np.int8)
        ends = RANDOM.standard_normal((len(values), 2)).astype(np.float32)
        return np.hstack([codes.view(np.uint8), ends.view(np.uint8)]), codes * ends[:, :1] + ends[:, 1:]
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[storage]
    rows = values.astype(dtype)
    return np.ascontiguousarray(rows).view(np.uint8), rows.astype(np.float32)


@pytest.mark.parametrize("storage", STORAGE_TYPES)
def test_the_best_rows_are_those_of_a_stable_sort(storage: str) -> None:
    for _ in range(60):
        count, dim, batch, k = (int(RANDOM.integers(*limits)) for limits in ((0, 900), (1, 70), (0, 5), (1, 50)))
        integers = RANDOM.integers(-3, 4, (count, dim)).astype(np.float32)  # sums are exact, and many are equal
        rows, values = stored(integers, storage)
        queries = RANDOM.integers(-3, 4, (batch, dim)).astype(np.float32)
        ids, tags = RANDOM.integers(-1, 5, count), RANDOM.integers(0, 8, count).astype(np.uint64)
        ends = np.sort(RANDOM.choice(count + 1, 4)).reshape(2, 2)
        wanted = RANDOM.choice([0, 1, 6], batch).astype(np.uint64) if RANDOM.random() < 0.7 else None
        has_tags = RANDOM.random() < 0.8
        index = SearchIndex(
            rows.ctypes.data,
            ids.ctypes.data,
            tags.ctypes.data if has_tags else None,
            STORAGE_TYPES.index(storage),
            dim,
            rows.shape[1] if count else 1,
        )
        scores, found = np.empty((batch, k), np.float32), np.empty((batch, k), np.int64)
        search_ranges(index, queries, wanted, ends, scores, found)
        searched = np.zeros(count, bool)
        for start, stop in ends:
            searched[start:stop] = True
        searched &= ids != -1
        exact = values.astype(np.float64) @ queries.T.astype(np.float64)
        for number in range(batch):
            needed = np.uint64(0) if wanted is None else wanted[number]
            passes = searched & (((tags if has_tags else np.zeros(count, np.uint64)) & needed) == needed)
            left = np.flatnonzero(passes)
            if storage == "int8":  # products are rounded: the order of close scores is free
                got = found[number][found[number] >= 0]
                assert len(got) == min(k, len(left))
                assert len(set(got)) == len(got)
                mine = exact[got, number]
                np.testing.assert_allclose(scores[number][: len(got)], mine, rtol=1e-4, atol=1e-2)
                np.testing.assert_allclose(mine, -np.sort(-exact[left, number])[:k], rtol=1e-4, atol=1e-2)
                continue
            order = left[np.argsort(-exact[left, number], kind="stable")][:k]
            want = np.pad(order, (0, k - len(order)), constant_values=-1)
            np.testing.assert_array_equal(found[number], want)
            np.testing.assert_array_equal(scores[number][: len(order)], exact[order, number])
            assert np.isneginf(scores[number][len(order) :]).all()
