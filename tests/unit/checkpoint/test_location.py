"""From what a user types to one bundle."""

import os
import re
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support.checkpoint.manager import save
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigError,
)


def write_state(directory: Path, latest: str, relative: bool = True) -> None:
    """Have TensorFlow write the `checkpoint` file of `directory`."""
    latest = os.path.relpath(latest, directory) if relative else latest
    tf.compat.v1.train.update_checkpoint_state(str(directory), latest)


def value(path: Path | str) -> float:
    with open_checkpoint(path) as checkpoint:
        return float(checkpoint.read("table")[0, 0])


def test_highest_number_without_a_state_file(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 12))
    (tmp_path / "checkpoint").unlink()
    assert value(tmp_path) == 11


def test_absolute_paths_in_a_moved_state_file(tmp_path: Path) -> None:
    [path] = save(tmp_path / "old", 5)
    write_state(tmp_path / "old", path, relative=False)
    (tmp_path / "old").rename(tmp_path / "new")
    assert str(tmp_path) in (tmp_path / "new" / "checkpoint").read_text()
    assert value(tmp_path / "new") == 5


def test_a_copied_directory_is_read_from_beside_its_state_file(tmp_path: Path) -> None:
    """The state file of the copy has the absolute path of the original, which was trained on."""
    [path] = save(tmp_path / "old", 5)
    write_state(tmp_path / "old", path, relative=False)
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    save(tmp_path / "old", 6)
    assert value(tmp_path / "copy") == 5


@pytest.mark.parametrize("name", ['quote"d', "back\\slash", "umläut", "spa ce", "new\nline"])
def test_escapes_of_the_state_file(tmp_path: Path, name: str) -> None:
    """The directory's name goes into the state file, spelled by TensorFlow."""
    [path] = save(tmp_path / name, 5)
    write_state(tmp_path, path)
    assert value(tmp_path) == 5


def test_the_only_bundle_of_a_directory(tmp_path: Path) -> None:
    tf.train.Checkpoint(table=tf.Variable([[3.0]])).write(str(tmp_path / "any name"))
    assert value(tmp_path) == 3


@pytest.mark.parametrize("others", [["best"], ["other-7"]])
def test_a_directory_that_does_not_say_which(tmp_path: Path, others: list[str]) -> None:
    [path] = save(tmp_path, 1)
    (tmp_path / "checkpoint").unlink()
    for name in others:
        shutil.copy(path + ".index", tmp_path / f"{name}.index")
    with refused(CheckpointFormatError):
        open_checkpoint(tmp_path)


def test_a_state_file_that_names_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoint").write_text('all_model_checkpoint_paths: "ckpt-1"\n')
    with refused(CheckpointCorruptError, match="model_checkpoint_path"):
        open_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-9"\n')
    with refused(CheckpointNotFoundError, match="'ckpt-9'"):
        open_checkpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    cases = {
        "empty": "this directory contains none",
        "file.txt": "this file is not part of one",
        "absent": "no such file, directory or prefix",
        "absent.index": "no such file, directory or prefix",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointNotFoundError, match=message) as caught:
            open_checkpoint(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(tmp_path / name) in str(caught.value)
    (tmp_path / "ckpt.data-00000-of-00001").write_text("")
    with refused(CheckpointNotFoundError, match=r"ckpt\.index"):
        open_checkpoint(tmp_path / "ckpt.data-00000-of-00001")


def test_a_saved_model_without_variables(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with refused(CheckpointNotFoundError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "a" * 5000,
        "zero\0byte",
    ],
    ids=["long", "zero"],
)
def test_paths_that_cannot_be_read(path: str) -> None:
    with refused(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize("url", ["ftp://host/ckpt-1", "s3://", "s3:///ckpt-1", "http://host/ckpt-1", "://x"])
def test_urls_that_are_not_read(url: str) -> None:
    with refused(ConfigError, match=re.escape(f"URL {url}: ")):
        open_checkpoint(url)


def test_a_file_url(tmp_path: Path) -> None:
    [path] = save(tmp_path / "spa ce", 5)
    assert value(f"file://{path}") == value(Path(path).as_uri()) == 5


def test_a_state_file_on_a_disk_never_leads_to_a_store(tmp_path: Path) -> None:
    """Copied from a store, it names the store's checkpoint; the copy beside it is meant."""
    save(tmp_path, 5)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "s3://bucket/dir/ckpt-1"\n')
    assert value(tmp_path) == 5
