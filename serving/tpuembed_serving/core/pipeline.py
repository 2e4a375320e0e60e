"""The way of every prediction, over REST and over gRPC: parse, lease, decode, check, run, encode.

A transport makes a `Prediction`, which converts between bytes and arrays, and passes it on in a `Call`. Limits, deadlines
and the choice of what runs on the event loop stand here, once.

The event loop does only short work. A step on more than `INLINE_BYTES` or `INLINE_ELEMENTS` runs in a thread. So does a step
that turns out to be slow: `Call.check`, which long steps call often, stops it on the loop after `_INLINE_SECONDS`.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tpuembed.runtime.cpus import available_cpus
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, Columns, LoadedVersion, Servable, Signature
from tpuembed_serving.core.service import ModelService, ModelSpec
from tpuembed_serving.core.status import (
    Code,
    MustAskError,
    StatusError,
    TooLargeError,
    stopping,
    timed_out,
)

__all__ = [
    "INLINE_BYTES",
    "INLINE_ELEMENTS",
    "Call",
    "Check",
    "Executor",
    "MemoryBudget",
    "Pipeline",
    "Prediction",
    "Task",
]

logger = logging.getLogger(__name__)

INLINE_BYTES: Final = 256 * 2**10
"""A larger body is parsed and decoded in a thread."""
INLINE_ELEMENTS: Final = 16 * 2**10
"""More elements are encoded in a thread."""
_INLINE_SECONDS: Final = 0.01
_SLOW_BYTES: Final = 16 * 2**10
"""More bytes of a body that needs a slow parser are parsed in a thread: each byte takes up to two microseconds."""
_CONVERTING_THREADS: Final = max(2, min(4, available_cpus()))
_ELEMENT_BYTES: Final = 16
"""About the memory of an element of an input: in the request's array, and in the one of its batch."""


class Check(Protocol):
    """Raises an error if the work should stop here. Long loops call it every few milliseconds."""

    def __call__(self, slow_bytes: int = 0) -> None:
        """Check, before slow work on so many bytes."""


class Task(NamedTuple):
    """One run of a signature, with its inputs in the signature's order.

    Attributes:
        string_bytes: the bytes of the strings in the inputs, if they can be more than those of the request.
    """

    signature: Signature
    inputs: Sequence[Array]
    string_bytes: int = 0


class Prediction(Protocol):
    """A request in the form of its transport. The pipeline calls its methods once each, in this order, or again in a thread.

    Attributes:
        output_bytes: about how many bytes one element of an output takes while the answer is encoded.
        model: the model that the request names. Empty if only its body does.
        log_type: the field of a PredictionLog that a logged request becomes.
        is_log_message: True if the request's body and its answer are the messages of that field.
    """

    output_bytes: int
    model: str
    log_type: str
    is_log_message: bool

    def decoding_bytes(self, body: bytes) -> int:
        """Return about how many bytes it takes to parse and decode `body`. Called for large bodies only."""

    def parse(self, body: bytes, check: Check) -> ModelSpec:
        """Parse the request, and return the model that it names.

        Raises:
            StatusError: it is malformed.
        """

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Return the runs that it asks of this version.

        Raises:
            StatusError: the version has no such signature, or the inputs do not fit it.
        """

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        """Return the answer. `outputs` has the outputs of each run by alias.

        Raises:
            StatusError: the outputs have no such form.
        """


Outcome = list[Array] | Exception
"""The outputs of a run in the signature's order, or its error."""
Respond = Callable[[bytes | Exception], None]
"""Takes the answer to a call. The event loop's thread calls it once, unless the client leaves first."""


class Executor(Protocol):
    """Runs versions: a ModelExecutor, or a RemoteExecutor."""

    def submit(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Sequence[Array],
        on_outcome: Callable[[Outcome], None],
        *,
        timeout_seconds: float | None = None,
        record: RequestRecord | None = None,
    ) -> Any:
        """Run a signature without waiting, and return the run. `on_outcome` is called later, on this event loop.

        Raises:
            StatusError: the run cannot be queued.
        """

    def give_up(self, run: Any) -> None:
        """Drop a run that nobody waits for. `on_outcome` is not called any more."""


class _SlowError(Exception):
    """A step takes too long for the event loop."""


class MemoryBudget:
    """The memory of all requests in flight, as estimated. The event loop's thread calls its methods.

    Attributes:
        limit: the most bytes of one request, and of all together.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._used = limit, 0

    def reserve(self, size: int, already: int = 0) -> None:
        """Reserve `size` more bytes for a request that has `already` reserved some.

        Raises:
            StatusError: RESOURCE_EXHAUSTED, the request needs more than the limit; UNAVAILABLE, others use the memory.
        """
        if already + size > self.limit:
            raise TooLargeError(
                f"the request needs about {_mebibytes(already + size)} of memory. The limit is {_mebibytes(self.limit)} "
                "(--max-request-memory). Send fewer rows per request"
            )
        if self._used + size > self.limit:
            raise StatusError(
                Code.UNAVAILABLE,
                f"the requests in flight use about {_mebibytes(self._used)} of memory, and this one needs "
                f"{_mebibytes(size)} more. The limit is {_mebibytes(self.limit)} (--max-request-memory). Send it again later",
            )
        self._used += size

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self._used -= size


class Call:
    """One request on its way through the pipeline.

    Attributes:
        prediction: converts the request and its answer.
        body: the request's bytes, decompressed.
        model: the model that it names; empty before it is known.
        deadline: when it is answered DEADLINE_EXCEEDED, by `time.monotonic`.
        record: what observers learn about it; None without observers.
        is_over: True once it is answered or its client has left.
    """

    loaded: LoadedVersion
    tasks: list[Task]
    outputs: list[dict[str, Array]]
    waiting: int
    elements = 0
    error: Exception | None = None
    is_over = False
    reserved = 0
    reserved_before = 0
    lease: contextlib.AbstractContextManager[LoadedVersion] | None = None
    timer: asyncio.TimerHandle | None = None
    work: "concurrent.futures.Future[Any] | None" = None

    def __init__(
        self, prediction: Prediction, body: bytes, seconds: float, record: RequestRecord | None, respond: Respond
    ) -> None:
        self.prediction, self.body, self.record, self.model = prediction, body, record, prediction.model
        self.deadline = time.monotonic() + seconds
        self.respond: Respond | None = respond
        self.runs: list[Any] = []

    def check(self, slow_bytes: int = 0) -> None:  # noqa: ARG002 - as Check
        """Raise StatusError if nobody waits for the answer any more: work in a thread calls it."""
        if self.is_over:
            raise StatusError(Code.CANCELLED, "the client has left")
        if time.monotonic() > self.deadline:
            raise timed_out()

    def seconds(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            StatusError: DEADLINE_EXCEEDED, it has passed.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise timed_out()
        return seconds

    def end_lease(self) -> None:
        """Let the version be unloaded."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.__exit__(None, None, None)


class _LoopCheck:
    """The `Check` of work on the event loop, of which there is one at a time.

    Attributes:
        end: when the work has to end, by `time.thread_time`. 0 before its first check.
    """

    end = 0.0

    def __call__(self, slow_bytes: int = 0) -> None:
        now = time.thread_time()
        self.end = self.end or now + _INLINE_SECONDS
        if slow_bytes > _SLOW_BYTES or now > self.end:
            raise _SlowError


class Pipeline:
    """Answers calls. One event loop uses it.

    Attributes:
        log: takes sampled calls of the models whose requests are logged, and their answers. Must not block.
    """

    log: "Callable[[Call, bytes], None]" = staticmethod(noop)

    def __init__(
        self,
        service: ModelService,
        executor: Executor,
        *,
        timeout_seconds: float,
        memory: MemoryBudget,
    ) -> None:
        """Create the pipeline.

        Args:
            service: finds models.
            executor: runs them.
            timeout_seconds: the longest duration of a call, from the arrival of its body to its answer.
            memory: the memory of all calls.
        """
        self.service, self.memory = service, memory
        self._executor, self._timeout_seconds = executor, timeout_seconds
        self._loop_check = _LoopCheck()
        self._is_closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(_CONVERTING_THREADS, thread_name_prefix="convert")

    def close(self) -> None:
        """Stop the threads that convert requests and answers. Work that needs one is answered UNAVAILABLE."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self,
        prediction: Prediction,
        body: bytes,
        record: RequestRecord | None = None,
        client_seconds: float | None = None,
        reserved: int = 0,
    ) -> bytes:
        """Wait for the answer to a request; see `start`. The work stops if this task is cancelled.

        Raises:
            StatusError: the request is invalid or too large, its deadline has passed, the run failed, or too much is in
                progress.
        """
        found: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()

        def respond(answer: bytes | Exception) -> None:
            if not found.done():
                found.set_result(answer)

        call = self.start(prediction, body, respond, record, client_seconds, reserved)
        try:
            answer = await found
        except asyncio.CancelledError:
            self.give_up(call)
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(
        self,
        prediction: Prediction,
        body: bytes,
        respond: Respond,
        record: RequestRecord | None = None,
        client_seconds: float | None = None,
        reserved: int = 0,
    ) -> Call:
        """Begin to answer a request, and return its call. A client's own timeout can shorten the server's.

        `respond` is called with the answer's body or with an error, now or later. `reserved` bytes of the memory that it takes
        to decode the body are reserved by the caller, until the answer.
        """
        seconds = self._timeout_seconds if client_seconds is None else min(client_seconds, self._timeout_seconds)
        call = Call(prediction, body, seconds, record, respond)
        call.reserved_before = reserved
        if len(body) <= INLINE_BYTES:
            self._on_loop(call, self._prepare, self._run)
        else:
            self._in_thread(call, self._estimate, self._admit)
        return call

    def give_up(self, call: Call) -> None:
        """Stop the work of a call whose client has left."""
        if not call.is_over:
            runs = call.runs
            self._end(call, None)
            for run in runs:
                self._executor.give_up(run)

    def _on_loop(self, call: Call, work: Callable[[Call, Check], Any], then: Callable[[Call, Any], None]) -> None:
        """Do work on the event loop, or in a thread if it turns out to be slow. `then` takes its result."""
        check = self._loop_check
        check.end = 0.0
        try:
            then(call, work(call, check))
        except (_SlowError, MustAskError):
            self._in_thread(call, work, then)
        except Exception as error:
            self._end(call, error)

    def _in_thread(
        self,
        call: Call,
        work: Callable[[Call, Check], Any],
        then: Callable[[Call, Any], None],
        memory: int = 0,
    ) -> None:
        """Do work in a thread, if the `memory` that it takes can be reserved."""
        try:
            if self._is_closed:
                raise stopping()
            self._reserve(call, memory)
        except StatusError as error:
            self._end(call, error)
            return
        loop = asyncio.get_running_loop()
        if call.timer is None:
            call.timer = loop.call_later(call.deadline - time.monotonic(), self._end, call, timed_out())
        call.work = self._threads.submit(functools.partial(work, call, call.check))
        call.work.add_done_callback(lambda done: _tell(loop, self._take, call, done, then))

    def _take(self, call: Call, done: "concurrent.futures.Future[Any]", then: Callable[[Call, Any], None]) -> None:
        """Take the result of a thread's work."""
        call.work = None
        if call.is_over:  # the thread had the memory and the lease until now
            self._give_back(call)
            return
        try:
            then(call, done.result())
        except concurrent.futures.CancelledError:
            self._end(call, stopping())
        except Exception as error:
            self._end(call, error)

    # ---- the steps

    def _estimate(self, call: Call, _: Check) -> int:
        return call.prediction.decoding_bytes(call.body)

    def _admit(self, call: Call, memory: int) -> None:
        self._in_thread(call, self._prepare, self._run, max(0, memory - call.reserved_before))

    def _prepare(self, call: Call, check: Check) -> list[Task]:
        """Parse the request, lease the version, and decode the inputs."""
        if call.lease is not None:  # the event loop has begun this step
            call.end_lease()
        prediction, record = call.prediction, call.record
        spec = prediction.parse(call.body, check)
        call.model = spec.name
        if record is not None:
            record.model = spec.name
        lease = self.service.lease(spec)
        call.loaded = loaded = lease.__enter__()
        call.lease = lease
        if record is not None:
            record.version = loaded.version
        return prediction.decode(loaded, check)

    def _run(self, call: Call, tasks: list[Task]) -> None:
        for task in tasks:
            self._check(call, task)
        call.tasks, call.outputs, call.waiting = tasks, [{}] * len(tasks), len(tasks)
        seconds = call.seconds()
        for index, (signature, inputs, _) in enumerate(tasks):
            on_outcome = functools.partial(self._ran, call, index)
            try:
                run = self._executor.submit(
                    call.loaded.servable, signature, inputs, on_outcome, timeout_seconds=seconds, record=call.record
                )
            except StatusError as error:
                self._ran(call, index, error)
            else:
                call.runs.append(run)

    def _ran(self, call: Call, index: int, outcome: Outcome) -> None:
        """Take the outcome of a run. The lease ends with the last one."""
        if call.is_over:
            return
        if isinstance(outcome, Exception):
            call.error = call.error or outcome
        else:
            call.outputs[index] = dict(zip(call.tasks[index].signature.output_dtypes, outcome, strict=True))
            for array in outcome:
                call.elements += array.size
        call.waiting -= 1
        if call.waiting:
            return
        call.end_lease()
        if call.error is not None:
            self._end(call, call.error)
        elif call.elements <= INLINE_ELEMENTS:
            self._on_loop(call, self._encode, self._end)
        else:
            self._in_thread(call, self._encode, self._end, call.elements * call.prediction.output_bytes)

    def _encode(self, call: Call, check: Check) -> bytes:
        return call.prediction.encode(call.loaded, call.outputs, check)

    def _end(self, call: Call, answer: bytes | Exception | None) -> None:
        """End a call with its answer, or without one if its client has left."""
        if call.is_over:
            if isinstance(answer, Exception) and not isinstance(answer, StatusError):
                logger.error("the answer to a request was lost", exc_info=answer)
            return
        call.is_over = True
        if call.timer is not None:
            call.timer.cancel()
        if call.work is None:
            self._give_back(call)
        else:  # a thread has the memory and the lease until its next check, or until `_take` if it has not begun
            call.work.cancel()
        respond, call.respond = call.respond, None  # without reference cycles, the garbage collector has less to do
        call.runs = []
        if answer is not None and respond is not None:
            if not isinstance(answer, Exception):
                sampled = call.loaded.request_logging
                if sampled is not None and random.random() < sampled.sampling_rate:
                    self.log(call, answer)
            respond(answer)

    def _give_back(self, call: Call) -> None:
        if call.reserved:
            self.memory.release(call.reserved)
        if call.lease is not None:
            call.end_lease()

    def _reserve(self, call: Call, size: int) -> None:
        self.memory.reserve(size, call.reserved + call.reserved_before)
        call.reserved += size

    def _check(self, call: Call, task: Task) -> None:
        """Check shapes and memory of a run before it starts.

        Raises:
            StatusError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED or UNAVAILABLE.
        """
        inputs, signature = task.inputs, task.signature
        if signature.shapes:
            signature.check_shapes(inputs)
        rows = elements = 0
        if type(inputs) is Columns:
            rows, elements = len(inputs.matrix), inputs.matrix.size
        else:
            for array in inputs:
                elements += array.size
                if array.ndim and len(array) > rows:
                    rows = len(array)
        size = elements * _ELEMENT_BYTES + rows * signature.row_bytes + task.string_bytes
        if size > INLINE_BYTES:
            self._reserve(call, size)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call `function` on the loop, from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and its calls with it
        loop.call_soon_threadsafe(function, *args)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
