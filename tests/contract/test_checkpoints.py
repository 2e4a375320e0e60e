"""`open_checkpoint`: what it lists and reads, against the arrays of whoever wrote the checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_refusals import assert_each_is_refused
from tests.support.goldens import read_golden
from tpuembed import open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigError,
)

Array = np.ndarray[Any, Any]


def random(rows: int, dim: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, rows, dim]).normal(size=(rows, dim)).astype(np.float32)


def test_a_directory_stands_for_its_latest(tmp_path: Path) -> None:
    rows = tf.Variable(random(5, 3))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(t=rows), str(tmp_path), max_to_keep=3)
    for number in range(3):
        rows.assign(random(5, 3, number))
        manager.save()
    places: list[tuple[str | Path, int]] = [
        *((tmp_path, 2), (tmp_path / "ckpt-1", 0), (f"{tmp_path}/ckpt-2", 1), (tmp_path / "ckpt-2.index", 1)),
    ]
    for path, number in places:
        with open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("t"), random(5, 3, number), err_msg=str(path))


# ---- errors


def test_no_table_is_an_error(tmp_path: Path) -> None:
    bundle = tf.train.Checkpoint(bias=tf.Variable([1.0]), ids=tf.Variable([[1]])).write(str(tmp_path / "ckpt"))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(2.0)])
    model.save(tmp_path / "m.keras")
    for path in (bundle, tmp_path / "m.keras"):
        with pytest.raises(CheckpointFormatError, match=r"no table|no embedding table"):
            open_checkpoint(path)


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    cases = [(lambda path=tmp_path / name: open_checkpoint(path), name) for name in ("none", "note.txt", "empty")]
    assert_each_is_refused(CheckpointNotFoundError, cases)
    assert_each_is_refused(FileNotFoundError, cases)
    assert_each_is_refused(ConfigError, [(lambda: open_checkpoint(3), "3")])  # type: ignore[arg-type]
    golden = read_golden("tfrs/adam_lookups").path
    assert_each_is_refused(ConfigError, [(lambda: open_checkpoint(golden, nonsense=1), "nonsense")])


def read_all(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for table in checkpoint.tables():
            checkpoint.read(table)


@pytest.mark.parametrize("name", ["tfrs/adam_lookups", "keras_rs/weights_h5", "orbax/tree_files"])
def test_a_file_that_is_cut_is_corrupt(tmp_path: Path, name: str) -> None:
    """Never rows of zeros: the largest file of the checkpoint has lost its second half."""
    golden = read_golden(name)
    shutil.copytree(golden.path.parent, tmp_path / "copy")
    path = tmp_path / "copy" / golden.path.name
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    files = [file for file in files if file.exists()] or list(path.parent.glob(path.name + ".data*"))
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointCorruptError):
        read_all(path)
