"""SIGTERM and SIGINT as a flag: a handler that raises is lost where Python ignores exceptions, as in the weak references'
callbacks that every import runs."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["LAST_SECONDS", "Stop", "end_within", "stop_on_signals"]

LAST_SECONDS: Final = 10.0
"""Beyond the drain, for a process to unload and exit."""


class Stop:
    """Whether one of the signals came, and what is to be done then."""

    def __init__(self) -> None:
        self.asked = False
        self._then: Callable[[], None] | None = None

    def handle(self, *_: object) -> None:
        """A signal handler."""
        self.asked = True
        if self._then is not None:
            self._then()

    def call(self, then: Callable[[], None]) -> None:
        """Call `then` when a signal comes, or now where one came before."""
        self._then = then
        if self.asked:
            then()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Notes SIGTERM and SIGINT inside the block. uvicorn handles both while it runs and raises them once more after."""
    stop = Stop()
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
