"""Full disks, sources that fail and workers that die while an export streams: what is said, what is left, what goes on."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.full_disk import CONFIG
from tests.support.export.killed_export import SHARD_BYTES, slow_down
from tests.support.export.processes import children
from tpuembed import export_saved_model
from tpuembed.errors import CheckpointError, TpuEmbedError
from tpuembed.export.stream.engines import local
from tpuembed.export.stream.resume_log import read_record
from tpuembed.formats.tensor_bundle import shard_path

ROOT = Path(__file__).parents[2]
TABLE = random_table(400, 8)
LARGE = random_table(12 * SHARD_BYTES // 32, 8)
"""Of twelve shards, where exports are slowed down."""


def export(checkpoint: Path, model_dir: Path, **options: Any) -> Any:
    return export_saved_model(checkpoint, model_dir, serving_config=CONFIG, workers=1, **options)


class Trouble:
    """Calls `make` with the process id of the worker whenever there is news, once a shard is recorded; `times` times."""

    def __init__(self, model_dir: Path, make: Callable[[int], None], times: int = 1) -> None:
        self._model_dir, self._make, self._left = model_dir, make, times
        self._others = set(children(os.getpid()))

    def __call__(self, done: int, total: int) -> None:
        workers = set(children(os.getpid())) - self._others
        records = map(read_record, self._model_dir.glob(".staging-*/tables"))
        if self._left and workers and any(record and record.finished for record in records):
            self._left -= 1
            self._make(workers.pop())

    def check_no_worker_is_left(self) -> None:
        assert set(children(os.getpid())) <= self._others


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that is slow to read."""
    slow_down(monkeypatch.setattr)
    monkeypatch.setattr(local, "_RETRY_SECONDS", (0.0, 0.0))
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source" / "ckpt", {"t": LARGE})
    return tmp_path / "source" / "ckpt"


def fails(checkpoint: Path, model_dir: Path, trouble: Trouble, error: type[TpuEmbedError], message: str) -> None:
    """The export fails with this error, and leaves nothing but what it can go on with."""
    with pytest.raises(error, match=message):
        export(checkpoint, model_dir, on_progress=trouble)
    trouble.check_no_worker_is_left()
    assert all(path.name.startswith(".staging-") for path in model_dir.iterdir())


def on_small_disk(tmp_path: Path, size: str, module: str) -> dict[str, Any]:
    """What `module` prints, which exports `ckpt` onto a real disk of that size.

    The file systems that a process mounts for itself alone are gone with it.
    """
    (tmp_path / "disk").mkdir()
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    script = f'mount -t tmpfs -o size={size} tmpfs "{tmp_path / "disk"}" && exec "$@"'
    if not shutil.which("unshare") or subprocess.run([*mount, script, "sh", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces, to mount a small file system")
    command = [sys.executable, "-m", module, str(tmp_path / "ckpt"), str(tmp_path / "disk")]
    done = subprocess.run([*mount, script, "sh", *command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
def test_wherever_the_disk_is_full_an_error_names_the_folder(tmp_path: Path) -> None:
    """In the tables, the graph, the index, the warm-up requests or the manifest: 8 KiB more each time, until it fits."""
    write_checkpoint(tmp_path / "ckpt", {"t": TABLE})
    found = on_small_disk(tmp_path, "512k", "tests.support.export.little_room")
    assert found["path"] == "1"
    assert len(found["failures"]) > 5
    for message, versions in found["failures"]:
        assert str(tmp_path / "disk") in message
        assert re.search("No space left on device.*[Ff]ree space|has .* free", message), message
        assert versions == []


@pytest.mark.nightly
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", {"t": LARGE})
    found = on_small_disk(tmp_path, "16m", "tests.support.export.full_disk")
    assert "No space left on device. Free space or repair the disk" in found["message"]
    assert f"{tmp_path / 'disk'}/.staging-1-" in found["message"]
    assert re.search("finished shards? (was|were) kept. Run the same export again to resume", found["message"])
    assert (found["left"], found["children"]) == ([".staging", "filler"], [])
    assert 0 < found["reused"] < LARGE.nbytes
    assert found["after"] == ["1"]
    assert (tmp_path / "ckpt.copy").read_bytes() == LARGE.tobytes()


def test_a_source_that_is_cut_short(large: Path, tmp_path: Path) -> None:
    """What was read of it is worth nothing any more."""
    data = shard_path(large, 0, 1)
    trouble = Trouble(tmp_path / "m", lambda _: os.truncate(data, LARGE.nbytes // 2))
    fails(large, tmp_path / "m", trouble, CheckpointError, f"data file {data}")
    assert list((tmp_path / "m").iterdir()) == []
