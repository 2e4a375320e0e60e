"""Versions come and go on disk, are replaced, and fail; requests always have one to run on."""

import gc
import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import FakeLoader, wait_for
from tests.support.serving.folders import Folders
from tpuembed_serving import AllVersions, LatestVersions, ModelSettings, SpecificVersions
from tpuembed_serving.core.status import Code, StatusError

NAMES = [f"m{number}" for number in range(30)]
TORN = StatusError(Code.DATA_LOSS, "version 1: torn")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    with (
        pytest.MonkeyPatch.context() as patch,
        Folders(tmp_path_factory.mktemp("folders"), patch, NAMES) as running,
    ):
        yield running


_unused = itertools.count()


@pytest.fixture
def model(server: Folders, caplog: pytest.LogCaptureFixture) -> str:
    """A model that no other test uses, without a version."""
    caplog.set_level("INFO")
    return NAMES[next(_unused)]


@pytest.fixture
def loader(server: Folders, model: str) -> FakeLoader:
    return server.loaders[model]


def lines(caplog: pytest.LogCaptureFixture, model: str) -> list[str]:
    """What the log says about a model, without the times."""
    return [message.partition(" after ")[0] for message in caplog.messages if f"{model} " in message]


def freed(servable: Any) -> bool:
    gc.collect()
    return servable() is None


# ---- versions in use


def test_a_request_in_progress_keeps_its_version(
    server: Folders, model: str, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it is unloaded, also if its folder is gone, and leaves nothing behind."""
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    with server.busy(model, f"{model}/versions/1") as replies:
        server.publish(model, 2)
        server.wait_for(model, {2: "AVAILABLE", 1: "UNLOADING"})
        assert server.served(model) == 2
        assert server.served(f"{model}/versions/1") == f"Servable not found for request: Specific({model}, 1)"
        (server.root / model).rename(server.root / f".{model}")
        server.settle()
        assert not loader.loaded["1"].closed.is_set()
        assert server.served(model) == 2, "a folder that cannot be listed changes nothing"
    assert [int(reply.headers["x-model-version"]) for reply in replies] == [1]
    server.wait_for(model, {1: "END"})
    assert loader.loaded["1"].closed.is_set()
    gone = weakref.ref(loader.loaded.pop("1"))
    wait_for(lambda: freed(gone))
    folder = server.root / model
    wait_for(lambda: len(lines(caplog, model)) == 5)
    assert lines(caplog, model) == [
        f"loading {model} from {folder}/1", f"model {model} version 1 is available", f"loading {model} from {folder}/2",
        f"model {model} version 2 is available", f"model {model} version 1 unloaded",
    ]  # fmt: skip


def test_removing_every_version_ends_the_service_as_theirs_does(server: Folders, model: str) -> None:
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    shutil.rmtree(server.root / model / "1")
    server.wait_for(model, {1: "END"})
    assert server.served(model) == f"Servable not found for request: Latest({model})"


# ---- versions that fail


def test_a_version_that_fails_is_kept_with_its_error_and_the_old_one_serves(
    server: Folders, model: str, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    loader.broken["2"] = StatusError(Code.DATA_LOSS, "version 2: torn")
    path = server.publish(model, 2)
    server.wait_for(model, {2: "END"})
    server.settle(2)
    assert loader.calls == ["1", "2"], "a failed load is not tried again at every look"
    assert server.error(model, 2) == ("DATA_LOSS", "version 2: torn")
    assert server.served(model) == 1
    wait_for(lambda: freed(loader.halves[0]))
    loader.broken.clear()
    (path / "saved_model.pb").write_bytes(b"a whole graph")
    server.wait_for(model, {2: "AVAILABLE"})
    assert server.error(model, 2) == ("OK", "")
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"model {model} version 2 cannot be loaded: version 2: torn. Next retry in 60 s"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("no room"), ("UNKNOWN", "version 1: MemoryError: no room")),
        (StatusError(Code.CANCELLED, "cut off"), ("CANCELLED", "cut off")),
    ],
    ids=["unexpected", "TensorFlow cancels too"],
)
def test_what_a_load_raises(
    server: Folders, model: str, loader: FakeLoader, error: Exception, status: tuple[str, str], caplog: Any
) -> None:
    loader.broken["1"] = error
    server.publish(model, 1)
    server.wait_for(model, {1: "END"})
    assert server.error(model, 1) == status
    wait_for(lambda: f"model {model} version 1 cannot be loaded: {status[1]}" in caplog.text)


def test_a_failed_load_is_tried_again_five_times(
    server: Folders, model: str, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorFlow Serving does, a minute apart."""
    monkeypatch.setattr("tpuembed_serving.models.model._RETRY_SECONDS", 0.01)
    loader.broken["1"] = StatusError(Code.INTERNAL, "disk")
    server.publish(model, 1)
    wait_for(lambda: len(loader.calls) == 6)
    server.settle(3)
    assert len(loader.calls) == 6, "one load and five retries"
    loader.broken.clear()
    (server.root / model / "1" / "saved_model.pb").write_bytes(b"written anew")
    server.wait_for(model, {1: "AVAILABLE"})


# ---- versions whose files are replaced


def test_a_version_whose_files_are_replaced_is_loaded_again(
    server: Folders, model: str, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """That of before answers until the new one is loaded, and who uses it keeps it."""
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    before, seen = loader.loaded["1"], list[Any]()
    answers, done = list[Any](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(server.served(model))

    with server.busy(model):
        server.replace(model)
        loader.during = lambda: seen.append((server.served(model), server.states(model)))
        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: loader.loaded["1"] is not before)
        server.settle()
        assert not before.closed.is_set()
    wait_for(before.closed.is_set)
    done.set()
    asking.join()
    assert set(answers) == {1}
    assert seen == [(1, {1: "AVAILABLE"})]
    assert not loader.loaded["1"].closed.is_set()
    assert (loader.calls, server.states(model)) == (["1", "1"], {1: "AVAILABLE"})
    assert [line for line in lines(caplog, model) if "replaced" in line] == [
        f"model {model} version 1: its files were replaced. It is loaded again"
    ]


def test_a_version_that_is_removed_during_a_request_and_written_again_is_loaded_again(
    server: Folders, model: str, loader: FakeLoader
) -> None:
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    before = loader.loaded["1"]
    with server.busy(model):
        shutil.rmtree(server.root / model / "1")
        server.wait_for(model, {1: "UNLOADING"})
        server.replace(model)
        wait_for(lambda: server.served(model) == 1)
        assert loader.loaded["1"] is not before
    wait_for(before.closed.is_set)
    assert server.states(model) == {1: "AVAILABLE"}


def test_files_that_cannot_replace_a_version_leave_it(
    server: Folders, model: str, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    before = loader.loaded["1"]
    loader.broken["1"] = TORN
    server.replace(model)
    text = f"model {model} version 1: the files that replaced its own cannot be loaded: version 1: torn. Next retry in 60 s. "
    wait_for(lambda: f"{text}Those of before are served" in caplog.messages)
    server.settle()
    assert (loader.calls, server.states(model), server.served(model)) == (["1", "1"], {1: "AVAILABLE"}, 1)
    assert not before.closed.is_set()
    loader.broken.clear()
    (server.root / model / "1" / "saved_model.pb").write_bytes(b"a whole graph")
    wait_for(before.closed.is_set)
    assert server.served(model) == 1


def test_each_file_of_a_version_but_extra_assets_is_part_of_it(
    server: Folders, model: str, loader: FakeLoader, tmp_path: Path
) -> None:
    """A tool that copies may replace the graph first, and the tables minutes later. Archives may give all files one time."""
    version = server.root / model / ".staging"
    for folder in ("variables", "assets.extra"):
        (version / folder).mkdir(parents=True)
    for name in ("saved_model.pb", "variables/table", "assets.extra/tpuembed.json"):
        (version / name).write_bytes(b"one")
    os.utime(version / "assets.extra" / "tpuembed.json", (1, 1))
    version = version.rename(version.with_name("1"))
    server.wait_for(model, {1: "AVAILABLE"})
    for number, name in enumerate(("variables/table", "assets.extra/tpuembed.json"), start=2):
        (tmp_path / "new").write_bytes(b"two")  # of the same size
        if name.endswith("json"):
            os.utime(tmp_path / "new", (1, 1))
        (tmp_path / "new").replace(version / name)
        wait_for(lambda number=number: loader.calls == ["1"] * number)  # type: ignore[misc]
        server.settle()  # until it is loaded
    (version / "assets.extra" / "tf_serving_warmup_requests").write_bytes(b"more")
    away = (version / "assets.extra" / "tpuembed.json").rename(tmp_path / "away")
    server.settle(2)
    away.rename(version / "assets.extra" / "tpuembed.json")
    server.settle(2)
    assert len(loader.calls) == 3, "also, a file that is missing for a moment makes no other version"


def test_files_that_change_while_they_are_read_are_not_served(server: Folders, model: str, loader: FakeLoader) -> None:
    """The tables of a version that was replaced during its load were those of two exports."""

    def once() -> None:
        loader.during = lambda: None
        server.replace(model)

    loader.during = once
    server.publish(model, 1)
    server.wait_for(model, {1: "AVAILABLE"})
    assert len(loader.calls) == 2
    before, torn = loader.loaded["1"], list[Any]()

    def again() -> None:
        loader.during = lambda: torn.append(loader.loaded["1"])
        server.replace(model)
        (server.root / model / "1" / "saved_model.pb").write_bytes(b"a third graph, longer")

    loader.during = again
    (server.root / model / "1" / "saved_model.pb").write_bytes(b"a graph of another size")
    wait_for(before.closed.is_set)
    assert len(loader.calls) == 4
    assert torn[0].closed.is_set()
    assert torn[0] not in (before, loader.loaded["1"])
    assert server.served(model) == 1


def test_a_version_into_which_a_log_is_written_is_loaded_once_that_ends(
    server: Folders, model: str, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """It was loaded without end."""
    version, done = server.root / model / "1", threading.Event()

    def write() -> None:
        with (version / "trace.log").open("a") as file:
            file.write("a line\n")

    def writing() -> None:
        while not done.wait(0.001):
            write()

    loader.during = write
    server.publish(model, 1)
    writer = threading.Thread(target=writing)
    writer.start()
    text = "version 1: trace.log changed while the version was read"
    wait_for(lambda: f"cannot be loaded: {text}. It is loaded once its files stay as they are" in caplog.text)
    server.settle(2)
    assert loader.calls == ["1"]
    assert server.error(model, 1)[1] == text
    loader.during = lambda: None
    done.set()
    writer.join()
    server.wait_for(model, {1: "AVAILABLE"})
    assert loader.calls == ["1", "1"]


@pytest.mark.parametrize(
    "target", ["nowhere", ".#lock", ".", ".."], ids=["to nothing", "to itself", "to its folder", "above"]
)
def test_a_link_that_leads_nowhere_hides_no_change(
    server: Folders, model: str, loader: FakeLoader, target: str
) -> None:
    """An editor's lock is such a link. With it, a version had the rows of two exports, or old ones for ever."""
    staging = server.root / model / ".staging"
    staging.mkdir()
    for name in ("saved_model.pb", "table"):
        (staging / name).write_bytes(b"one")
    (staging / ".#lock").symlink_to(target)
    version = staging.with_name("1")

    def replace_table() -> None:
        loader.during = lambda: None
        (version / "table").write_bytes(b"of another export")

    loader.during = replace_table
    staging.rename(version)
    server.wait_for(model, {1: "AVAILABLE"})
    assert loader.calls == ["1", "1"], "what was replaced during the load is not served"
    (version / ".#lock").unlink()
    server.settle(2)
    assert loader.calls == ["1", "1"], "a link that is gone replaces nothing"
    (version / "table").write_bytes(b"of a third export")
    wait_for(lambda: loader.calls == ["1", "1", "1"])


def test_links_that_cross_are_followed_once(server: Folders, model: str, loader: FakeLoader) -> None:
    """Each path through them was a file of its own: a poll took minutes."""
    version = server.root / model / ".staging"
    folders = [version / str(number) for number in range(12)]
    for folder in folders:
        folder.mkdir(parents=True)
        for other in folders:
            (folder / f"to{other.name}").symlink_to(f"../{other.name}")
    for path in (version / "saved_model.pb", folders[3] / "table"):
        path.write_bytes(b"one")
    version = version.rename(version.with_name("1"))
    server.wait_for(model, {1: "AVAILABLE"})
    (version / "3" / "table").write_bytes(b"of another export")
    wait_for(lambda: loader.calls == ["1", "1"])
    server.settle()
    assert loader.calls == ["1", "1"]


# ---- policies and labels


def test_policies_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Versions of two are loaded newest first. A label waits for its version, and does not outlive it."""
    models: dict[str, tuple[Any, dict[str, int]]] = {
        "two": (LatestVersions(2), {}),
        "some": (SpecificVersions(frozenset({1, 7})), {}),
        "all": (AllVersions(), {"stable": 1, "next": 3}),
        "one": (LatestVersions(), {"stable": 1}),
    }
    settings = [
        ModelSettings(name=name, base_path=tmp_path / name, policy=policy, labels=labels)
        for name, (policy, labels) in models.items()
    ]
    server = Folders(tmp_path, monkeypatch, settings)
    server.publish("two", 1, 2, 3)
    for name in ("some", "all", "one"):
        server.publish(name, 1)
    with server:
        two, seen = server.loaders["two"], list[Any]()
        wait_for(lambda: server.is_ready)
        assert two.calls == ["3", "2"]
        two.during = lambda: seen.append(server.states("two"))
        server.publish("two", 4)
        server.wait_for("two", {4: "AVAILABLE", 3: "AVAILABLE", 2: "END"})
        assert seen == [{4: "LOADING", 3: "AVAILABLE", 2: "END"}], "3 is wanted and answers, so 2 may go before"
        assert server.served("all/labels/stable") == 1
        for label in ("next", "none"):
            assert server.served(f"all/labels/{label}") == f"Unrecognized servable version label: {label}"
        server.publish("all", 3)
        wait_for(lambda: server.served("all/labels/next") == 3)
        assert server.served("one/labels/stable") == 1
        server.publish("one", 2)
        wait_for(lambda: server.served("one") == 2)
        wait_for(lambda: server.served("one/labels/stable") == "Servable not found for request: Specific(one, 1)")
        missing = f"model some: its config names version 7, which is not in {tmp_path / 'some'}"
        assert caplog.messages.count(missing) == 1
