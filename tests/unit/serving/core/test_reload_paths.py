"""Which folders a client may choose, by the folders of the start and the modes of their parents."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tpuembed.files import FilePath, as_path
from tpuembed_serving.core.reload_paths import ReloadPaths


def allowed(start: str | Path, paths: Iterable[str | FilePath]) -> list[bool]:
    """Which of `paths` a client of a server that starts with `start` may choose."""
    found = ReloadPaths.of([as_path(start)])
    return [found.find(as_path(path)) is not None for path in paths]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models" / "rec").mkdir(parents=True)
    (tmp_path / "models").chmod(0o755)
    return tmp_path / "models"


def test_folders_below_the_parent(models: Path) -> None:
    paths = [
        models / "rec",
        models / "new",
        models / "a" / "b",
        models,
        models.parent / "models2" / "a",
        models / ".." / "x",
    ]
    assert allowed(models / "rec", paths) == [True, True, True, False, False, False]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_a_parent_that_others_can_write_to(models: Path, mode: int) -> None:
    models.chmod(mode)
    assert allowed(models / "rec", [models / "rec", models / "new", models / "rec" / "a"]) == [True, False, False]


def test_a_home_and_a_root(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(models))
    assert allowed(models / "rec", [models / "rec", models / "new"]) == [True, False]
    for parent in ("/", "/root", "/home", "/home/someone", "/no/such/folder"):
        start = Path(parent, "rec")
        assert allowed(start, [start, start.with_name("new")]) == [True, False], start
    assert not allowed("/rec", ["/etc"])[0]


def test_links(models: Path, tmp_path: Path) -> None:
    (tmp_path / "releases" / "7").mkdir(parents=True)
    (models / "current").symlink_to(tmp_path / "releases" / "7")
    (models / "circle").symlink_to(models / "circle")
    found = ReloadPaths.of([models / "current"])
    assert found.is_chosen(models / "current")
    assert found.find(models / "current") == tmp_path / "releases" / "7"
    assert found.find(tmp_path / "releases" / "8") is None, "the parent is that of the link, not of where it leads"
    assert found.find(Path("//", str(models).lstrip("/"), "circle")) == models / "circle"
    (models / "current").unlink()
    (models / "current").symlink_to(tmp_path)
    assert found.is_chosen(models / "current"), "the operator's link may change"
    assert found.find(models / "current") is None


def test_a_folder_that_is_given_from_where_the_server_starts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    for start in ("rec", "./rec", "new/../rec"):
        assert allowed(start, [models / "rec", models / "new", models.parent / "x"]) == [True, True, False], start
    monkeypatch.chdir(models / "rec")
    assert allowed(".", [models / "rec", models / "new"]) == [True, True]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_stores(scheme: str) -> None:
    def urls(*texts: str) -> list[FilePath]:
        return [as_path(f"{scheme}://{text}") for text in texts]

    paths = urls("b/m/rec", "b/m/new", "b/m", "b/m2/new", "other/m/new", "b/m/../x", "b/m/a/../new")
    assert allowed(f"{scheme}://b/m/rec", paths) == [True, True, False, False, False, False, True]
    assert allowed(f"{scheme}://b/rec", urls("b/rec", "b/new", "b/rec/new")) == [True, False, False]
    assert allowed(f"{scheme}://b/m/rec", ["/b/m/new", "memory://b/m/new"]) == [False, False]
