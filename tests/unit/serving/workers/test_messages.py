"""What several workers' states come to."""

import pytest

from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.workers.messages import States, View, merge_states, merge_statuses

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
