"""Turns SIGTERM and SIGINT into stages of a stop.

The handlers do not raise: Python ignores exceptions in some places, such as the callbacks of weak references.
"""

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["LAST_SECONDS", "Stop", "StopStage", "WorkerStop", "end_within", "stop_on_signals"]

LAST_SECONDS: Final = 10.0
"""The time after the drain for a process to unload and exit."""


class StopStage(enum.IntEnum):
    """The stages of a stop."""

    RUNNING = 0
    LAME_DUCK = 1
    """Requests are answered, and clients are told to use another server."""
    DRAINING = 2
    """New connections are refused. Requests of accepted connections are answered."""
    CUT_OFF = 3
    """The server exits without waiting for requests."""


class Stop:
    """The requested stage, and a callback for its changes."""

    def __init__(self) -> None:
        self.stage = StopStage.RUNNING
        self._then: Callable[[], None] | None = None

    def handle(self, number: int = signal.SIGINT, *_: object) -> None:
        """Handle a signal. SIGTERM begins LAME_DUCK. SIGINT or a second signal begins DRAINING; SIGINT then, CUT_OFF."""
        if self.stage is StopStage.RUNNING and number == signal.SIGTERM:
            self.advance(StopStage.LAME_DUCK)
        elif self.stage < StopStage.DRAINING:
            self.advance(StopStage.DRAINING)
        elif number == signal.SIGINT:
            self.advance(StopStage.CUT_OFF)

    def advance(self, stage: StopStage) -> None:
        """Move on to `stage`, unless the stop has reached it. Any thread may call this."""
        if stage > self.stage:
            self.stage = stage
            if self._then is not None:
                self._then()

    def call(self, then: Callable[[], None]) -> None:
        """Call `then` at every change of the stage, and now if it has changed before."""
        self._then = then
        if self.stage is not StopStage.RUNNING:
            then()


class WorkerStop(Stop):
    """The stop of a worker process. Its supervisor decides the stage.

    Signals may reach a worker twice: a terminal sends SIGINT to all processes of a group, and systemd SIGTERM to all of a
    unit. The supervisor forwards both. So only the first SIGTERM counts here.
    """

    def handle(self, number: int = signal.SIGINT, *_: object) -> None:
        """Handle a signal: SIGTERM begins LAME_DUCK."""
        if number == signal.SIGTERM:
            self.advance(StopStage.LAME_DUCK)


@contextlib.contextmanager
def stop_on_signals(stop: Stop | None = None) -> Iterator[Stop]:
    """Pass SIGTERM and SIGINT to a Stop inside the block."""
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_within(seconds: float) -> None:
    """End the process by SIGALRM after so many seconds: Python would wait for its threads, and a run may take long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
