"""What several workers' states come to, and how they ask each other."""

import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import wait_for
from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.workers.link import WorkerLink
from tpuembed_serving.workers.messages import (
    Answer,
    Ask,
    Channel,
    Result,
    States,
    View,
    merge_states,
    merge_statuses,
)

TORN = StatusError(Code.DATA_LOSS, "torn")


def status(version: int, state: State, error: StatusError | None = None) -> VersionStatus:
    return VersionStatus(version, state, error)


@pytest.mark.parametrize(
    ("workers", "wanted"),
    [
        ([], []),
        ([[], []], []),
        ([[status(1, State.AVAILABLE)], [status(1, State.LOADING)]], [status(1, State.LOADING)]),
        ([[status(1, State.AVAILABLE)], [status(1, State.AVAILABLE)]], [status(1, State.AVAILABLE)]),
        ([[status(1, State.UNLOADING)], [status(1, State.AVAILABLE)]], [status(1, State.AVAILABLE)]),
        ([[status(1, State.AVAILABLE)], [status(1, State.END, TORN)]], [status(1, State.END, TORN)]),
        ([[status(1, State.AVAILABLE)], []], [status(1, State.START)]),
        ([[status(1, State.END)], []], [status(1, State.END)]),
        (
            [[status(2, State.AVAILABLE), status(1, State.END)], [status(2, State.AVAILABLE)]],
            [status(2, State.AVAILABLE), status(1, State.END)],
        ),
        (
            [[status(2, State.LOADING), status(1, State.AVAILABLE)], [status(1, State.AVAILABLE)]],
            [status(2, State.START), status(1, State.AVAILABLE)],
        ),
    ],
)
def test_a_version_is_as_far_as_the_worker_that_is_least_far(
    workers: list[list[VersionStatus]], wanted: list[VersionStatus]
) -> None:
    assert merge_statuses(workers) == wanted
    assert merge_statuses(workers[::-1]) == wanted


def test_a_server_is_ready_once_every_worker_is() -> None:
    up = States({"m": [status(1, State.AVAILABLE)]}, ready=True)
    down = States({"m": [status(1, State.LOADING)], "n": []}, ready=False)
    assert merge_states([up, up]) == View({"m": [status(1, State.AVAILABLE)]}, ready=True)
    assert merge_states([up, down]) == View({"m": [status(1, State.LOADING)], "n": []}, ready=False)
    assert merge_states([]) == View({}, ready=False)


class Supervisor:
    """The other end of a link."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection = connection

    def receive(self) -> Any:
        assert self.connection.poll(60), "waited a minute"
        return self.connection.recv()


@pytest.fixture
def pair() -> Iterator[tuple[WorkerLink, Supervisor, threading.Event]]:
    ours, theirs = Pipe()
    orphaned = threading.Event()
    link = WorkerLink(Channel(theirs), lambda _: orphaned.set())
    yield link, Supervisor(ours), orphaned
    ours.close()
    if link._reader.is_alive():
        link._reader.join()
    link._changes.shutdown()
    link._questions.shutdown()
    theirs.close()


Pair = tuple[WorkerLink, Supervisor, threading.Event]


def test_a_question_does_not_wait_for_a_change(pair: Pair) -> None:
    link, supervisor, _ = pair
    go_on = threading.Event()
    link.register("reload", lambda _: go_on.wait(60))
    link.register("metrics", lambda _: "counted")
    link.start()
    supervisor.connection.send(Ask(1, "reload", None))
    supervisor.connection.send(Ask(2, "metrics", None))
    assert supervisor.receive() == Answer(2, "counted")
    go_on.set()
    assert supervisor.receive() == Answer(1, True)


def test_one_that_does_not_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.workers.link._ANSWER_SECONDS", 0.01)
    link, supervisor, _ = pair
    link.start()
    with refused(StatusError):
        link.gather("metrics")
    call = supervisor.receive()
    supervisor.connection.send(Result(call.number, ()))
    supervisor.connection.send(View({}, ready=True))
    wait_for(lambda: link.view.ready)


def ask_in_vain(link: WorkerLink) -> tuple[threading.Thread, list[StatusError]]:
    """A thread that asks all workers, and what it is told."""
    errors: list[StatusError] = []

    def ask() -> None:
        with pytest.raises(StatusError) as caught:
            link.gather("reload")
        errors.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, errors


def test_who_waits_for_answers_is_told_that_none_will_come(pair: Pair) -> None:
    link, supervisor, _ = pair
    link.start()
    thread, errors = ask_in_vain(link)
    supervisor.receive()
    supervisor.connection.close()
    thread.join(60)
    assert errors[0].code is Code.CANCELLED
