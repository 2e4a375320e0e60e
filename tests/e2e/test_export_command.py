"""`tpuembed export` of tables that are larger than the memory it may take, and killed at any moment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.export.fakes import write_large_table
from tpuembed.checkpoint import open_checkpoint
from tpuembed.manifest import Manifest
from tpuembed.tensor_bundle import Entry, index_path, shard_path, write_index

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


@pytest.mark.nightly
def test_a_dry_run_refuses_what_the_disk_has_no_room_for(tmp_path: Path) -> None:
    """Before TensorFlow is imported, and in the same words as the export itself."""
    place = Path("/dev/shm")  # a disk that is not large, and that nothing is written to
    rows = shutil.disk_usage(place).total // 256 + 1  # of all, as other tests take and free some meanwhile
    write_index(index_path(tmp_path / "ckpt"), {"t": Entry(dtype="float32", shape=(rows, 64), size=rows * 256)}, 1)
    with open(shard_path(tmp_path / "ckpt", 0, 1), "wb") as file:
        file.truncate(rows * 256)  # a hole
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"x": {"table": "t"}}}))
    command = [
        *COMMAND,
        str(tmp_path / "ckpt"),
        str(place / "tpuembed-no-room"),
        "--serving-config",
        str(tmp_path / "serving.json"),
    ]
    for more in (["--dry-run"], []):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        assert f"MODEL_DIR {place / 'tpuembed-no-room'}: " in done.stderr
        assert done.stdout == ""
    assert not (place / "tpuembed-no-room").exists()
