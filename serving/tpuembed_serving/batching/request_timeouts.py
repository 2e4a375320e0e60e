"""Fails requests at their deadlines, with one timer for all requests."""

import asyncio
from collections.abc import Callable, Collection

from tpuembed_serving.batching.queue import QueuedRequest
from tpuembed_serving.core.status import timed_out

__all__ = ["RequestTimeouts"]


class RequestTimeouts:
    """The deadlines of the requests of one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Collection[QueuedRequest],
        fail: Callable[[QueuedRequest, Exception], None],
    ) -> None:
        """Watch `requests`. `fail` is called for each that has reached its deadline, and must remove it."""
        self._loop, self._requests, self._fail = loop, requests, fail
        self._timer: asyncio.Handle | None = None
        self._next = 0.0

    def expect(self, deadline: float) -> None:
        """Check the requests at `deadline` at the latest, by the loop's clock."""
        if self._timer is None or deadline < self._next:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._next = self._loop.call_at(deadline, self._expire), deadline

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for request in list(self._requests):
            if request.deadline <= now:
                self._fail(request, timed_out())
        if self._requests:
            self.expect(min(request.deadline for request in self._requests))
