"""Versions are removed only if nothing needs them, by one rename each; the rest stays whole."""

import concurrent.futures
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.writers import version_writer
from tests.support.messages import refused
from tpuembed import export_saved_model, list_versions, prune_versions, rollback_version
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import ConfigError, ExportError

CONFIG = {"features": {"user": {"table": "users", "input": "id"}}}


def plain(model_dir: Path, *numbers: int) -> Path:
    """Versions of another program."""
    for number in numbers:
        (model_dir / str(number) / "variables").mkdir(parents=True)
        (model_dir / str(number) / "saved_model.pb").write_bytes(b"graph")
        (model_dir / str(number) / "variables" / "data").write_bytes(bytes(1000 * number))
    return model_dir


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 3 with the same tables: 1 and 3 mapped, 2 loaded."""
    folder = tmp_path_factory.mktemp("exported")
    write_checkpoint(folder / "ckpt", {"users": random_table(500, 8)})
    with exports_in_this_process():
        for layout in ("mmap", "variables", "mmap"):
            export_saved_model(folder / "ckpt", folder / "rec", serving_config=CONFIG, layout=layout)
    return folder / "rec"


def moved(exported: Path, to: Path) -> Path:
    """A copy that keeps hard links."""
    subprocess.run(["cp", "-a", str(exported), str(to)], check=True)
    return to


def test_versions_in_use_stay(tmp_path: Path) -> None:
    model_dir, asked = plain(tmp_path, 1, 2, 3, 4), list[set[int]]()

    def in_use(found: Any) -> dict[int, str]:
        asked.append(set(found))
        return {2: "label stable", 9: "not here"}

    report = prune_versions(model_dir, keep=1, in_use=in_use)
    assert asked == [{1, 2, 3, 4}]
    assert report.kept == {2: "label stable", 4: "newest"}
    assert names(model_dir) == ["2", "4"]


def test_a_version_that_appears_while_servers_are_asked_removes_none_of_theirs(tmp_path: Path) -> None:
    model_dir = plain(tmp_path, 1, 2)

    def publish_two(found: Any) -> dict[int, str]:
        plain(model_dir, 3, 4)
        return {2: "AVAILABLE"}

    report = prune_versions(model_dir, keep=1, in_use=publish_two)
    assert report.removed == (1,)
    assert report.kept[3] == "published during this prune"
    assert names(model_dir) == ["2", "3", "4"]


def test_shared_files_are_not_freed_and_stay_whole(exported: Path, tmp_path: Path) -> None:
    model_dir = moved(exported, tmp_path / "rec")
    rollback_version(model_dir, 2)
    before = {info.version: info for info in list_versions(model_dir)}
    assert [info.layout for info in before.values()] == ["mmap", "variables", "mmap", "variables"]
    assert before[4].bytes_shared >= 500 * 8 * 4
    report = prune_versions(model_dir, keep=1)
    assert report.removed == (1, 2, 3)
    assert report.bytes_freed == sum(before[number].bytes_own for number in (1, 2, 3))
    (left,) = list_versions(model_dir)
    assert left.bytes_shared == 0
    assert left.bytes_own == before[4].bytes_own + before[4].bytes_shared
    assert not verify_files(str(model_dir / "4")).damaged


def test_a_version_with_symbolic_links_keeps_all_others(tmp_path: Path) -> None:
    model_dir = plain(tmp_path / "rec", 1, 2, 3)
    (model_dir / "3" / "more").symlink_to("../1/variables/data")
    (model_dir / "loop").symlink_to("loop")
    assert [info.bases for info in list_versions(model_dir)] == [(), (), (1, 2)]
    assert prune_versions(model_dir, keep=1).removed == ()
    (model_dir / "5").symlink_to("3")
    assert prune_versions(model_dir, keep=1).kept[1] == "version 5 reads its files"
    assert prune_versions(plain(model_dir, 7), keep=1).removed == (1, 2, 3, 5)
    assert names(model_dir) == ["7", "loop"]


def test_a_linked_folder_elsewhere_is_not_deleted(tmp_path: Path) -> None:
    plain(tmp_path / "other", 1)
    model_dir = plain(tmp_path / "rec", 2)
    (model_dir / "1").symlink_to(tmp_path / "other" / "1")
    assert prune_versions(model_dir, keep=1).removed == (1,)
    assert names(model_dir) == ["2"]
    assert (tmp_path / "other" / "1" / "saved_model.pb").is_file()


def test_a_copied_version_needs_the_files_that_its_graph_names(exported: Path, tmp_path: Path) -> None:
    model_dir = moved(exported, tmp_path / "rec")
    shutil.copytree(model_dir / "1", model_dir / "4")  # its graph maps the tables of version 1
    assert list_versions(model_dir)[-1].bases == (1,)
    assert prune_versions(model_dir, keep=1).removed == (2, 3)


def test_an_incomplete_version_counts_for_nothing(exported: Path, tmp_path: Path) -> None:
    model_dir = moved(exported, tmp_path / "rec")
    (model_dir / "4").mkdir()  # a copy that has just begun
    shutil.copytree(model_dir / "3", model_dir / "5")
    data = max((model_dir / "5" / "variables").glob("*.data-*"))
    os.truncate(data, 10)
    assert [bool(info.fault) for info in list_versions(model_dir)] == [False, False, False, True, True]
    report = prune_versions(model_dir, keep=1)
    assert report.removed == (1, 2)
    assert names(model_dir) == ["3", "4", "5"]
    plain(model_dir, 6)
    assert prune_versions(model_dir, keep=1).removed == (3, 4, 5)


def test_a_manifest_that_cannot_be_read_may_name_a_base(exported: Path, tmp_path: Path) -> None:
    model_dir = moved(exported, tmp_path / "rec")
    manifest = model_dir / "3" / "assets.extra" / "tpuembed.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with refused(ConfigError):
        prune_versions(model_dir, keep=1)
    assert names(model_dir) == ["1", "2", "3"]
    assert "format" in list_versions(model_dir)[-1].fault


def test_the_next_prune_finishes_an_interrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = plain(tmp_path, 1, 2, 3)

    def killed(path: Path, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_versions(model_dir, keep=1)
    assert [info.version for info in list_versions(model_dir)] == [3]
    assert len(list(model_dir.glob(".pruned-*"))) == 2
    assert prune_versions(model_dir, keep=1, dry_run=True).removed == ()
    assert len(list(model_dir.glob(".pruned-*"))) == 2
    assert prune_versions(model_dir, keep=1).removed == ()
    assert names(model_dir) == ["3"]


def test_what_cannot_be_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = plain(tmp_path, 1, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda _, **__: None)
    monkeypatch.setattr("secrets.token_hex", lambda _: "ab12")
    with refused(ExportError, match=r"\.pruned-1-"):
        prune_versions(model_dir, keep=1)


def test_prunes_at_the_same_time(tmp_path: Path) -> None:
    model_dir = plain(tmp_path, *range(1, 30))
    for version in range(1, 30):
        for number in range(30):
            (model_dir / str(version) / "variables" / f"more-{number}").touch()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        reports = list(pool.map(lambda _: prune_versions(model_dir, keep=1), range(6)))
    assert sorted(version for report in reports for version in report.removed) == list(range(1, 29))
    assert names(model_dir) == ["29"]


def test_running_exports_are_left_alone(exported: Path, tmp_path: Path) -> None:
    model_dir = moved(exported, tmp_path / "rec")
    with version_writer(model_dir) as running:
        (running.path / "saved_model.pb").write_text("x")
        prune_versions(model_dir, keep=1)
        assert running.publish().name == "4"
    assert names(model_dir) == ["3", "4"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_counts_versions(tmp_path: Path, keep: Any) -> None:
    with refused(ConfigError):
        prune_versions(plain(tmp_path, 1, 2), keep=keep)
    assert names(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("place", ["missing", "empty", "a-file", "s3"])
def test_a_model_dir_is_a_folder_with_versions(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    where = "s3://bucket/rec" if place == "s3" else tmp_path / place
    for function in (prune_versions, list_versions):
        with refused(ConfigError):
            function(where)


def test_an_export_that_cannot_prune_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "ckpt", {"users": random_table(50, 8)})
    model_dir = plain(tmp_path / "rec", 1)
    monkeypatch.setattr(
        "tpuembed.export.retention.prune._choose", lambda *_: (_ for _ in ()).throw(ExportError("no room"))
    )
    with (
        exports_in_this_process(),
        pytest.warns(UserWarning, match="version 2 is published, but old versions could not be removed: no room"),
    ):
        export_saved_model(tmp_path / "ckpt", model_dir, serving_config=CONFIG, keep=1)
    assert names(model_dir) == ["1", "2"]


@pytest.mark.parametrize("model_dir", ["rec", "s3://bucket/rec"])
def test_an_export_refuses_to_keep_none_or_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "ckpt", {"users": random_table(50, 8)})
    with refused(ConfigError):
        export_saved_model(tmp_path / "ckpt", model_dir, serving_config=CONFIG, keep=0 if model_dir == "rec" else 2)
    assert not (tmp_path / "rec").exists()
