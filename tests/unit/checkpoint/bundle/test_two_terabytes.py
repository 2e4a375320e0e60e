"""Tables of two terabytes: an index that claims them over a data file that is a hole, with rows written here and there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sparse_core_files import write_sparse_core_checkpoint
from tpuembed.checkpoint import open_checkpoint
from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index

ROWS, DIM, CORES = 1 << 33, 64, 32
ROW_BYTES = 4 * DIM
MARKED = [
    0,
    1,
    31,
    32,
    12_345_678,
    (1 << 32) - 1,
    1 << 32,
    (1 << 32) + 5,
    ROWS // 2 + 17,
    ROWS - 33,
    ROWS - 2,
    ROWS - 1,
]
FORMS = ["dense", "sparsecore"]


def marker(row: int) -> np.ndarray[Any, Any]:
    return np.full(DIM, row % 1_000_003 + 1, np.float32)


def place(form: str) -> Callable[[int], int]:
    """Row -> stored row; that of SparseCores by hand: shard row % 32, row row // 32 in it."""
    if form == "dense":
        return lambda row: row
    return lambda row: row % CORES * (ROWS // CORES) + row // CORES


@pytest.fixture(params=FORMS)
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """2 TiB: 8,589,934,592 rows of 64 float32; it takes a few kilobytes of disk."""
    prefix, shards = tmp_path / "ckpt", 1 if request.param == "dense" else 2
    if request.param == "dense":
        write_index(
            index_path(prefix), {"table": Entry(dtype="float32", shape=(ROWS, DIM), size=ROWS * ROW_BYTES)}, shards
        )
    else:
        write_sparse_core_checkpoint(prefix, ROWS, DIM, CORES)
    data = os.open(shard_path(prefix, 0, shards), os.O_WRONLY | os.O_CREAT)
    os.ftruncate(data, ROWS * ROW_BYTES)
    for row in MARKED:
        os.pwrite(data, marker(row).tobytes(), place(request.param)(row) * ROW_BYTES)
    os.close(data)
    return prefix


def test_opening_and_rows_beyond_32_bits_take_few_seconds(prefix: Path) -> None:
    started = time.process_time()  # which other processes do not stretch
    with open_checkpoint(prefix) as checkpoint:
        info = checkpoint.tables()["table"]
        assert (info.rows, info.dim) == (ROWS, DIM)
        for row in MARKED:
            start, stop = max(0, row - 40), min(ROWS, row + 40)
            expected = np.zeros((stop - start, DIM), np.float32)
            for other in MARKED:
                if start <= other < stop:
                    expected[other - start] = marker(other)
            np.testing.assert_array_equal(checkpoint.read("table", start, stop), expected)
    assert time.process_time() - started < 5


def command(*arguments: object) -> tuple[Any, float]:
    """What a command printed, and its processor time, Python's start included, which other processes do not stretch."""
    script = "import sys, resource; from tpuembed_cli.main import main; sys.argv[0] = 'tpuembed'\n"
    script += "try: main()\nfinally: print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)"
    run = [sys.executable, "-c", script, *map(str, arguments), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), float(done.stderr)


def test_head_of_rows_beyond_32_bits_takes_few_seconds(prefix: Path) -> None:
    start = 1 << 32
    found, seconds = command("head", prefix, "table", "--rows", f"{start}:{start + 6}")
    expected = [marker(row) if row in MARKED else np.zeros(DIM) for row in range(start, start + 6)]
    np.testing.assert_array_equal(found["values"], expected)
    assert seconds < 5
