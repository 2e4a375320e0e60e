"""`relocate_export`: what is rewritten, what is checked, what is refused."""

import shutil
import stat
from pathlib import Path

import pytest

from tests.support.messages import refused
from tests.support.saved_model_graphs import FILES, constant, graph, manifest, paths
from tpuembed.errors import ConfigError
from tpuembed.formats.saved_model import relocate_export


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """An export whose two tables are mapped."""
    folder = tmp_path / "models" / "12"
    (folder / "variables").mkdir(parents=True)
    for file, size in manifest().table_files().items():
        (folder / file).write_bytes(b"\0" * size)
    nodes = [constant(f"/old/12/{file}".encode(), shape) for file, shape in zip(FILES, ([3, 4], [5, 2]), strict=True)]
    (folder / "saved_model.pb").write_bytes(graph(nodes, nodes).SerializeToString())
    manifest().write(folder)
    return folder


def mapped(version: Path) -> set[bytes]:
    return set(paths((version / "saved_model.pb").read_bytes()))


def test_paths_are_those_of_the_server(version: Path) -> None:
    (version / "saved_model.pb").chmod(0o640)
    done = relocate_export(version, manifest(), "/srv/models")
    assert mapped(version) == {f"/srv/models/12/{file}".encode() for file in FILES}
    assert done.files == {"a": f"/srv/models/12/{FILES[0]}", "b": f"/srv/models/12/{FILES[1]}"}
    assert (done.changed, done.found) == (True, False)
    assert stat.S_IMODE((version / "saved_model.pb").stat().st_mode) == 0o640
    assert {path.name for path in version.iterdir()} == {"saved_model.pb", "variables", "assets.extra"}


def written(version: Path) -> tuple[int, int]:
    """What changes if the graph is written: the time, and another file's number. Its reader changes the time of access."""
    found = (version / "saved_model.pb").stat()
    return found.st_mtime_ns, found.st_ino


def test_a_second_time_writes_nothing(version: Path) -> None:
    relocate_export(version, manifest(), "/srv/models/")
    before = written(version)
    assert not relocate_export(version, manifest(), "/srv/models").changed
    assert written(version) == before


def test_a_reader_keeps_the_file_it_opened(version: Path) -> None:
    with (version / "saved_model.pb").open("rb") as file:
        old = file.read()
        relocate_export(version, manifest(), "/srv/models")
        file.seek(0)
        assert file.read() == old


def test_a_root_of_this_machine_must_hold_the_files(version: Path, tmp_path: Path) -> None:
    assert relocate_export(version, manifest(), str(version.parent)).found
    other = tmp_path / "other"
    shutil.copytree(version, other / "12")
    (other / "12" / FILES[1]).unlink()
    before = mapped(version)
    with refused(ConfigError, match=r"stack 'b'"):
        relocate_export(version, manifest(), str(other))
    assert mapped(version) == before


def test_files_are_looked_for_in_the_export_where_the_root_is_elsewhere(version: Path) -> None:
    with (version / FILES[0]).open("ab") as file:
        file.write(b"x")
    with refused(ConfigError, match=r"stack 'a'"):
        relocate_export(version, manifest(), "/srv/models")


@pytest.mark.parametrize("root", ["", "models", "./models", "../models"])
def test_a_relative_root_is_refused(version: Path, root: str) -> None:
    with refused(ConfigError):
        relocate_export(version, manifest(), root)


def test_other_layouts_are_refused(version: Path) -> None:
    with refused(ConfigError):
        relocate_export(version, manifest("variables"), "/srv/models")


def test_a_missing_graph(version: Path) -> None:
    (version / "saved_model.pb").unlink()
    with refused(ConfigError, match="saved_model"):
        relocate_export(version, manifest(), "/srv/models")
