"""A supervisor keeps N workers alive, and lets them speak to each other."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import wait_for
from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.settings import ModelSettings, ServerSettings
from tpuembed_serving.workers.messages import Answer, Ask, Gather, Listening, Result, Start, States, View
from tpuembed_serving.workers.process import Exited, WorkerProcess
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


class Server:
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
def servers() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(workers: int, **options: Any) -> Server:
        made.append(Server(workers, **options))
        return made[-1]

    yield make
    for server in made:
        server.supervisor.stop()
        for process in server.started:
            if not process.code and server.thread.is_alive():
                process.dies(0)
        server.thread.join(60)
        assert not server.thread.is_alive()


MakeServer = Callable[..., Server]


def test_all_see_the_least_of_all(servers: MakeServer) -> None:
    server = servers(2)
    one, two = server.started
    assert [start.load_first for start in (one.last(Start), two.last(Start))] == [False, False]
    one.says(Listening())
    one.says(States(AVAILABLE, ready=True))
    two.says(Listening())
    two.says(States(LOADING, ready=False))
    server.view(False, LOADING)
    two.says(States(AVAILABLE, ready=True))
    server.view(True, AVAILABLE)
    assert server.announced == [True], "once, by whoever listens first"


def test_a_worker_that_dies_is_started_anew_and_counts_once_it_listens(
    servers: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers(2)
    one, two = server.started
    for process in (one, two):
        process.says(Listening())
        process.says(States(AVAILABLE, ready=True))
    server.view(True, AVAILABLE)
    two.dies(-9)
    wait_for(lambda: len(server.started) == 3 and bool(server.started[2].received))
    three = server.started[2]
    assert three.index == 1
    assert three.last(Start).load_first, "the others answer meanwhile"
    assert "worker 1 was killed by signal 9. Restarting it in 0.1 s" in caplog.text
    three.says(States(LOADING, ready=False))
    three.says(Gather(1, "sync", None))
    wait_for(lambda: one.last(Ask) is not None)
    assert one.last(View) == View(AVAILABLE, True)
    three.says(Listening())
    server.view(False, LOADING)


def test_one_that_keeps_dying_waits_longer_and_longer(servers: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server = servers(1)
    for count in range(1, 4):
        server.started[-1].dies(3)
        wait_for(lambda count=count: len(server.started) == count + 1)  # type: ignore[misc]
    pauses = [message.split()[-2] for message in caplog.messages if "exited with 3" in message]
    assert pauses == ["0.1", "0.2", "0.4"]


def test_who_dies_owes_no_answer(servers: MakeServer) -> None:
    server = servers(2)
    one, two = server.started
    one.says(Gather(5, "metrics", None))
    wait_for(lambda: one.last(Ask) is not None)
    one.says(Answer(one.last(Ask).number, 1))
    two.dies(-9)
    wait_for(lambda: one.last(Result) is not None)
    assert one.last(Result) == Result(5, (1,))


def test_a_reload_to_no_model_at_all(servers: MakeServer) -> None:
    server = servers(1)
    server.started[0].says(Gather(1, "reload", ()))
    wait_for(lambda: server.started[0].last(Ask) is not None)
    server.started[0].dies(1)
    wait_for(lambda: len(server.started) == 2 and bool(server.started[1].received))
    assert server.started[1].last(Start).settings.models == ()


def test_a_stop_drains_every_worker_and_starts_none(servers: MakeServer) -> None:
    server = servers(2)
    server.supervisor.stop()
    wait_for(lambda: all(process.signals == ["term"] for process in server.started))
    server.started[0].dies(0)
    server.started[1].dies(1)
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert len(server.started) == 2


def test_one_that_does_not_end_is_killed(servers: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.workers.supervisor.LAST_SECONDS", 0.01)
    server = servers(1, drain_seconds=0.01, lame_duck_seconds=0.01)
    server.supervisor.stop()
    wait_for(lambda: server.started[0].signals == ["term", "kill"])
    server.started[0].dies(-9)
    server.thread.join(60)


def test_a_stop_while_a_worker_waits_to_be_started(servers: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers(1)
    monkeypatch.setattr("tpuembed_serving.workers.supervisor._LONGEST_PAUSE_SECONDS", 3600.0)
    server.supervisor._slots[0].pause = 3600.0
    server.started[0].dies(1)
    server.supervisor.stop()
    server.thread.join(60)
    assert not server.thread.is_alive()
