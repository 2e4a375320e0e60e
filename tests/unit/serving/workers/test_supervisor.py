"""A supervisor keeps N workers alive, and lets them speak to each other."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.serving.doubles import wait_for
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.model import State, VersionStatus
from tpuembed_serving.settings import ModelSettings, ServerSettings
from tpuembed_serving.workers.messages import Answer, Ask, Call, Listening, Result, Start, States, StopTo, View
from tpuembed_serving.workers.process import Exited, WorkerProcess
from tpuembed_serving.workers.stopping import Stage
from tpuembed_serving.workers.supervisor import Supervisor

AVAILABLE = {"m": [VersionStatus(1, State.AVAILABLE, None)]}
LOADING = {"m": [VersionStatus(1, State.LOADING, None)]}


class FakeProcess(WorkerProcess):
    """Keeps what it is sent; the test says what it sends and when it ends."""

    def __init__(self, index: int, events: "queue.SimpleQueue[Any]") -> None:
        self.index = index
        self.received: list[Any] = []
        self.signals: list[str] = []
        self.code = 0
        self._events = events

    def send(self, message: Any) -> None:
        self.received.append(message)

    def says(self, message: Any) -> None:
        self._events.put((self, message))

    def dies(self, code: int) -> None:
        self.code = code
        self._events.put(Exited(self))

    def terminate(self) -> None:
        self.signals.append("term")

    def kill(self) -> None:
        self.signals.append("kill")

    def close(self) -> int:
        return self.code

    def last(self, kind: type) -> Any:
        return next((message for message in reversed(self.received) if isinstance(message, kind)), None)


class Fleet:
    """A supervisor that runs in a thread, and all processes that it has started."""

    def __init__(self, workers: int, **options: Any) -> None:
        self.started: list[FakeProcess] = []
        self.model = ModelSettings(name="m", base_path=Path("/m"))
        settings = ServerSettings(models=(self.model,), workers=workers, **options)
        self.announced: list[bool] = []
        self.supervisor = Supervisor(settings, lambda: self.announced.append(True), self._start)
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()
        wait_for(lambda: len(self.started) == workers and all(one.received for one in self.started))

    def _start(self, index: int, events: "queue.SimpleQueue[Any]") -> WorkerProcess:
        self.started.append(FakeProcess(index, events))
        return self.started[-1]

    def view(self, ready: bool, models: Any) -> None:
        """Until every living process has this view."""
        wait_for(lambda: all(one.last(View) == View(models, ready) for one in self.started if not one.code))


@pytest.fixture
def fleets() -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(workers: int, **options: Any) -> Fleet:
        made.append(Fleet(workers, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.supervisor.stop()
        for process in fleet.started:
            if not process.code and fleet.thread.is_alive():
                process.dies(0)
        fleet.thread.join(60)
        assert not fleet.thread.is_alive()


Fleets = Callable[..., Fleet]


def test_all_see_the_least_of_all(fleets: Fleets) -> None:
    fleet = fleets(2)
    one, two = fleet.started
    assert [start.load_first for start in (one.last(Start), two.last(Start))] == [False, False]
    one.says(Listening())
    one.says(States(AVAILABLE, ready=True))
    two.says(Listening())
    two.says(States(LOADING, ready=False))
    fleet.view(False, LOADING)
    two.says(States(AVAILABLE, ready=True))
    fleet.view(True, AVAILABLE)
    assert fleet.announced == [True], "once, by whoever listens first"


def test_a_worker_that_dies_is_started_anew_and_counts_once_it_listens(
    fleets: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleets(2)
    one, two = fleet.started
    for process in (one, two):
        process.says(Listening())
        process.says(States(AVAILABLE, ready=True))
    fleet.view(True, AVAILABLE)
    two.dies(-9)
    wait_for(lambda: len(fleet.started) == 3 and bool(fleet.started[2].received))
    three = fleet.started[2]
    assert three.index == 1
    assert three.last(Start).load_first, "the others answer meanwhile"
    assert "worker 1 was killed by signal 9; started anew in 0.1 s" in caplog.text
    three.says(States(LOADING, ready=False))
    three.says(Call(1, "sync", None))
    wait_for(lambda: one.last(Ask) is not None)
    assert one.last(View) == View(AVAILABLE, True)
    three.says(Listening())
    fleet.view(False, LOADING)


def test_one_that_keeps_dying_waits_longer_and_longer(fleets: Fleets, caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleets(1)
    for count in range(1, 4):
        fleet.started[-1].dies(3)
        wait_for(lambda count=count: len(fleet.started) == count + 1)  # type: ignore[misc]
    pauses = [message.split()[-2] for message in caplog.messages if "exited with 3" in message]
    assert pauses == ["0.1", "0.2", "0.4"]


def test_a_question_goes_to_all_and_the_answers_come_back(fleets: Fleets) -> None:
    fleet = fleets(2)
    one, two = fleet.started
    one.says(Call(5, "metrics", "all"))
    wait_for(lambda: two.last(Ask) is not None)
    ask = two.last(Ask)
    assert (ask.topic, ask.payload) == ("metrics", "all")
    assert one.last(Ask) == ask
    one.says(Answer(ask.number, 1))
    two.says(Answer(ask.number, 2))
    wait_for(lambda: one.last(Result) is not None)
    assert one.last(Result) == Result(5, (1, 2))
    assert two.last(Result) is None


def test_who_dies_owes_no_answer(fleets: Fleets) -> None:
    fleet = fleets(2)
    one, two = fleet.started
    one.says(Call(5, "metrics", None))
    wait_for(lambda: one.last(Ask) is not None)
    one.says(Answer(one.last(Ask).number, 1))
    two.dies(-9)
    wait_for(lambda: one.last(Result) is not None)
    assert one.last(Result) == Result(5, (1,))


def test_a_reload_is_what_later_workers_start_with(fleets: Fleets) -> None:
    fleet = fleets(1)
    models = (ModelSettings(name="n", base_path=Path("/n")),)
    errors: list[Exception | None] = []

    def reload() -> None:
        try:
            fleet.supervisor.reload(models)
            errors.append(None)
        except StatusError as error:
            errors.append(error)

    answers = [("check", None), ("reload", None), ("check", StatusError(Code.FAILED_PRECONDITION, "label"))]

    def reload_twice() -> None:
        reload()
        reload()

    thread = threading.Thread(target=reload_twice)
    thread.start()
    (process,) = fleet.started
    for count, (topic, answer) in enumerate(answers, 1):
        wait_for(lambda count=count: sum(isinstance(one, Ask) for one in process.received) == count)  # type: ignore[misc]
        ask = process.last(Ask)
        assert (ask.topic, ask.payload) == (topic, models)
        process.says(Answer(ask.number, answer))
    thread.join()
    assert errors[0] is None
    assert cast(StatusError, errors[1]).to_string() == "FAILED_PRECONDITION: label"
    fleet.started[0].dies(1)
    wait_for(lambda: len(fleet.started) == 2 and bool(fleet.started[1].received))
    assert fleet.started[1].last(Start).settings.models == models


def test_a_reload_to_no_model_at_all(fleets: Fleets) -> None:
    fleet = fleets(1)
    fleet.started[0].says(Call(1, "reload", ()))
    wait_for(lambda: fleet.started[0].last(Ask) is not None)
    fleet.started[0].dies(1)
    wait_for(lambda: len(fleet.started) == 2 and bool(fleet.started[1].received))
    assert fleet.started[1].last(Start).settings.models == ()


def test_a_stop_drains_every_worker_and_starts_none(fleets: Fleets) -> None:
    fleet = fleets(2)
    fleet.supervisor.stop()
    wait_for(lambda: all(process.signals == ["term"] for process in fleet.started))
    fleet.started[0].dies(0)
    fleet.started[1].dies(1)
    fleet.thread.join(60)
    assert not fleet.thread.is_alive()
    assert len(fleet.started) == 2


def test_how_far_a_stop_is_reaches_every_worker(fleets: Fleets) -> None:
    fleet = fleets(2)
    for stage in (Stage.LAME_DUCK, Stage.DRAINING, Stage.CUT_OFF):
        fleet.supervisor.stop(stage)
    for process in fleet.started:
        wait_for(lambda process=process: process.last(StopTo) == StopTo(Stage.CUT_OFF))  # type: ignore[misc]
        sent = [message.stage for message in process.received if isinstance(message, StopTo)]
        assert (process.signals, sent) == (["term"], [Stage.DRAINING, Stage.CUT_OFF])
        process.dies(0)
    fleet.thread.join(60)
    assert not fleet.thread.is_alive()


def test_one_that_does_not_end_is_killed(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.workers.supervisor.LAST_SECONDS", 0.01)
    fleet = fleets(1, drain_seconds=0.01, lame_duck_seconds=0.01)
    fleet.supervisor.stop()
    wait_for(lambda: fleet.started[0].signals == ["term", "kill"])
    fleet.started[0].dies(-9)
    fleet.thread.join(60)


def test_a_stop_while_a_worker_waits_to_be_started(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleets(1)
    monkeypatch.setattr("tpuembed_serving.workers.supervisor._LONGEST_PAUSE_SECONDS", 3600.0)
    fleet.supervisor._slots[0].pause = 3600.0
    fleet.started[0].dies(1)
    fleet.supervisor.stop()
    fleet.thread.join(60)
    assert not fleet.thread.is_alive()
