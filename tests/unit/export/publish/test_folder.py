"""Versions appear by one rename, under their own number, or not at all."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import info
from tests.support.export.writers import version_writer
from tests.support.messages import refused
from tpuembed.errors import ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.folder import FolderWriter, next_version
from tpuembed.export.stream.shard import Source

ROOT = Path(__file__).parents[4]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def commit(model_dir: Path, version: int | None = None, content: str = "x") -> Path:
    with version_writer(model_dir, version) as staging:
        (staging.path / "saved_model.pb").write_text(content)
        path = staging.publish()
        assert isinstance(path, Path)
        return path


@pytest.mark.parametrize(
    ("present", "following"),
    [([], 1), (["1", "2"], 3), (["007"], 8), (["9", "10"], 11), (["v5", ".staging-8-x", "1.5", "٣"], 1), (["0"], 1)],
)
def test_the_next_version_follows_the_highest(tmp_path: Path, present: list[str], following: int) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    assert next_version(tmp_path) == following


def test_after_the_last_version_there_is_none(tmp_path: Path) -> None:
    (tmp_path / str(2**63 - 1)).mkdir()
    with refused(ExportError, match="version 9223372036854775807"):
        version_writer(tmp_path).reserve()
    assert [path.name for path in tmp_path.iterdir()] == [str(2**63 - 1)]
    with version_writer(tmp_path, 7) as staging:
        assert staging.publish().name == "7"


def test_a_commit_shows_a_whole_version_and_leaves_nothing_else(tmp_path: Path) -> None:
    model_dir = tmp_path / "new" / "model"
    with version_writer(model_dir) as staging:
        assert names(model_dir) == [staging.folder.name]
        assert staging.folder.name.startswith(".staging-1-")
        (staging.path / "variables").mkdir()
        (staging.path / "variables" / "data").write_text("rows")
        assert staging.publish() == model_dir / "1"
    assert names(model_dir) == ["1"]
    assert (model_dir / "1" / "variables" / "data").read_text() == "rows"
    assert commit(model_dir) == model_dir / "2"
    assert commit(model_dir, 40) == model_dir / "40"
    assert commit(model_dir) == model_dir / "41"


def test_everything_is_on_the_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append(f"-> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with version_writer(tmp_path / "m") as staging:
        (staging.path / "variables").mkdir()
        (staging.path / "variables" / "data").touch()
        (staging.path / "graph").touch()
        staging.publish()
    at = events.index("-> 1")
    assert set(events[:at]) == {"graph", "data", "variables", "version"}
    assert events[at + 1 :] == ["m"]


def test_an_explicit_version_that_is_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    with version_writer(tmp_path, 3) as staging:
        (staging.path / "saved_model.pb").write_text("late")
        commit(tmp_path, 3, "early")
        with refused(ExportError, match="version 3 exists"):
            staging.publish()
    assert (tmp_path / "3" / "saved_model.pb").read_text() == "early"
    assert names(tmp_path) == ["3"]


def test_an_automatic_version_that_is_taken_meanwhile_becomes_the_next(tmp_path: Path) -> None:
    with version_writer(tmp_path) as late:
        assert commit(tmp_path).name == "1"
        assert late.publish().name == "2"
    assert names(tmp_path) == ["1", "2"]


def test_many_exporters_at_once_get_a_version_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def slow_rename(self: Path, target: Path) -> Path:
        time.sleep(0.01)  # leaves time for others to choose the same number
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slow_rename)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(commit(tmp_path / "m"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(path.name) for path in paths) == list(range(1, 17))
    assert sorted(map(int, names(tmp_path / "m"))) == list(range(1, 17))


def test_without_locks_versions_are_still_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, and with another exporter that commits between the choice of a number and the rename."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    rename = Path.rename

    def overtaken_rename(self: Path, target: Path) -> Path:
        if not target.exists() and target.name in ("1", "9"):
            target.mkdir()
            (target / "saved_model.pb").write_text("the other's")
        return rename(self, target)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(Path, "rename", overtaken_rename)
    with version_writer(tmp_path) as living:
        assert commit(tmp_path).name == "2"
        assert living.path.is_dir()
    with refused(ExportError, match="version 9 exists"):
        commit(tmp_path, 9)
    assert names(tmp_path) == ["1", "2", "9"]
    assert (tmp_path / "1" / "saved_model.pb").read_text() == "the other's"


def test_litter_of_the_dead_is_removed_and_work_of_the_living_is_not(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from tests.support.export.writers import version_writer
staging = version_writer(Path({str(tmp_path)!r}))
staging.reserve()
(staging.path / "big").write_text("x")
print(staging.folder.name, flush=True)
os.kill(os.getpid(), 9)
"""
    dead = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    assert names(tmp_path) == [dead]
    (tmp_path / ".staging-mine").write_text("a user's file")
    with version_writer(tmp_path) as living:
        assert names(tmp_path) == sorted([living.folder.name, ".staging-mine"])
        commit(tmp_path)
        assert living.path.is_dir()


@pytest.mark.parametrize("below", ["", "model", "a/b"])
def test_a_file_in_place_of_model_dir_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with refused(ExportError):
        version_writer(tmp_path / "file" / below).reserve()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/sys is Linux's")
@pytest.mark.parametrize("model_dir", ["/sys", "/sys/model"])
def test_a_model_dir_that_cannot_be_written_is_named(model_dir: str) -> None:
    with pytest.raises(
        ExportError, match=rf"^MODEL_DIR {model_dir}: cannot be written: .*. Name a directory that you may"
    ):
        version_writer(Path(model_dir)).reserve()


def test_a_full_disk_is_seen_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return shutil._ntuple_diskusage(10**12, 10**12 - 2_500_000, 2_500_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    source = Source(path="ckpt", fingerprint="f")
    FolderWriter(tmp_path / "not" / "yet", plan_export([info("t", 625, 1000)]), ExportOptions(), source).check()
    with refused(ExportError, match=r"\(10000000000 bytes\)"):
        large = plan_export([info("t", 2_500_000, 1000)])
        FolderWriter(tmp_path / "not" / "yet", large, ExportOptions(), source).check()
    assert asked == [tmp_path, tmp_path]
