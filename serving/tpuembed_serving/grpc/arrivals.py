"""Lets calls that arrive one by one start together.

grpc.aio delivers one call at a time, each some turns of the event loop after the one before. Batches of the calls that one turn
has brought would be small. So calls wait for each other: for as many as were in progress at once, while others arrive. They are
also decoded one right after the other, which finds the code in the processor's caches.
"""

import asyncio
from typing import Final

__all__ = ["Arrivals"]

_NEXT_SECONDS: Final = 0.002
"""How long calls wait for the next one."""
_LONGEST_SECONDS: Final = 0.005
"""How long a call waits at most, while others arrive."""
_PAUSE_SECONDS: Final = 0.02
"""How long after a wait in vain no call waits. So few calls wait in vain."""


class Arrivals:
    """Counts the calls of one event loop. A single client never waits."""

    def __init__(self) -> None:
        self._announced = self._arrived = self._in_progress = self._expected = 0
        self._start: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_wait = 0.0

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
        self._arrived += 1
        self._in_progress += 1
        self._start_if_complete()
        loop = asyncio.get_running_loop()
        if self._in_progress >= self._expected or loop.time() < self._next_wait:
            return
        if self._start is None:
            self._start = asyncio.Event()
            # This call has arrived, so the first wait is not in vain.
            self._wait(loop, 0, loop.time() + _LONGEST_SECONDS)
        await self._start.wait()

    def leave(self) -> None:
        """Note that a call has ended."""
        self._in_progress -= 1

    def _start_if_complete(self) -> None:
        if self._start is not None and self._in_progress >= self._expected:
            self._start_all()

    def _start_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._start is not None:
            self._start.set()
        self._start = self._timer = None

    def _wait(self, loop: asyncio.AbstractEventLoop, arrived: int, latest: float) -> None:
        """Wait for the next call, unless none has arrived since there were `arrived` of them. All start at `latest`."""
        now = loop.time()
        if now >= latest:
            self._start_all()
        elif self._arrived > arrived:
            self._timer = loop.call_at(min(now + _NEXT_SECONDS, latest), self._wait, loop, self._arrived, latest)
        else:
            self._announced, self._expected = 0, self._in_progress
            self._next_wait = now + _PAUSE_SECONDS
            self._start_all()
