"""An older version becomes the newest again: the same rows, under the next number, and nothing else changes."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.writers import version_writer
from tests.support.messages import refused
from tpuembed import export_saved_model, prune_versions, rollback_version
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import ConfigError, ExportError
from tpuembed.manifest import MANIFEST_PATH

CONFIG = {"features": {"user": {"table": "users", "input": "id"}}}
ROWS, DIM = 50, 8


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(version: Path) -> Any:
    loaded = tf.saved_model.load(str(version))  # its variables go with it
    return loaded.signatures["serving_default"](user=tf.range(ROWS, dtype=tf.int64))["user"].numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 (mapped) and 2 (loaded) of different tables, in a folder `rec`."""
    folder = tmp_path_factory.mktemp("made")
    with exports_in_this_process():
        for number, layout in enumerate(("mmap", "variables"), start=1):
            write_checkpoint(folder / f"ckpt-{number}", {"users": random_table(ROWS, DIM, seed=number)})
            export_saved_model(folder / f"ckpt-{number}", folder / "rec", serving_config=CONFIG, layout=layout)
    return folder / "rec"


@pytest.fixture
def model_dir(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` whose mapped version is at home."""
    to = tmp_path / "rec"
    with exports_in_this_process():
        export_saved_model(made.parent / "ckpt-1", to, serving_config=CONFIG, layout="mmap")
        export_saved_model(made.parent / "ckpt-2", to, serving_config=CONFIG)
    return to


def test_a_mapped_version_needs_nothing_of_the_old_one(model_dir: Path) -> None:
    rollback_version(model_dir, 1)
    assert prune_versions(model_dir, keep=1).removed == (1, 2)
    np.testing.assert_array_equal(rows(model_dir / "3"), random_table(ROWS, DIM, seed=1))


def test_tables_are_links_and_what_people_edit_is_copied(model_dir: Path) -> None:
    extra = model_dir / "1" / "assets.extra" / "note"
    extra.write_text("old")
    rollback_version(model_dir)
    one, three = model_dir / "1", model_dir / "3"
    data = max(path.relative_to(one) for path in one.glob("variables/*.data-*"))
    assert (one / data).samefile(three / data)
    (three / "assets.extra" / "note").write_text("new")
    assert extra.read_text() == "old"


def test_a_server_elsewhere_maps_the_new_folder(made: Path, tmp_path: Path) -> None:
    from tpuembed.formats.saved_model import mapped_folders
    from tpuembed.manifest import Manifest

    with exports_in_this_process():
        for number in (1, 2):
            export_saved_model(
                made.parent / f"ckpt-{number}", tmp_path, serving_config=CONFIG, layout="mmap", serving_root="/srv/rec"
            )
    rollback_version(tmp_path)
    manifest = Manifest.read(tmp_path / "3")
    assert manifest is not None
    assert mapped_folders((tmp_path / "3" / "saved_model.pb").read_bytes(), manifest) == {"/srv/rec/3"}
    assert mapped_folders((tmp_path / "1" / "saved_model.pb").read_bytes(), manifest) == {"/srv/rec/1"}


def test_without_hard_links_files_are_copied(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    rollback_version(model_dir)
    assert not verify_files(str(model_dir / "3")).damaged
    np.testing.assert_array_equal(rows(model_dir / "3"), random_table(ROWS, DIM, seed=1))


def test_a_failure_publishes_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    with refused(ExportError, match="rec"):
        rollback_version(model_dir)
    assert names(model_dir) == ["1", "2"]


def test_a_version_of_another_program(tmp_path: Path) -> None:
    for number in (1, 2):
        module = tf.Module()
        module.scale = tf.Variable(float(number))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def call(x: Any, module: Any = module) -> Any:
            return {"y": module.scale * x}

        tf.saved_model.save(module, str(tmp_path / str(number)), signatures=call.get_concrete_function())
    (tmp_path / "1" / "variables").rename(tmp_path / "elsewhere")
    (tmp_path / "1" / "variables").symlink_to("../elsewhere")
    (tmp_path / "1" / "saved_model.pb").rename(tmp_path / "graph")
    (tmp_path / "1" / "saved_model.pb").symlink_to("../graph")
    assert rollback_version(tmp_path).version == 3
    shutil.rmtree(tmp_path / "1")
    loaded = tf.saved_model.load(str(tmp_path / "3"))
    assert loaded.signatures["serving_default"](x=tf.constant([3.0]))["y"].numpy() == [3.0]
    assert not any(path.is_symlink() for path in (tmp_path / "3").rglob("*"))


def test_an_export_at_the_same_time_gets_another_number(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def publish_first(source: Any, target: Any, **options: Any) -> None:
        if not (model_dir / "3").exists():
            with version_writer(model_dir) as other:
                (other.path / "saved_model.pb").write_text("x")
                assert other.publish().name == "3"
            assert prune_versions(model_dir, keep=1).kept == {1: "an export reads it now", 3: "newest"}
        link(source, target, **options)

    monkeypatch.setattr(os, "link", publish_first)
    assert rollback_version(model_dir, 1).version == 4
    assert names(model_dir) == ["1", "3", "4"]
    np.testing.assert_array_equal(rows(model_dir / "4"), random_table(ROWS, DIM, seed=1))


def test_the_next_export_removes_what_a_killed_rollback_left(model_dir: Path) -> None:
    (model_dir / ".staging-3-dead" / "version").mkdir(parents=True)
    os.link(model_dir / "1" / "saved_model.pb", model_dir / ".staging-3-dead" / "version" / "saved_model.pb")
    with version_writer(model_dir) as writer:
        (writer.path / "saved_model.pb").write_text("x")
        writer.publish()
    assert names(model_dir) == ["1", "2", "3"]


@pytest.mark.parametrize("version", [2, 9, 0])
def test_only_an_older_version_can_come_back(model_dir: Path, version: int) -> None:
    with refused(ConfigError):
        rollback_version(model_dir, version)
    assert names(model_dir) == ["1", "2"]


def test_there_must_be_a_version_before(model_dir: Path) -> None:
    shutil.rmtree(model_dir / "1")
    with refused(ConfigError):
        rollback_version(model_dir)
    with refused(ConfigError):
        rollback_version("s3://bucket/rec")


@pytest.mark.parametrize("damage", ["graph", "data"])
def test_an_incomplete_version_does_not_come_back(model_dir: Path, damage: str) -> None:
    one = model_dir / "1"
    (one / "saved_model.pb" if damage == "graph" else max(one.glob("variables/*.data-*"))).unlink()
    with refused(ConfigError):
        rollback_version(model_dir)
    assert names(model_dir) == ["1", "2"]


@pytest.mark.parametrize("damage", ["graph", "manifest"])
def test_an_incomplete_newest_version_leaves_no_default(model_dir: Path, damage: str) -> None:
    """Servers have not loaded it. So the version before it is the one that is to be replaced."""
    shutil.copytree(model_dir / "2", model_dir / "3")
    if damage == "graph":
        (model_dir / "3" / "saved_model.pb").unlink()
    else:
        (model_dir / "3" / MANIFEST_PATH).write_text("{")
    with refused(ConfigError, match="version 3"):
        rollback_version(model_dir)
    assert names(model_dir) == ["1", "2", "3"]
    assert rollback_version(model_dir, 1).version == 4


def test_a_copied_version_is_relocated_first(model_dir: Path) -> None:
    subprocess.run(["cp", "-a", model_dir / "1", model_dir / "3"], check=True)
    shutil.copytree(model_dir / "2", model_dir / "4")
    with refused(ConfigError):
        rollback_version(model_dir)
    assert names(model_dir) == ["1", "2", "3", "4"]
