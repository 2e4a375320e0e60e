"""A repository replaces its config: new models are loaded, missing ones unloaded, and nothing is without an answer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving.doubles import FakeLoader, make_version, wait_for
from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.repository import ModelRepository
from tpuembed_serving.settings import ModelSettings


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


def model(tmp_path: Path, name: str, *versions: int, folder: str = "") -> ModelSettings:
    base_path = tmp_path / (folder or name)
    base_path.mkdir(exist_ok=True)
    for version in versions:
        make_version(base_path, version)
    return ModelSettings(name=name, base_path=base_path)


@pytest.fixture
def first(tmp_path: Path) -> ModelSettings:
    return model(tmp_path, "m", 1)


@pytest.fixture
def repository(first: ModelSettings, loader: FakeLoader) -> Iterator[ModelRepository]:
    running = ModelRepository([first], loader, poll_seconds=3600)
    running.start()
    wait_for(lambda: running.ready)
    yield running
    running.stop()


def states(repository: ModelRepository, name: str) -> dict[int, State]:
    return {status.version: status.state for status in repository.statuses(name)}


def served(repository: ModelRepository, name: str, label: str | None = None) -> int:
    with repository.lease(name, None, label) as loaded:
        return loaded.version


def failed(repository: ModelRepository, *models: ModelSettings) -> StatusError:
    with pytest.raises(StatusError) as caught:
        repository.reload(models)
    return caught.value


def test_a_request_in_progress_finishes_on_a_model_that_is_removed(
    repository: ModelRepository, loader: FakeLoader, first: ModelSettings
) -> None:
    with repository.lease("m", None):
        repository.reload([])
        assert states(repository, "m") == {1: State.UNLOADING}
        assert not loader.loaded["1"].closed.is_set()
    wait_for(loader.loaded["1"].closed.is_set)
    repository.reload([first])
    assert served(repository, "m") == 1


def test_a_new_model_that_fails_is_named_and_the_others_serve(
    repository: ModelRepository, loader: FakeLoader, first: ModelSettings, tmp_path: Path
) -> None:
    loader.broken["7"] = StatusError(Code.DATA_LOSS, "version 7: torn")
    error = failed(repository, first, model(tmp_path, "n", 7), model(tmp_path, "o", 9))
    assert error.code is Code.UNKNOWN
    reason = "{{name: n version: 7} due to error: DATA_LOSS: version 7: torn}, "
    assert error.message == f"1 model(s) did not become available: {{{reason}}}"
    assert (served(repository, "m"), served(repository, "o")) == (1, 9)
    assert states(repository, "n") == {7: State.END}


def test_a_new_model_without_versions_or_without_a_folder(
    repository: ModelRepository, first: ModelSettings, tmp_path: Path
) -> None:
    empty, missing = model(tmp_path, "n"), ModelSettings(name="o", base_path=tmp_path / "missing")
    error = failed(repository, first, empty, missing)
    assert error.message.startswith(
        "2 model(s) did not become available: {{{name: n} due to error: NOT_FOUND: No versions"
    )
    assert f"Could not find base path {tmp_path / 'missing'} for servable o" in error.message


def test_labels_of_a_new_model_are_refused(repository: ModelRepository, first: ModelSettings, tmp_path: Path) -> None:
    new = ModelSettings(name="n", base_path=model(tmp_path, "n", 7).base_path, labels={"stable": 7})
    assert failed(repository, first, new).code is Code.FAILED_PRECONDITION


def test_another_folder_serves_once_a_version_of_it_is_loaded(
    repository: ModelRepository, first: ModelSettings, loader: FakeLoader, tmp_path: Path
) -> None:
    before = loader.loaded["1"]
    loader.broken["1"] = StatusError(Code.DATA_LOSS, "torn")
    moved = model(tmp_path, "m", 1, folder="elsewhere")
    assert "{name: m version: 1} due to error: DATA_LOSS: torn" in failed(repository, moved).message
    with repository.lease("m", None) as loaded:
        assert loaded.servable is before
    loader.broken.clear()
    (Path(moved.base_path) / "1" / "saved_model.pb").write_bytes(b"whole")
    repository.reload([moved])
    with repository.lease("m", 1) as loaded:
        assert loaded.servable is loader.loaded["1"] is not before
    assert before.closed.is_set()


def test_the_old_version_answers_while_the_new_one_loads(
    repository: ModelRepository, first: ModelSettings, loader: FakeLoader, tmp_path: Path
) -> None:
    seen: list[int] = []
    loader.during = lambda: seen.append(served(repository, "m"))
    repository.reload([model(tmp_path, "m", 5, folder="elsewhere")])
    assert seen == [1]
    assert served(repository, "m") == 5


def test_reloads_at_once_come_one_after_the_other(
    repository: ModelRepository, first: ModelSettings, tmp_path: Path
) -> None:
    configs = [[first, model(tmp_path, f"n{index}", index)] for index in range(8)]
    threads = [threading.Thread(target=repository.reload, args=(config,)) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [f"n{index}" for index in range(8) if State.AVAILABLE in states(repository, f"n{index}").values()]
    assert len(names) == 1
    assert served(repository, "m") == 1


def test_a_stop_ends_a_reload_that_waits(first: ModelSettings, loader: FakeLoader, tmp_path: Path) -> None:
    repository = ModelRepository([first], loader, poll_seconds=3600)
    repository.start()
    wait_for(lambda: repository.ready)
    loading, go_on = threading.Event(), threading.Event()

    def block() -> None:
        loading.set()
        go_on.wait(60)

    loader.during = block
    ended: list[StatusError] = []

    def reload() -> None:
        ended.append(failed(repository, model(tmp_path, "n", 7, 8)))

    thread = threading.Thread(target=reload)
    thread.start()
    assert loading.wait(60)
    stopping = threading.Thread(target=repository.stop)
    stopping.start()
    wait_for(lambda: repository._stopping)
    go_on.set()
    stopping.join()
    thread.join()
    assert [error.code for error in ended] == [Code.CANCELLED]
    assert all(servable.closed.is_set() for servable in loader.loaded.values())
    assert failed(repository, first).code is Code.CANCELLED


def test_every_change_of_state_is_told(first: ModelSettings, loader: FakeLoader, tmp_path: Path) -> None:
    seen: list[dict[int, State]] = []

    def note() -> None:
        seen.append(states(watched, "m"))

    watched = ModelRepository([first], loader, poll_seconds=3600, changed=note)
    watched.start()
    wait_for(lambda: watched.ready)
    make_version(Path(first.base_path), 2)
    watched.reload([first])
    watched.stop()
    up = [{1: State.LOADING}, {1: State.AVAILABLE}]
    over = [{2: State.LOADING, 1: State.AVAILABLE}, {2: State.AVAILABLE, 1: State.AVAILABLE}]
    down = [{2: State.AVAILABLE, 1: State.UNLOADING}, {2: State.AVAILABLE, 1: State.END}]
    told = [state for index, state in enumerate(seen) if index == 0 or state != seen[index - 1]]
    assert told[:6] == up + over + down


def test_a_server_without_a_model_tells_that_it_is_ready(loader: FakeLoader) -> None:
    told: list[bool] = []

    def note() -> None:
        told.append(idle.ready)

    idle = ModelRepository([], loader, poll_seconds=3600, changed=note)
    idle.start()
    wait_for(lambda: bool(told))
    idle.stop()
    assert told == [True]


def test_a_reload_before_the_first_look_counts(first: ModelSettings, loader: FakeLoader, tmp_path: Path) -> None:
    """A worker may be told of a config while it starts."""
    starting = ModelRepository([first, model(tmp_path, "n", 1)], loader, poll_seconds=3600)
    reload = threading.Thread(target=starting.reload, args=([first, model(tmp_path, "o", 5)],))
    reload.start()
    wait_for(lambda: starting._asked == 1)
    starting.start()
    reload.join(60)
    assert set(starting.labels()) == {"m", "o"}
    assert served(starting, "o") == 5
    starting.stop()


def test_a_client_may_name_what_the_operator_has_added_since_the_start(
    repository: ModelRepository, first: ModelSettings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As the file of --config does, which is polled."""
    added = model(tmp_path_factory.mktemp("other"), "n", 2)
    with pytest.raises(StatusError) as caught:
        repository.reload_by_client([first, added])
    assert caught.value.code is Code.PERMISSION_DENIED
    repository.reload([first, added])
    repository.reload_by_client([first, added])
    assert (served(repository, "m"), served(repository, "n")) == (1, 2)


def test_a_link_of_the_operators_may_lead_elsewhere_later(loader: FakeLoader, tmp_path: Path) -> None:
    for version in (1, 2):
        make_version(tmp_path / "releases" / str(version), version)
    (tmp_path / "models").mkdir()
    link = tmp_path / "models" / "m"
    link.symlink_to(tmp_path / "releases" / "1")
    own = ModelSettings(name="m", base_path=link)
    repository = ModelRepository([own], loader, poll_seconds=0.02)
    repository.start()
    try:
        wait_for(lambda: repository.ready)
        repository.reload_by_client([ModelSettings(name="m", base_path=link)])
        link.unlink()
        link.symlink_to(tmp_path / "releases" / "2")
        wait_for(lambda: states(repository, "m").get(2) is State.AVAILABLE)
    finally:
        repository.stop()


def test_the_operator_may_take_over_what_a_client_chose(
    loader: FakeLoader, first: ModelSettings, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(first.base_path)
    make_version(tmp_path / "elsewhere" / "x", 5)
    repository = ModelRepository([first], loader, poll_seconds=0.02)
    repository.start()
    try:
        wait_for(lambda: repository.ready)
        chosen = ModelSettings(name="n", base_path=link)
        repository.reload_by_client([first, chosen])
        link.unlink()
        link.symlink_to("/")  # there is no version, and nothing of it is listed
        wait_for(lambda: "outside the folders" in repository._models["n"].listing_error)
        assert served(repository, "n") == 1
        link.unlink()
        link.symlink_to(tmp_path / "elsewhere" / "x")  # below the parent of the start
        repository.reload([first, chosen])
        wait_for(lambda: states(repository, "n").get(5) is State.AVAILABLE)
    finally:
        repository.stop()
