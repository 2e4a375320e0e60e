"""The repository of a worker: it loads for itself, and speaks for all."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.serving.doubles import FakeLoader, make_version, wait_for
from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.workers.link import WorkerLink
from tpuembed_serving.workers.messages import States, View
from tpuembed_serving.workers.repository import WorkerRepository


class FakeLink:
    """A link to a supervisor with this worker alone."""

    def __init__(self) -> None:
        self.view = View({}, ready=False)
        self.pushed: list[States] = []
        self.handlers: dict[str, Any] = {}
        self.gathered: list[str] = []

    def register(self, topic: str, handler: Any) -> None:
        self.handlers[topic] = handler

    def push(self, states: States) -> None:
        self.pushed.append(states)

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        self.gathered.append(topic)
        return [self.handlers[topic](payload)]


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def model(tmp_path: Path) -> ModelSettings:
    make_version(tmp_path / "m", 1)
    return ModelSettings(name="m", base_path=tmp_path / "m")


@pytest.fixture
def worker(link: FakeLink, model: ModelSettings) -> Iterator[WorkerRepository]:
    repository = WorkerRepository(cast(WorkerLink, link), [model], FakeLoader(), 3600.0)
    repository.start()
    wait_for(lambda: bool(link.pushed) and link.pushed[-1].ready)
    yield repository
    repository.stop()


def numbers(statuses: Sequence[VersionStatus]) -> dict[int, State]:
    return {status.version: status.state for status in statuses}


def test_it_tells_its_own_and_answers_with_everyones(worker: WorkerRepository, link: FakeLink) -> None:
    assert numbers(link.pushed[-1].models["m"]) == {1: State.AVAILABLE}
    assert worker.statuses("m") == []
    assert not worker.ready
    link.view = View({"m": [VersionStatus(1, State.LOADING, None)]}, ready=True)
    assert numbers(worker.statuses("m")) == {1: State.LOADING}
    assert worker.ready
    with worker.lease("m", None) as loaded:
        assert loaded.version == 1


def test_a_reload_is_checked_by_all_before_any_does_it(
    worker: WorkerRepository, link: FakeLink, model: ModelSettings, tmp_path: Path
) -> None:
    make_version(tmp_path / "n", 7)
    other = ModelSettings(name="n", base_path=tmp_path / "n")
    worker.reload([model, other])
    assert link.gathered == ["check", "reload"]
    assert numbers(link.pushed[-1].models["n"]) == {7: State.AVAILABLE}
    labelled = ModelSettings(name="n", base_path=tmp_path / "n", labels={"stable": 8})
    with pytest.raises(StatusError) as caught:
        worker.reload([labelled])
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert link.gathered == ["check", "reload", "check"]
    worker.reload([other])
    assert numbers(link.pushed[-1].models["m"]) == {1: State.END}
    assert link.pushed[-1].ready
