"""Mod-sharded rows, against numpy: TensorFlow writes the parts, and a loop deals the rows out."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.partitioned import partitioned
from tpuembed.checkpoint import open_checkpoint

Array = np.ndarray[Any, Any]


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 9),
    rows=st.integers(9, 60),
    dim=st.integers(1, 4),
    cut=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    dtype=st.sampled_from(["float32", "float16", "float64"]),
    form=st.sampled_from(["plain", "every other row", "columns of a wider one", "Fortran", "backwards"]),
)
@example(count=7, rows=300_000, dim=3, cut=(5, 299_998), dtype="float64", form="plain")  # several blocks
@example(count=9, rows=11, dim=90_000, cut=(1, 11), dtype="float64", form="Fortran")  # a block is less than a group
def test_any_range_into_any_array(count: int, rows: int, dim: int, cut: Any, dtype: str, form: str) -> None:
    stored = np.arange(rows * dim).reshape(rows, dim).astype(dtype)
    sizes = [rows // count + (part < rows % count) for part in range(count)]
    starts = [sum(sizes[:part]) for part in range(count)]
    start, stop = sorted(min(end, rows) for end in cut)
    out = empty(stop - start, dim, dtype, form)
    with tempfile.TemporaryDirectory() as folder:
        cuts = [f"{first},{size}:-" for first, size in zip(starts, sizes, strict=True)]
        path = partitioned(Path(folder), *cuts, table=stored)
        with open_checkpoint(path, partition_strategy="mod") as checkpoint:
            checkpoint.read_into("emb", start, out)
    places = [starts[row % count] + row // count for row in range(start, stop)]
    np.testing.assert_array_equal(out, stored[places])


def empty(rows: int, dim: int, dtype: str, form: str) -> Array:
    if form == "every other row":
        return np.empty((2 * rows, dim), dtype)[::2]
    if form == "columns of a wider one":
        return np.empty((rows, dim + 3), dtype)[:, 1 : dim + 1]
    if form == "Fortran":
        return np.empty((rows, dim), dtype, order="F")
    return np.empty((rows, dim), dtype)[:: -1 if form == "backwards" else 1]
