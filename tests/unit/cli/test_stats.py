"""`tpuembed stats` as a user sees it."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tests.support.messages import said
from tests.support.serving.process import run_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats")
    rows = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
    rows[7, 0], rows[9], rows[11] = np.nan, 0, 100
    write(folder / "ckpt", {"videos": rows, "users": np.ones((4, 1), np.float32)})
    return folder


def test_for_people(folder: Path) -> None:
    done = run_command("stats", folder / "ckpt", "--html", folder / "page.html")
    assert done.returncode == 0, done.stderr
    for text in (
        "videos: 500 rows of 8 float32, 16.0 kB", "1: row 7", "row 11: 282.8", "a row of width 1 has no direction",
        "refused: row 7 contains nan, which int8 cannot hold", "the checkpoint has no slots of this table",
    ):  # fmt: skip
        assert text in done.stdout
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in folder.glob(".page*")] == []


def test_files_that_are_there(folder: Path, tmp_path: Path) -> None:
    """What is no regular file stays, a link leads to its target, and the mode is kept."""
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), str(tmp_path), ""):
        done = run_command("stats", folder / "ckpt", "--html", name)
        assert (done.returncode, done.stdout) == (2, ""), name
        said(done.stderr)
    assert (tmp_path / "pipe").is_fifo()
    target, link = tmp_path / f"{'a' * 250}.html", tmp_path / "link.html"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    assert run_command("stats", folder / "ckpt", "--html", link).returncode == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
    assert target.stat().st_mode & 0o777 == 0o600
