"""SIGTERM and SIGINT as a stage: a handler that raises is lost where Python ignores exceptions, as in the weak references'
callbacks that every import runs."""

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["LAST_SECONDS", "Stage", "Stop", "WorkerStop", "end_within", "stop_on_signals"]

LAST_SECONDS: Final = 10.0
"""Beyond the drain, for a process to unload and exit."""


class Stage(enum.IntEnum):
    """How far a stop is."""

    RUNNING = 0
    LAME_DUCK = 1
    """Requests are answered, and clients are asked to go elsewhere."""
    DRAINING = 2
    """No connection is accepted any more, and what was accepted is answered."""
    CUT_OFF = 3
    """Nothing is waited for."""


class Stop:
    """The stage that was asked for, and what is called when that changes."""

    def __init__(self) -> None:
        self.stage = Stage.RUNNING
        self._then: Callable[[], None] | None = None

    def handle(self, number: int = signal.SIGINT, *_: object) -> None:
        """Handle a signal: SIGTERM begins the lame duck; SIGINT, or a second signal, ends it; SIGINT after that cuts off."""
        if self.stage is Stage.RUNNING and number == signal.SIGTERM:
            self.advance(Stage.LAME_DUCK)
        elif self.stage < Stage.DRAINING:
            self.advance(Stage.DRAINING)
        elif number == signal.SIGINT:
            self.advance(Stage.CUT_OFF)

    def advance(self, stage: Stage) -> None:
        """Go to `stage`, unless the stop is as far; from any thread."""
        if stage > self.stage:
            self.stage = stage
            if self._then is not None:
                self._then()

    def call(self, then: Callable[[], None]) -> None:
        """Call `then` whenever the stage changes, and now where it has changed before."""
        self._then = then
        if self.stage is not Stage.RUNNING:
            then()


class WorkerStop(Stop):
    """The stop of one of several processes, whose supervisor says how far it is.

    Signals may reach a worker twice: a terminal sends SIGINT to all processes of a group, systemd SIGTERM to all of a unit, and
    the supervisor passes both on. So only the first SIGTERM counts here.
    """

    def handle(self, number: int = signal.SIGINT, *_: object) -> None:
        """Handle a signal: SIGTERM begins the lame duck."""
        if number == signal.SIGTERM:
            self.advance(Stage.LAME_DUCK)


@contextlib.contextmanager
def stop_on_signals(stop: Stop | None = None) -> Iterator[Stop]:
    """Notes SIGTERM and SIGINT inside the block."""
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
    """Have the process ended by SIGALRM then, whatever it does: Python waits for its threads, and a run takes its time."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
