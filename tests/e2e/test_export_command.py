"""`tpuembed export` of tables that are larger than the memory it may take."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.export.fakes import write_large_table
from tpuembed.checkpoint import open_checkpoint
from tpuembed.manifest import Manifest

COMMAND = [sys.executable, "-m", "tpuembed_cli.main", "export"]
DIM = 64
BLOCK = 1 << 16  # rows that are compared at once


@pytest.mark.parametrize("size", [256 << 20, pytest.param(2 << 30, marks=pytest.mark.nightly)])
def test_a_large_table_keeps_both_memory_promises_and_every_bit(tmp_path: Path, size: int) -> None:
    tables = write_large_table(tmp_path / "ckpt", size // (DIM * 4), DIM)
    (name,) = tables
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"x": {"table": name}}}))
    command = [*COMMAND, str(tmp_path / "ckpt"), str(tmp_path / "m"), "--json"]
    done = subprocess.run(
        [*command, "--serving-config", str(tmp_path / "serving.json")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["worker_peak_rss_bytes"] < 64 << 20
    assert report["peak_rss_bytes"] < 750 << 20
    assert report["bytes_written"] == size
    _assert_equal_rows(tmp_path / "ckpt", Path(report["path"]), name)


def _assert_equal_rows(prefix: Path, version: Path, table: str) -> None:
    manifest = Manifest.read(version)
    assert manifest is not None
    (stack,) = manifest.stacks
    stored = np.memmap(version / stack.file, np.uint32, "r", stack.offset, (stack.rows, stack.dim))
    with open_checkpoint(prefix) as source:
        for start in range(0, stack.rows, BLOCK):
            stop = min(start + BLOCK, stack.rows)
            np.testing.assert_array_equal(stored[start:stop], source.read(table, start, stop).view(np.uint32))
