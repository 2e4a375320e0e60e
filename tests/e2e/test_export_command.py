"""`tpuembed export` of tables that are larger than the memory it may take."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.orbax_trees import write_tree
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


def test_rows_that_lie_in_all_chunks_of_a_large_stack_keep_the_memory_promise(tmp_path: Path) -> None:
    """16 SparseCores: each piece of rows needs every chunk, 16 MiB decoded and as much as stored."""
    stack = np.random.default_rng(0).integers(0, 256, (1 << 19, 256), np.uint8).view(np.float32)
    path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(16 << 12, 64), ocdbt=False, compressed=True)
    spec = {"t": {"num_sparsecores": 16, "tables": {"t": {"vocab_size": 1 << 19, "embedding_dim": 64}}}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    tables = {"t": {"vocabulary_size": 1 << 19, "dim": 64}}
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"x": {"table": "t"}}, "tables": tables}))
    command = [*COMMAND, str(path), str(tmp_path / "m"), "--serving-config", str(tmp_path / "serving.json"), "--json"]
    options = ["--max-memory", "128MiB", "--workers", "1"]
    done = subprocess.run(
        [*command, *options, "--checkpoint-option", f"embedding_spec={tmp_path / 'spec.json'}"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["worker_peak_rss_bytes"] < 160 << 20
    with open_checkpoint(path, embedding_spec=spec) as source:
        manifest = Manifest.read(Path(report["path"]))
        assert manifest is not None
        stored = np.memmap(Path(report["path"]) / manifest.stacks[0].file, np.uint32, "r", manifest.stacks[0].offset)
        rows = source.read("t", 5000, 9000).view(np.uint32)
        np.testing.assert_array_equal(stored.reshape(-1, 64)[5000:9000], rows)


def _assert_equal_rows(prefix: Path, version: Path, table: str) -> None:
    manifest = Manifest.read(version)
    assert manifest is not None
    (stack,) = manifest.stacks
    stored = np.memmap(version / stack.file, np.uint32, "r", stack.offset, (stack.rows, stack.dim))
    with open_checkpoint(prefix) as source:
        for start in range(0, stack.rows, BLOCK):
            stop = min(start + BLOCK, stack.rows)
            np.testing.assert_array_equal(stored[start:stop], source.read(table, start, stop).view(np.uint32))
