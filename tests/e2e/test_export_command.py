"""`tpuembed export` of tables that are larger than the memory it may take, and killed at any moment."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import write_large_table
from tests.support.export.processes import wait_for_end
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


def _start(folder: Path, model_dir: Path) -> "subprocess.Popen[bytes]":
    arguments: list[Any] = [*COMMAND, folder / "ckpt", model_dir, "--serving-config", folder / "serving.json"]
    arguments += ["--max-memory", "512KiB"]  # small chunks: an export of a second or so, to be killed in
    return subprocess.Popen(
        arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_heed_interrupts,  # a shell starts what it runs in the background with SIGINT ignored
    )


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """A folder with a checkpoint and a config, the table's name, and the seconds that an export of it takes."""
    folder = tmp_path_factory.mktemp("killed")
    (name,) = write_large_table(folder / "ckpt", (64 << 20) // (DIM * 4), DIM)
    (folder / "serving.json").write_text(json.dumps({"features": {"x": {"table": name}}}))
    started = time.monotonic()
    assert _start(folder, folder / "whole").wait(120) == 0
    return folder, name, time.monotonic() - started


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGTERM, 2),
        *(pytest.param(one, 4, marks=pytest.mark.nightly) for one in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)),
    ],
)
def test_killed_at_a_random_moment_it_leaves_no_version_and_no_process(
    exported: tuple[Path, str, float], tmp_path: Path, number: signal.Signals, times: int
) -> None:
    folder, name, whole = exported
    moments = random.Random(int(number))
    kills = 0
    for _ in range(20):
        if kills == times:
            break
        process = _start(folder, tmp_path / "m")
        time.sleep(moments.uniform(0.2, 0.9) * whole)
        process.send_signal(number)
        process.wait(60)
        wait_for_end(process.pid, 20)
        if _versions(tmp_path):  # it had been committed before the signal came: once more, and sooner
            _assert_equal_rows(folder / "ckpt", tmp_path / "m" / "1", name)
            shutil.rmtree(tmp_path / "m")
            whole *= 0.7
        else:
            kills += 1
    assert kills
    assert _start(folder, tmp_path / "m").wait(120) == 0
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"], "the litter of the killed is removed"
    _assert_equal_rows(folder / "ckpt", tmp_path / "m" / "1", name)


def _versions(folder: Path) -> list[str]:
    model_dir = folder / "m"
    return sorted(path.name for path in model_dir.iterdir() if path.name.isdigit()) if model_dir.is_dir() else []


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
