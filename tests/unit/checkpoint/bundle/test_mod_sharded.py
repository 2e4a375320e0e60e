"""Rows dealt out in turn, against numpy: the stored rows are made by a loop over rows, one at a time."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sparse_core_files import write_sparse_core_checkpoint
from tpuembed.checkpoint.bundle.rows import read_mod_sharded
from tpuembed.formats.tensor_bundle import shard_path

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """Parts at any places of what is stored, in any order."""

    places: tuple[int, ...]
    stored_dim: int

    @property
    def count(self) -> int:
        return len(self.places)

    def first_rows(self, parts: Array) -> Array:
        return np.array(self.places)[parts]


class Stored:
    """What `read` reads, and how much of it."""

    def __init__(self, stored: Array) -> None:
        self.stored, self.bytes, self.calls = stored, 0, 0

    def read(self, rows: Array, views: Sequence[memoryview]) -> None:
        self.calls += 1
        for row, view in zip(rows.tolist(), views, strict=True):
            held = len(view) // self.stored[0].nbytes
            assert held * self.stored[0].nbytes == len(view) > 0
            view[:] = self.stored[row : row + held].reshape(-1).view(np.uint8).data
            self.bytes += len(view)


def deal(table: Array, source: Dealt) -> Stored:
    """Every row at its place, NaN everywhere else."""
    stored = np.full((2 * sum(table.shape) + max(source.places) + 1, source.stored_dim), np.nan, table.dtype)
    for row, values in enumerate(table):
        stored[source.places[row % source.count] + row // source.count, : len(values)] = values
    return Stored(stored)


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(1, 9),
    rows=st.integers(1, 60),
    dims=st.tuples(st.integers(1, 4), st.integers(0, 2)),
    cut=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    block_bytes=st.integers(1, 300),
    dtype=st.sampled_from(["float32", "float16", "float64"]),
    form=st.sampled_from(["plain", "every other row", "columns of a wider one", "Fortran", "backwards"]),
    order=st.randoms(use_true_random=False),
)
def test_any_range_into_any_array(
    count: int, rows: int, dims: Any, cut: Any, block_bytes: int, dtype: str, form: str, order: Any
) -> None:
    step = -(-rows // count) + 1
    places = [part * step for part in range(count)]
    order.shuffle(places)
    source = Dealt(tuple(places), sum(dims))
    table = np.arange(1, rows * dims[0] + 1).reshape(rows, dims[0]).astype(dtype)
    stored = deal(table, source)
    start, stop = sorted(min(end, rows) for end in cut)
    out = empty(stop - start, dims[0], dtype, form)
    read_mod_sharded(source, start, out, stored.read, block_bytes)
    np.testing.assert_array_equal(out, table[start:stop])
    assert stored.bytes == (stop - start) * source.stored_dim * table.itemsize, "only the rows asked for are read"


def empty(rows: int, dim: int, dtype: str, form: str) -> Array:
    if form == "every other row":
        return np.empty((2 * rows, dim), dtype)[::2]
    if form == "columns of a wider one":
        return np.empty((rows, dim + 3), dtype)[:, 1 : dim + 1]
    if form == "Fortran":
        return np.empty((rows, dim), dtype, order="F")
    return np.empty((rows, dim), dtype)[:: -1 if form == "backwards" else 1]


SCRIPT = """
import re, sys
import numpy as np
from tpuembed.checkpoint import open_checkpoint
def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
small, big = np.ones((4096, 64), np.float32), np.ones((1 << 18, 64), np.float32)
with open_checkpoint(sys.argv[1]) as checkpoint:
    checkpoint.read("table", 0, 1)
    before = kilobytes("VmRSS")
    for start in range(5, 1 << 22, 40_000):
        assert not checkpoint.read("table", start, start + 4096).any()
        checkpoint.read_into("table", start, small)
        assert not small.any()
    grown = kilobytes("VmHWM") - before
    checkpoint.read_into("table", 7, big)
    assert not big.any()
print(grown, kilobytes("VmHWM") - before)
"""


@pytest.mark.parametrize("cores", [8, 256])
def test_memory_is_bounded_by_the_rows_asked_for(tmp_path: Any, cores: int) -> None:
    """1 MB and 64 MB ranges of a 1 GB table in a sparse file; what a range is read into is not counted."""
    size = write_sparse_core_checkpoint(tmp_path / "ckpt", 1 << 22, 64, cores)
    with open(shard_path(tmp_path / "ckpt", 0, 2), "wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, big = map(int, done.stdout.split())
    assert small < 8 * 1024
    assert big < 16 * 1024
