"""Runs models on a few threads, with bounded queues and deadlines, without blocking the event loop.

Batching has no timer by default: a batch starts as soon as a thread is free and a turn of the event loop brings no more
requests, with all requests that wait for the same signature. A single request runs at once. With many, more of them are in
one batch.
"""

import asyncio
import collections
import concurrent.futures
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from tpuembed.runtime.cpus import available_cpus
from tpuembed_serving.batching.queue import BatchQueue, OnOutcome, QueuedRequest
from tpuembed_serving.batching.runner import Outcome
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, stopping, timed_out
from tpuembed_serving.settings import BatchingSettings

__all__ = ["ModelExecutor", "RequestTimeouts"]

_INLINE_SECONDS: Final = 0.0003
"""A batch that is expected to be shorter runs on the event loop's thread: a thread switch would cost about as much."""
_INLINE_SECONDS_OF_MANY: Final = 0.002
"""The same limit if as many processes serve as there are processors: another thread would find none free."""
_INLINE_SECONDS_OF_ONE: Final = 0.001
"""The same limit for a single request, during which few others arrive."""
_JOIN_SECONDS: Final = 0.005
"""The longest time that requests wait for others which arrive in the next turns of the event loop."""


class RequestTimeouts:
    """Fails the requests of one event loop at their deadlines, with one timer for all."""

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


class ModelExecutor:
    """Starts batches in order of arrival. One event loop at a time calls its methods.

    Attributes:
        pool_name: the name of its thread pool.
        watch: called after every batch with its requests, its duration, and its end by the loop's clock; None by default.
    """

    def __init__(
        self,
        threads: int,
        max_queued: int,
        timeout_seconds: float,
        batching: BatchingSettings | None = None,
        processes: int = 1,
    ) -> None:
        """Create the thread pool.

        Args:
            threads: how many batches run at once.
            max_queued: how many more requests may wait.
            timeout_seconds: the longest duration of a request.
            batching: which requests are batched.
            processes: how many processes of this machine serve.
        """
        self._batching = batching or BatchingSettings()
        of_all = self._batching.parameters
        threads = (of_all and of_all.num_batch_threads) or threads
        self.pool_name = (of_all and of_all.thread_pool_name) or "model-run"
        self.watch: Callable[[Sequence[QueuedRequest], float, float], None] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=self.pool_name)
        self._free = threads
        self._max_queued = max_queued
        self._timeout_seconds = timeout_seconds
        is_full = 1 < processes >= available_cpus()
        self._inline_seconds = _INLINE_SECONDS_OF_MANY if is_full else _INLINE_SECONDS
        self._queues: dict[int, dict[str, BatchQueue]] = {}
        self._groups: dict[Any, collections.deque[QueuedRequest]] = {}
        self._waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[QueuedRequest] = set()

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start with a new event loop. Requests and timers of an earlier loop have ended with it."""
        self._loop = loop
        self._open = set()
        self._will_start = False
        self._timeouts = RequestTimeouts(loop, self._open, self._fail)

    def submit(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Sequence[Array],
        on_outcome: OnOutcome,
        *,
        timeout_seconds: float | None = None,
        record: RequestRecord | None = None,
    ) -> QueuedRequest:
        """Queue a run of `servable.run` on `inputs`, without waiting.

        Args:
            servable: the version to run.
            signature: its signature to run.
            inputs: the inputs in the signature's order.
            on_outcome: called later, on this event loop, with the outputs or the error. DEADLINE_EXCEEDED, no result in time.
            timeout_seconds: shortens the executor's own timeout.
            record: the record of the client's request, if there is one.

        Raises:
            StatusError: UNAVAILABLE, the queue is full; INVALID_ARGUMENT, more rows than the operator's parameters allow.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._enter(loop)
        seconds = self._timeout_seconds if timeout_seconds is None else min(timeout_seconds, self._timeout_seconds)
        queue = self._queue(servable, signature)
        request = queue.request(servable, inputs, on_outcome, loop.time(), seconds, record)
        if self._waiting >= self._max_queued + self._free:
            raise self._full()
        queue.check_room(request)
        self._add(request)
        self._timeouts.expect(request.deadline)
        self._plan_start()
        return request

    def close(self) -> None:
        """Fail the waiting requests. A batch that still runs has passed its deadline, and ends with its servable."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for request in list(self._open) if self._loop and not self._loop.is_closed() else ():
            if request.is_waiting:
                self._fail(request, stopping())

    # ---- waiting requests

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests."""
        return self._waiting

    def _queue(self, servable: Servable, signature: Signature) -> BatchQueue:
        queues = self._queues.get(id(servable))
        if queues is None:
            queues = self._queues[id(servable)] = {}
            weakref.finalize(servable, self._queues.pop, id(servable), None)
        queue = queues.get(signature.name)
        if queue is None:
            if not servable.knows_merging(signature):  # the event loop cannot wait for a proof
                return BatchQueue(signature, None, self._batching)
            queue = queues[signature.name] = BatchQueue.of(servable, signature, self._batching)
        return queue

    def _add(self, request: QueuedRequest) -> None:
        group = self._groups.get(request.group)
        if group is None:
            group = self._groups[request.group] = collections.deque()
        group.append(request)
        self._open.add(request)
        request.enter()
        self._waiting += 1

    def _leave(self, request: QueuedRequest) -> None:
        """Stop counting a request as waiting. It stays in its group, where `_take` skips it."""
        if request.is_waiting:
            request.leave()
            self._waiting -= 1

    def give_up(self, request: QueuedRequest) -> None:
        """Drop a request whose caller has left."""
        request.is_over = True
        self._fail(request, stopping())

    def _full(self) -> StatusError:
        return StatusError(
            Code.UNAVAILABLE,
            "The batch scheduling queue to which this task was submitted is full; currently "
            f"{self._waiting} requests are waiting and the limit is {self._max_queued}",
        )

    def _fail(self, request: QueuedRequest, error: Exception) -> None:
        was_waiting = request.is_waiting
        self._open.discard(request)
        self._leave(request)
        request.end(error)
        if was_waiting:
            request.drop()

    # ---- batches

    def _plan_start(self) -> None:
        """Start batches at the end of this turn of the loop, so that other requests of this turn can join."""
        if self._free and not self._will_start and self._loop is not None:
            self._will_start = True
            self._loop.call_soon(self._start_or_wait, self._waiting, self._loop.time() + _JOIN_SECONDS)

    def _start_or_wait(self, waiting: int, latest: float) -> None:
        """Start batches, unless this turn has brought more requests: then the next turn probably brings more, too.

        Two small batches cost more than a large one, also because their threads and the event loop wait for each other.
        """
        assert self._loop is not None
        if waiting < self._waiting and self._loop.time() < latest:
            self._loop.call_soon(self._start_or_wait, self._waiting, latest)
        else:
            self._start_runs()

    def _start_runs(self) -> None:
        self._will_start = False
        for group in list(self._groups):
            while self._free and group in self._groups and self._is_due(group):
                self._start(self._take(group))

    def _is_due(self, group: Any) -> bool:
        """Returns True if the group's requests may start now. Otherwise plans the next check."""
        requests = self._groups[group]
        queue = requests[0].queue
        assert self._loop is not None
        if not queue.wait_seconds or sum(request.rows or 0 for request in requests) >= queue.run_rows:
            return True
        start = requests[0].entered + queue.wait_seconds
        if start <= self._loop.time():
            return True
        if queue.next_check != start:
            queue.next_check = start
            self._loop.call_at(start, self._check_again, queue)
        return False

    def _check_again(self, queue: BatchQueue) -> None:
        """Check the waiting requests. uvloop's timers may be a millisecond early; then another check is planned."""
        queue.next_check = 0.0
        self._start_runs()

    def _take(self, group: Any) -> list[QueuedRequest]:
        """Take the requests of one batch. The rest of the group goes to the end of the queue."""
        requests = self._groups.pop(group)
        taken: list[QueuedRequest] = []
        room = requests[0].queue.run_rows
        while requests and (not taken or (requests[0].rows or 0) <= room):
            request = requests.popleft()
            if request.is_waiting:
                self._leave(request)
                taken.append(request)
                room -= request.rows or 0
        if requests:
            self._groups[group] = requests
        return taken

    def _start(self, requests: list[QueuedRequest]) -> None:
        if not requests:
            return
        queue = requests[0].queue
        inline = self._inline_seconds if len(requests) > 1 else max(self._inline_seconds, _INLINE_SECONDS_OF_ONE)
        if queue.expected_seconds(requests) < inline:
            self._deliver(requests, *_run(requests))
            return
        self._free -= 1
        assert self._loop is not None
        self._pool.submit(self._work, self._loop, requests)

    def _work(self, loop: asyncio.AbstractEventLoop, requests: list[QueuedRequest]) -> None:
        """Run a batch on a thread of the pool."""
        outcomes, seconds = _run(requests)
        try:
            loop.call_soon_threadsafe(self._finish, requests, outcomes, seconds)
        except RuntimeError:  # the loop is closed, so nothing waits for the outcomes
            self._free += 1

    def _finish(self, requests: list[QueuedRequest], outcomes: Sequence[Outcome], seconds: float) -> None:
        self._free += 1
        self._deliver(requests, outcomes, seconds)
        if self._groups:
            self._start_runs()

    def _deliver(self, requests: list[QueuedRequest], outcomes: Sequence[Outcome], seconds: float) -> None:
        requests[0].queue.learn_seconds(requests, seconds)
        assert self._loop is not None
        now = self._loop.time()
        if self.watch is not None:
            self.watch(requests, seconds, now)
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(request, outcome)
            else:
                self._open.discard(request)
                if outcome is not None:
                    request.end(outcome)


def _run(requests: list[QueuedRequest]) -> tuple[Sequence[Outcome], float]:
    started = time.perf_counter()
    outcomes: Sequence[Outcome]
    try:
        outcomes = requests[0].queue.runner.run(requests[0].servable, requests)
    except Exception as error:  # an internal error: exceptions of a model are outcomes
        outcomes = [error] * len(requests)
    return outcomes, time.perf_counter() - started
