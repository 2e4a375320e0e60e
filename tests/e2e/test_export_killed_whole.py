"""One whole export, killed again and again: nothing of it is visible until it is complete, and nothing is streamed twice."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.export.fakes import write_large_table
from tests.support.export.killed_export import SHARD_BYTES, recorded_shards
from tests.support.export.processes import wait_for_end

ROOT = Path(__file__).parents[2]
DIM = 64
SHARD_ROWS = SHARD_BYTES // (4 * DIM)


class Export:
    """The export of `folder`/ckpt into a MODEL_DIR that is watched all the time."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder, self.model_dir = folder, model_dir
        self.first_sight: list[str] | None = None
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look)

    def start(self) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "tests.support.export.killed_export",
            str(self.folder / "ckpt"),
            str(self.model_dir),
        ]
        return subprocess.Popen(
            [*command, str(self.folder / "serving.json")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Export":
        self._watch.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        """Remember what a version held when it was first seen, at most two milliseconds after it appeared."""
        while not self._is_over.wait(0.002):
            if self.first_sight is None and self.model_dir.is_dir():
                for version in self.model_dir.glob("[!.]*"):
                    self.first_sight = sorted(map(str, files_of(version)))

    def reads(self) -> list[int]:
        """The shards that were read since this was asked last; some are in the log more than once."""
        log = self.folder / "ckpt.log"
        starts = [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return [start // SHARD_ROWS for start in starts]


def files_of(version: Path) -> dict[Path, bytes]:
    return {path.relative_to(version): path.read_bytes() for path in version.rglob("*") if path.is_file()}


def wait(process: "subprocess.Popen[str]", log: Path, most_reads: int, seconds: float = 600) -> None:
    """Wait, but not for the end of the export: at most until `most_reads` shards were begun."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if log.exists() and len(log.read_text().splitlines()) >= most_reads:
            break
        time.sleep(0.005)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kills", "shards"), [(2, 60), pytest.param(50, 800, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_been(tmp_path: Path, kills: int, shards: int) -> None:
    """SIGKILL to the whole process group."""
    (name,) = write_large_table(tmp_path / "ckpt", shards * SHARD_ROWS, DIM)
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"x": {"table": name}}}))
    moments = random.Random(kills)
    with Export(tmp_path, tmp_path / "m") as export:
        for number in range(kills):
            done = set(recorded_shards(export.model_dir))
            process = export.start()
            half, log = (shards - len(done)) // 2, tmp_path / "ckpt.log"
            if number % 5:
                wait(process, log, 1)
                wait(process, log, half, moments.uniform(0, 1))
            else:  # while it starts, and saves the graph
                wait(process, log, half, moments.uniform(0, 8))
            assert process.poll() is None, process.communicate()
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            wait_for_end(process.pid, 30)
            assert export.first_sight is None, "no version may be seen"
            assert not done & set(export.reads()), "recorded shards are not streamed again"
            assert done <= set(recorded_shards(export.model_dir))
            assert set(recorded_shards(export.model_dir).values()) <= {1}
        done = set(recorded_shards(export.model_dir))
        assert 0 < len(done) < shards, "killed in the middle of streaming"
        out, errors = export.start().communicate(timeout=600)
        assert out == f"started\n{len(done) * SHARD_BYTES}\n", errors
        assert sorted(set(export.reads())) == sorted(set(range(shards)) - done)
    with Export(tmp_path, tmp_path / "undisturbed") as undisturbed:
        undisturbed.start().communicate(timeout=600)
    (version,), (expected,) = export.model_dir.iterdir(), undisturbed.model_dir.iterdir()
    assert version.name == expected.name == "1"
    killed, whole = files_of(version), files_of(expected)
    assert export.first_sight == sorted(map(str, whole)), "it was complete when it was first seen"
    assert killed.keys() == whole.keys()
    different = {str(path) for path in whole if killed[path] != whole[path]}
    assert different <= {"fingerprint.pb", "assets.extra/tpuembed.json"}, (
        "TensorFlow draws a number for every SavedModel"
    )
    assert without_fingerprint(killed) == without_fingerprint(whole)


def without_fingerprint(files: dict[Path, bytes]) -> object:
    """The manifest, without the checksum of the file that holds the number that TensorFlow draws."""
    manifest = json.loads(files[Path("assets.extra/tpuembed.json")])
    del manifest["files"]["fingerprint.pb"]
    return manifest
