"""Lets calls that arrive one by one start together.

grpc.aio delivers one call at a time, each some turns of the event loop after the one before. Batches of the calls that one turn
has brought would be small. So while the event loop is busy, calls wait for each other: for as many as were in progress at once.
They are also decoded one right after the other, which finds the code in the processor's caches.
"""

import asyncio
import time
from typing import Final

__all__ = ["Arrivals"]

_CHECK_SECONDS: Final = 0.002
"""How often the event loop's load is measured."""
_BUSY_SHARE: Final = 0.5
"""The event loop is busy if its thread runs for more than this share of the time."""
_LONGEST_SECONDS: Final = 0.02
"""How long a call waits at most."""


class Arrivals:
    """Counts the calls of one event loop. A single client never waits, and nobody waits while the loop has time to spare."""

    def __init__(self) -> None:
        self._announced = self._in_progress = self._expected = 0
        self._start: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False
        self._measured = self._used = 0.0

    def announce(self) -> None:
        """Note that a call is about to arrive: its headers have."""
        self._announced += 1
        self._expected = max(self._expected, self._announced + self._in_progress)

    def withdraw(self) -> None:
        """Note that an announced call will not be answered by a model."""
        self._announced = max(0, self._announced - 1)
        self._expected = max(1, self._expected - 1)
        self._start_if_complete()

    async def enter(self) -> None:
        """Wait until this call may start. Call `leave` when it has ended, also if the wait is cancelled."""
        self._announced = max(0, self._announced - 1)
        self._in_progress += 1
        self._start_if_complete()
        if self._in_progress >= self._expected:
            return
        if self._start is None:
            loop = asyncio.get_running_loop()
            now = loop.time()
            if not self._measure(now):
                return
            self._start = asyncio.Event()
            self._timer = loop.call_at(now + _CHECK_SECONDS, self._wait, loop, now + _LONGEST_SECONDS)
        await self._start.wait()

    def leave(self) -> None:
        """Note that a call has ended."""
        self._in_progress -= 1

    def _measure(self, now: float) -> bool:
        """Returns True if the event loop is busy. Its thread calls this."""
        elapsed = now - self._measured
        if elapsed >= _CHECK_SECONDS:
            used = time.thread_time()
            self._is_busy = used - self._used > _BUSY_SHARE * elapsed
            self._measured, self._used = now, used
        return self._is_busy

    def _start_if_complete(self) -> None:
        if self._start is not None and self._in_progress >= self._expected:
            self._start_all()

    def _start_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._start is not None:
            self._start.set()
        self._start = self._timer = None

    def _wait(self, loop: asyncio.AbstractEventLoop, latest: float) -> None:
        """Wait on while the loop is busy. All start at `latest`."""
        now = loop.time()
        if now < latest and self._measure(now):
            self._timer = loop.call_at(min(now + _CHECK_SECONDS, latest), self._wait, loop, latest)
        else:
            self._announced, self._expected = 0, self._in_progress
            self._start_all()
