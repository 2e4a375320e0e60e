"""The way of every prediction, over REST and over gRPC: parse, lease, decode, check, run, encode.

A transport makes a `Prediction`, which converts between bytes and arrays, and passes it on in a `Call`. Limits, deadlines
and the choice of what runs on the event loop stand here, once.

The event loop does only short work. A step on more than `INLINE_BYTES` or `INLINE_ELEMENTS` runs in a thread. So does a step
that turns out to be slow: `Call.check`, which long steps call often, stops it on the loop after `_INLINE_SECONDS`.
"""

import asyncio
import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, Columns, LoadedVersion, Servable, Signature
from tpuembed_serving.core.service import ModelService, ModelSpec
from tpuembed_serving.core.status import Code, StatusError, TooLargeError, invalid_argument

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

INLINE_BYTES: Final = 256 * 2**10
"""A larger body is parsed and decoded in a thread."""
INLINE_ELEMENTS: Final = 16 * 2**10
"""More elements are encoded in a thread."""
_INLINE_SECONDS: Final = 0.01
_SLOW_BYTES: Final = 16 * 2**10
"""More bytes of a body that needs a slow parser are parsed in a thread: each byte takes up to two microseconds."""
_CONVERTING_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_OBJECT_BYTES: Final = 64
"""About the memory of a short string in an array: its pointer and its bytes object."""


class Check(Protocol):
    """Raises an error if the work should stop here. Long loops call it every few milliseconds."""

    def __call__(self, slow_bytes: int = 0) -> None:
        """Check, before slow work on so many bytes."""


class Task(NamedTuple):
    """One run of a signature, with its inputs in the signature's order."""

    signature: Signature
    inputs: Sequence[Array]


class Prediction(Protocol):
    """A request in the form of its transport. The pipeline calls its methods once each, in this order, or again in a thread.

    Attributes:
        output_bytes: about how many bytes one element of an output takes while the answer is encoded.
    """

    output_bytes: int

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


class Executor(Protocol):
    """Runs versions: a ModelExecutor, or a RemoteExecutor."""

    async def run(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Sequence[Array],
        *,
        timeout_seconds: float | None = None,
        record: RequestRecord | None = None,
    ) -> list[Array]:
        """Return the signature's outputs, both in the signature's order. `timeout_seconds` can shorten its own timeout."""


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
        deadline: when it is answered DEADLINE_EXCEEDED, by `time.monotonic`.
        record: what observers are told about it; None without observers.
        is_over: True once it is answered or its client has left.
    """

    __slots__ = ("body", "deadline", "is_over", "prediction", "record", "reserved", "working")

    def __init__(
        self, prediction: Prediction, body: bytes, deadline: float, record: RequestRecord | None = None
    ) -> None:
        self.prediction, self.body, self.deadline, self.record = prediction, body, deadline, record
        self.is_over = False
        self.reserved = 0
        self.working: asyncio.Future[Any] | None = None

    def check(self, _: int = 0) -> None:
        """Raise StatusError if nobody waits for the answer any more: work in a thread calls it."""
        if self.is_over:
            raise StatusError(Code.CANCELLED, "the client has left")
        if time.monotonic() > self.deadline:
            raise late()

    def seconds(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            StatusError: DEADLINE_EXCEEDED, it has passed.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise late()
        return seconds


def late() -> StatusError:
    """Return the error of a call after its deadline: TensorFlow's text for a Session::Run that takes too long."""
    return StatusError(Code.DEADLINE_EXCEEDED, "Timed out waiting for notification")


class Pipeline:
    """Answers calls. One event loop uses it."""

    def __init__(
        self,
        service: ModelService,
        executor: Executor,
        *,
        timeout_seconds: float,
        memory: MemoryBudget,
        max_rows: int | None = None,
    ) -> None:
        """Create the pipeline.

        Args:
            service: finds models.
            executor: runs them.
            timeout_seconds: the longest duration of a call, from the arrival of its body to its answer.
            memory: the memory of all calls.
            max_rows: the most rows of a request; None is no limit.
        """
        self.service, self.memory = service, memory
        self._executor, self._timeout_seconds, self._max_rows = executor, timeout_seconds, max_rows
        self._threads = concurrent.futures.ThreadPoolExecutor(_CONVERTING_THREADS, thread_name_prefix="convert")

    def close(self) -> None:
        """Stop the threads that convert requests and answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def call(
        self,
        prediction: Prediction,
        body: bytes,
        record: RequestRecord | None = None,
        client_seconds: float | None = None,
    ) -> Call:
        """Return a call that begins now. A client's own timeout can shorten the server's."""
        seconds = self._timeout_seconds if client_seconds is None else min(client_seconds, self._timeout_seconds)
        return Call(prediction, body, time.monotonic() + seconds, record)

    async def answer(self, call: Call) -> bytes:
        """Return the body of the answer.

        Raises:
            StatusError: the request is invalid or too large, its deadline has passed, the run failed, or too much is in
                progress.
        """
        try:
            return await self._answer(call)
        finally:
            call.is_over = True
            if call.working is None or call.working.done():
                self.memory.release(call.reserved)
            else:  # a thread still has the memory; it stops at its next check
                call.working.add_done_callback(lambda work: self._discard(call, work))

    async def _answer(self, call: Call) -> bytes:
        prediction, record = call.prediction, call.record
        is_small = len(call.body) <= INLINE_BYTES
        if not is_small:
            self._reserve(call, prediction.decoding_bytes(call.body))
        spec = await self._convert(call, is_small, prediction.parse, call.body)
        if record is not None:
            record.model = spec.name
        with self.service.lease(spec) as loaded:
            if record is not None:
                record.version = loaded.version
            tasks = await self._convert(call, is_small, prediction.decode, loaded)
            for task in tasks:
                self._check(call, task)
            if len(tasks) == 1:
                outputs = [await self._run(call, loaded.servable, tasks[0])]
            else:
                outputs = await self._run_all(call, loaded.servable, tasks)
        elements = sum([array.size for one in outputs for array in one.values()])
        if elements > INLINE_ELEMENTS:
            self._reserve(call, elements * prediction.output_bytes)
        return await self._convert(call, elements <= INLINE_ELEMENTS, prediction.encode, loaded, outputs)

    async def _convert(self, call: Call, is_small: bool, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args, check)`: on the event loop if that is quick, else in a thread."""
        if is_small:
            end = time.monotonic() + _INLINE_SECONDS

            def check(slow_bytes: int = 0) -> None:
                if slow_bytes > _SLOW_BYTES or time.monotonic() > end:
                    raise _SlowError

            try:
                return function(*args, check)
            except _SlowError:
                pass
        step = functools.partial(function, *args, call.check)
        work = asyncio.get_running_loop().run_in_executor(self._threads, step)
        call.working = work
        done, _ = await asyncio.wait([work], timeout=call.seconds())
        if not done:
            raise late()
        return work.result()

    def _discard(self, call: Call, work: "asyncio.Future[Any]") -> None:
        """Give back the memory of a call that was answered while a thread still worked for it."""
        self.memory.release(call.reserved)
        if not work.cancelled():
            work.exception()  # nobody waits for it

    def _reserve(self, call: Call, size: int) -> None:
        self.memory.reserve(size, call.reserved)
        call.reserved += size

    def _check(self, call: Call, task: Task) -> None:
        """Check rows, shapes and memory of a run before it starts.

        Raises:
            StatusError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED or UNAVAILABLE.
        """
        inputs, signature = task.inputs, task.signature
        if type(inputs) is Columns:  # ids of one row each
            rows, size = len(inputs.matrix), inputs.matrix.nbytes
        else:
            rows, size = 0, 0
            for array in inputs:
                rows = max(rows, len(array) if array.ndim else 0)
                size += array.nbytes if array.dtype != object else array.size * _OBJECT_BYTES
        if self._max_rows is not None and rows > self._max_rows:
            raise invalid_argument(
                f"the request has {rows} rows. The limit is {self._max_rows}. Send fewer rows per request"
            )
        signature.check_shapes(inputs)
        size += rows * signature.row_bytes
        if size > INLINE_BYTES:
            self._reserve(call, size)

    async def _run(self, call: Call, servable: Servable, task: Task) -> dict[str, Array]:
        record, seconds = call.record, call.seconds()
        started = time.perf_counter() if record is not None else 0.0
        outputs = await self._executor.run(
            servable, task.signature, task.inputs, timeout_seconds=seconds, record=record
        )
        if record is not None and not record.has_run:  # it ran in another server
            record.ran(None, 0.0, time.perf_counter() - started)
        return dict(zip(task.signature.output_dtypes, outputs, strict=True))

    async def _run_all(self, call: Call, servable: Servable, tasks: Sequence[Task]) -> list[dict[str, Array]]:
        """Run all tasks at once, and wait for all: none may continue after the lease ends."""
        runs = (self._run(call, servable, task) for task in tasks)
        found = await asyncio.gather(*runs, return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in found if not isinstance(outcome, BaseException)]


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
