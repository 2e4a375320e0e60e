"""A loop that stays awake after an answer: for how long, and where it has been in vain."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tpuembed_serving.batching.busy_poll import BusyPoll


class Loop:
    """What is to be called soon, and a clock that stands."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.now = 100.0

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self, seconds: float) -> bool:
        """One turn, which takes so long; whether the loop would sleep after it."""
        self.now += seconds
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()
        return not self.soon


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """It is the clock too."""
    found = Loop()
    monkeypatch.setattr("time.perf_counter", lambda: found.now)
    return found


def polls(loop: Loop, poll: BusyPoll) -> bool:
    """Whether it polls after an answer; to the end, in vain."""
    poll.answered()
    began = not loop.turn(0)
    while not loop.turn(0.00001):
        pass
    return began


def test_the_loop_is_awake_until_the_time_is_over(loop: Loop) -> None:
    poll: Any = BusyPoll(loop)  # type: ignore[arg-type]  # as much of a loop as it uses
    poll.answered()
    assert [loop.turn(0.00002) for _ in range(3)] == [False, False, True]


def test_an_answer_while_it_polls_makes_it_longer_and_not_twice(loop: Loop) -> None:
    poll: Any = BusyPoll(loop)  # type: ignore[arg-type]
    poll.answered()
    loop.turn(0.00004)
    poll.answered()
    assert len(loop.soon) == 1
    assert [loop.turn(0.00003) for _ in range(2)] == [False, True]


def test_it_ends_with_what_comes(loop: Loop) -> None:
    poll: Any = BusyPoll(loop)  # type: ignore[arg-type]
    poll.answered()
    loop.turn(0)
    poll.arrived()
    assert loop.turn(0)
    assert polls(loop, poll)  # the one before was not in vain


def test_who_polls_in_vain_polls_after_every_second_fourth_and_at_last_64th_answer(loop: Loop) -> None:
    poll: Any = BusyPoll(loop)  # type: ignore[arg-type]
    polled = [number for number in range(400) if polls(loop, poll)]
    assert np.diff(polled).tolist() == [2, 4, 8, 16, 32, 64, 64, 64, 64, 64][: len(polled) - 1]
    assert len(polled) > 8


def test_once_it_has_paid_what_was_in_vain_before_is_forgotten(loop: Loop) -> None:
    poll: Any = BusyPoll(loop)  # type: ignore[arg-type]
    for _ in range(20):
        polls(loop, poll)
    while not loop.soon:
        poll.answered()
    poll.arrived()
    loop.turn(0)
    assert [number for number in range(8) if polls(loop, poll)] == [0, 2, 6]
