"""Versions come and go on disk; requests always have one to run on."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import FakeLoader, make_version, wait_for
from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code, LoadStopped, StatusError
from tpuembed_serving.models.repository import ModelRepository, ServedModel
from tpuembed_serving.settings import ModelSettings


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


@pytest.fixture
def model(loader: FakeLoader, base_path: Path) -> ServedModel:
    return ServedModel(ModelSettings(name="m", base_path=base_path), loader, lambda: None)


def states(model: ServedModel) -> dict[int, State]:
    return {status.version: status.state for status in model.statuses()}


def served(model: ServedModel) -> int:
    with model.lease(None) as loaded:
        return loaded.version


def test_a_request_in_progress_keeps_its_version(model: ServedModel, loader: FakeLoader, base_path: Path) -> None:
    make_version(base_path, 1)
    model.poll()
    with model.lease(None) as loaded, model.lease(1):
        make_version(base_path, 2)
        model.poll()
        assert loaded.version == 1
        assert served(model) == 2
        assert states(model) == {2: State.AVAILABLE, 1: State.UNLOADING}
        assert not loader.loaded["1"].closed.is_set()
        with pytest.raises(StatusError), model.lease(1):
            pass
    model.poll()
    assert loader.loaded["1"].closed.is_set()
    assert states(model)[1] is State.END


def test_a_version_that_fails_is_kept_with_its_error_and_the_old_one_serves(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    make_version(base_path, 1)
    model.poll()
    path = make_version(base_path, 2)
    loader.broken["2"] = StatusError(Code.DATA_LOSS, "version 2: torn")
    model.poll()
    model.poll()
    assert loader.calls == ["1", "2"], "a failed load is not tried again at every look"
    failed = model.statuses()[0]
    assert (failed.version, failed.state) == (2, State.END)
    assert failed.error is not None
    assert failed.error.to_string() == "DATA_LOSS: version 2: torn"
    assert failed.error.__traceback__ is None, "its frames would keep what was half loaded"
    assert failed.error.__context__ is None
    assert served(model) == 1
    loader.broken.clear()
    (path / "saved_model.pb").write_bytes(b"a whole graph")
    model.poll()
    assert served(model) == 2
    assert model.statuses()[0].error is None


def replace(base_path: Path) -> None:
    """Write version 1 again, as another export does."""
    shutil.rmtree(base_path / "1", ignore_errors=True)
    (make_version(base_path, 1) / "saved_model.pb").write_bytes(b"another graph")


def test_a_version_whose_files_are_replaced_is_loaded_again(
    model: ServedModel, loader: FakeLoader, base_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_version(base_path, 1)
    model.poll()
    before, seen = loader.loaded["1"], list[tuple[int, dict[int, State]]]()
    with model.lease(1) as old:
        replace(base_path)
        loader.during = lambda: seen.append((served(model), states(model)))
        model.poll()
        assert not seen, "a copy may be in progress"
        model.poll()
        assert seen == [(1, {1: State.AVAILABLE})], "that of before answers until the new one is loaded"
        after = loader.loaded["1"]
        assert after is not before
        assert old.servable is before
        assert not before.closed.is_set()
        with model.lease(1) as new:
            assert new.servable is after
    model.poll()
    assert before.closed.is_set()
    assert not after.closed.is_set()
    assert (loader.calls, states(model)) == (["1", "1"], {1: State.AVAILABLE})
    assert [record.message for record in caplog.records] == [
        "model m version 1: its files were replaced. It is loaded again"
    ]
    model.retire()
    model.unload()
    assert model.idle


def test_a_version_that_is_removed_during_a_request_and_written_again_is_loaded_again(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    make_version(base_path, 1)
    model.poll()
    before = loader.loaded["1"]
    with model.lease(1):
        shutil.rmtree(base_path / "1")
        model.poll()
        assert states(model) == {1: State.UNLOADING}
        replace(base_path)
        for _ in range(2):
            model.poll()
        with model.lease(1) as loaded:
            assert loaded.servable is not before
    model.poll()
    assert before.closed.is_set()
    assert states(model) == {1: State.AVAILABLE}


def test_files_that_cannot_replace_a_version_leave_it(
    model: ServedModel, loader: FakeLoader, base_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_version(base_path, 1)
    model.poll()
    before = loader.loaded["1"]
    loader.broken["1"] = StatusError(Code.DATA_LOSS, "version 1: torn")
    replace(base_path)
    for _ in range(4):
        model.poll()
    assert (loader.calls, states(model)) == (["1", "1"], {1: State.AVAILABLE})
    text = "model m version 1: the files that replaced its own cannot be loaded: version 1: torn. Next retry in 60 s. "
    assert caplog.records[-1].message == f"{text}Those of before are served"
    with model.lease(1) as loaded:
        assert loaded.servable is before
    loader.broken.clear()
    (base_path / "1" / "saved_model.pb").write_bytes(b"a whole graph")
    for _ in range(2):
        model.poll()
    assert loader.loaded["1"] is not before
    assert before.closed.is_set()


def test_each_file_of_a_version_but_extra_assets_is_part_of_it(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    """A tool that copies may replace the graph first, and the tables minutes later."""
    path = make_version(base_path, 1)
    for folder in ("variables", "assets.extra"):
        (path / folder).mkdir()
    table, manifest = path / "variables" / "table", path / "assets.extra" / "tpuembed.json"
    for file in (table, manifest):
        file.write_bytes(b"one")
    model.poll()
    for number, file in enumerate((table, manifest), start=2):
        (path / "new").write_bytes(b"two")
        (path / "new").replace(file)
        for _ in range(3):
            model.poll()
        assert loader.calls == ["1"] * number
    (path / "assets.extra" / "tf_serving_warmup_requests").write_bytes(b"more")
    for _ in range(3):
        model.poll()
    assert len(loader.calls) == 3


def test_files_that_change_while_they_are_read_are_not_served(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    """The tables of a version that was replaced during its load were those of two exports."""
    make_version(base_path, 1)
    loader.during = lambda: replace(base_path)
    model.poll()
    assert not model.available
    assert loader.loaded["1"].closed.is_set()
    loader.during = lambda: None
    model.poll()
    before = loader.loaded["1"]
    assert served(model) == 1
    loader.during = lambda: replace(base_path)
    (base_path / "1" / "saved_model.pb").write_bytes(b"a third graph")
    for _ in range(2):
        model.poll()
    assert loader.loaded["1"].closed.is_set()
    with model.lease(1) as loaded:
        assert loaded.servable is before
    loader.during = lambda: None
    for _ in range(2):
        model.poll()
    with model.lease(1) as loaded:
        assert loaded.servable is loader.loaded["1"]
    assert before.closed.is_set()


@pytest.mark.parametrize(
    "target", ["nowhere", ".#lock", ".", ".."], ids=["to nothing", "to itself", "to its folder", "above"]
)
def test_a_link_that_leads_nowhere_hides_no_change(
    model: ServedModel, loader: FakeLoader, base_path: Path, target: str
) -> None:
    """An editor's lock is such a link. With it, a version had the rows of two exports, or old ones for ever."""
    link = make_version(base_path, 1) / ".#lock"
    (link.parent / "table").write_bytes(b"one")
    link.symlink_to(target)

    def replace_table() -> None:
        (link.parent / "table").write_bytes(b"of another export")

    loader.during = replace_table
    model.poll()
    assert not model.available
    loader.during = lambda: None
    model.poll()
    assert model.available
    link.unlink()
    for _ in range(3):
        model.poll()
    assert loader.calls == ["1", "1"], "a link that is gone replaces nothing"
    (link.parent / "table").write_bytes(b"of a third export")
    for _ in range(2):
        model.poll()
    assert loader.calls == ["1", "1", "1"]


def test_links_that_cross_are_followed_once(model: ServedModel, loader: FakeLoader, base_path: Path) -> None:
    """Each path through them was a file of its own: a poll took minutes."""
    version = make_version(base_path, 1)
    folders = [version / str(number) for number in range(12)]
    for folder in folders:
        folder.mkdir()
    for folder in folders:
        for other in folders:
            (folder / f"to{other.name}").symlink_to(other)
    (folders[3] / "table").write_bytes(b"one")
    model.poll()
    (folders[3] / "table").write_bytes(b"of another export")
    for _ in range(3):
        model.poll()
    assert loader.calls == ["1", "1"]


def test_a_manifest_of_the_same_size_and_time_replaces_a_version(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    """Archives may give all files one time, and the tables of two exports have one size. Their checksums differ."""
    manifest = make_version(base_path, 1) / "assets.extra" / "tpuembed.json"
    manifest.parent.mkdir()
    for content in (b"one", b"two"):
        manifest.write_bytes(content)
        os.utime(manifest, (1, 1))
        for _ in range(3):
            model.poll()
    assert loader.calls == ["1", "1"]


def test_a_version_that_is_replaced_always_answers(
    model: ServedModel, base_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For microseconds, neither the old files nor the new ones answered."""
    make_version(base_path, 1)
    model.poll()
    enter, entered = model._enter, list[int]()

    def checked(*arguments: Any) -> None:
        entered.append(served(model))
        enter(*arguments)

    monkeypatch.setattr(model, "_enter", checked)
    replace(base_path)
    for _ in range(3):
        model.poll()
    assert set(entered) == {1}


def test_a_version_into_which_a_log_is_written_is_loaded_once_that_ends(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    """It was loaded without end."""
    log = make_version(base_path, 1) / "trace.log"

    def write() -> None:
        with log.open("a") as file:
            file.write("a line\n")

    loader.during = write
    for _ in range(5):
        model.poll()
        write()
    assert loader.calls == ["1"]
    (status,) = model.statuses()
    assert status.error is not None
    assert status.error.message == "version 1: trace.log changed while the version was read"
    assert status.error.__traceback__ is None, "its frames would keep what was loaded"
    (progress,) = model.progress()
    assert progress.fault == f"{status.error.message}. It is loaded once its files stay as they are"
    loader.during = lambda: None
    for _ in range(2):
        model.poll()
    assert (loader.calls, model.available) == (["1", "1"], True)


def test_a_file_that_is_missing_for_a_moment_is_no_other_version(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    manifest = make_version(base_path, 1) / "assets.extra" / "tpuembed.json"
    manifest.parent.mkdir()
    manifest.write_bytes(b"manifest")
    model.poll()
    away = manifest.rename(base_path / "away")
    for _ in range(4):
        model.poll()
    away.rename(manifest)
    for _ in range(4):
        model.poll()
    assert (loader.calls, states(model)) == (["1"], {1: State.AVAILABLE})


def test_an_unexpected_exception_is_a_failed_load(model: ServedModel, loader: FakeLoader, base_path: Path) -> None:
    make_version(base_path, 1)
    loader.broken["1"] = MemoryError("no room")
    model.poll()
    (status,) = model.statuses()
    assert status.error is not None
    assert status.error.to_string() == "UNKNOWN: version 1: MemoryError: no room"


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_load_that_the_stop_ends_is_no_error(
    model: ServedModel, loader: FakeLoader, base_path: Path, is_stop: bool
) -> None:
    make_version(base_path, 1)
    kind = LoadStopped if is_stop else StatusError
    loader.broken["1"] = kind(Code.CANCELLED, "version 1: cut off")
    model.poll()
    (status,) = model.statuses()
    assert status.state is State.END
    assert status.error is not None
    assert status.error.to_string() == "CANCELLED: version 1: cut off"
    assert bool(model.progress()[0].fault) is not is_stop, "TensorFlow cancels too, and then the load has failed"


def test_a_failed_load_is_tried_again_five_times_a_minute_apart(
    model: ServedModel, loader: FakeLoader, base_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("tpuembed_serving.models.model.time.monotonic", lambda: now)
    make_version(base_path, 1)
    loader.broken["1"] = StatusError(Code.INTERNAL, "disk")
    model.poll()
    for tries in range(1, 6):
        now += 59
        model.poll()
        assert len(loader.calls) == tries
        now += 2
        model.poll()
        assert len(loader.calls) == tries + 1
    now += 1000
    model.poll()
    assert len(loader.calls) == 6, "one load and five retries"
    (base_path / "1" / "saved_model.pb").write_bytes(b"written anew")
    loader.broken.clear()
    model.poll()
    assert served(model) == 1


def test_removing_every_version_ends_the_service_as_theirs_does(model: ServedModel, base_path: Path) -> None:
    make_version(base_path, 1)
    model.poll()
    shutil.rmtree(base_path / "1")
    model.poll()
    assert states(model) == {1: State.END}


def test_a_folder_that_cannot_be_listed_changes_nothing(model: ServedModel, base_path: Path) -> None:
    make_version(base_path, 1)
    model.poll()
    base_path.rename(base_path.with_name("away"))
    model.poll()
    assert served(model) == 1


def test_a_version_in_use_is_unloaded_afterwards_though_its_folder_is_gone(
    model: ServedModel, loader: FakeLoader, base_path: Path
) -> None:
    make_version(base_path, 1)
    model.poll()
    with model.lease(1):
        make_version(base_path, 2)
        model.poll()
        base_path.rename(base_path.with_name("away"))
    model.poll()
    assert loader.loaded["1"].closed.is_set()
    assert served(model) == 2


def test_the_repository_watches_and_stops(loader: FakeLoader, base_path: Path) -> None:
    other = base_path.with_name("n")
    other.mkdir()
    make_version(base_path, 1)
    models = [ModelSettings(name="m", base_path=base_path), ModelSettings(name="n", base_path=other)]
    repository = ModelRepository(models, loader, poll_seconds=0.02)
    assert not repository.ready
    repository.start()
    wait_for(lambda: bool(repository.statuses("m")))
    assert not repository.ready, "n has no version yet"
    make_version(other, 7)
    wait_for(lambda: repository.ready)
    with pytest.raises(StatusError, match=r"^Servable not found for request: Specific\(x, 3\)$"):
        repository.lease("x", 3)
    assert repository.statuses("x") == []
    repository.stop()
    assert all(servable.closed.is_set() for servable in loader.loaded.values())


def test_the_last_request_wakes_the_watch(loader: FakeLoader, base_path: Path) -> None:
    make_version(base_path, 1)
    repository = ModelRepository([ModelSettings(name="m", base_path=base_path)], loader, poll_seconds=0.02)
    repository.start()
    wait_for(lambda: repository.ready)
    with repository.lease("m", 1):
        make_version(base_path, 2)
        wait_for(lambda: repository.statuses("m")[-1].state is State.UNLOADING)
    wait_for(loader.loaded["1"].closed.is_set)
    repository.stop()
