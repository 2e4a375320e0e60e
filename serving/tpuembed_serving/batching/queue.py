"""The queue of one signature of one version: requests on their way to a batch."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np

from tpuembed_serving.batching.concat import count_rows, trailing_shapes
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.batching.runner import BatchRunner
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, Columns, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.settings import BatchingSettings

__all__ = ["BatchQueue", "OnOutcome", "QueuedRequest"]

OnOutcome = Callable[[list[Array] | Exception], None]
"""Called once, on the event loop's thread, with the outputs of a request or its error."""

logger = logging.getLogger(__name__)

_KNOWN_SHAPES: Final = 1024
"""The most shapes whose check is cached."""


class QueuedRequest:
    """A request that waits or runs.

    Attributes:
        servable: the version to run.
        rows: the rows of its inputs; None if they differ.
        group: equal for requests that may be in one batch.
        deadline: when it is answered DEADLINE_EXCEEDED, by the event loop's clock.
        entered: when it began to wait.
        is_waiting: True while it waits.
        is_over: True once it is answered or its caller has left.
        record: the record of the client's request, if there is one.
    """

    __slots__ = (
        "_on_outcome",
        "deadline",
        "entered",
        "group",
        "inputs",
        "is_over",
        "is_waiting",
        "queue",
        "record",
        "rows",
        "servable",
    )

    def __init__(
        self,
        queue: "BatchQueue",
        servable: Servable,
        inputs: Sequence[Array],
        on_outcome: OnOutcome,
        record: RequestRecord | None = None,
    ) -> None:
        self.queue, self.servable, self.inputs, self._on_outcome = queue, servable, inputs, on_outcome
        self.rows = count_rows(inputs)
        self.group: Any = None
        self.deadline = self.entered = 0.0
        self.is_waiting = self.is_over = False
        self.record = record

    def end(self, outcome: list[Array] | Exception) -> None:
        """Pass the outcome to the caller, unless the request is over."""
        if not self.is_over:
            self.is_over = True
            try:
                self._on_outcome(outcome)
            except Exception:  # the other requests of the batch must still be answered
                logger.exception("the answer to a request was lost")

    def drop(self) -> None:
        """Forget the inputs and the caller. Its group keeps the request until the group's next batch, perhaps for long."""
        self.is_over = True
        self.inputs, self._on_outcome = (), noop

    def enter(self) -> None:
        """Begin to wait."""
        self.is_waiting = True
        self.queue.waiting_rows += self.rows or 1

    def leave(self) -> None:
        """Stop waiting."""
        self.is_waiting = False
        self.queue.waiting_rows -= self.rows or 1


class BatchQueue:
    """Groups the requests of one signature, and estimates how long their batches take.

    Times are by the event loop's clock.

    Attributes:
        runner: runs its batches.
        run_rows: the most rows of a batch of several requests.
        wait_seconds: how long a request waits for others while a thread is free.
        next_check: when the waiting requests are checked again.
        waiting_rows: the rows of all waiting requests.
    """

    def __init__(self, signature: Signature, merging: Merging | None, settings: BatchingSettings) -> None:
        """Create the queue. Without `merging` it does not batch."""
        parameters = settings.parameters or BatchingParameters(max_batch_size=settings.max_rows)
        self._chosen = settings.parameters if merging else None
        self.runner = BatchRunner(signature, merging, parameters)
        self.run_rows = parameters.run_rows
        self.wait_seconds = parameters.batch_timeout_micros / 1e6
        self.waiting_rows = 0
        self.next_check = 0.0
        self._dtypes = [info.numpy_dtype for info in signature.inputs]
        self._padded = [self._pads(merging, index) for index in range(len(signature.inputs))]
        self._pads_some = any(self._padded)
        self._shapes = merging.shapes if merging else ()
        is_flat = all(shape is None or not shape for shape in self._shapes)
        self._takes_columns = not self._pads_some and is_flat and all(dtype == np.int64 for dtype in self._dtypes)
        self._known: dict[Any, bool] = {}
        self._is_steady = merging is not None and merging.is_steady
        self._seconds: dict[int, float] = {}

    @classmethod
    def of(cls, servable: Servable, signature: Signature, settings: BatchingSettings) -> Self:
        """Create the queue of a signature. It batches if the rows are proven independent, or if the operator enables it."""
        merging = servable.merging(signature)
        if merging is not None and not settings.covers(merging.is_proven):
            merging = None
        elif merging is not None and settings.enabled:  # inputs of any shape
            merging = dataclasses.replace(merging, shapes=())
        return cls(signature, merging, settings)

    def _pads(self, merging: Merging | None, index: int) -> bool:
        padding = merging.padding[index] if merging and merging.padding else None
        return padding is not None or (self._chosen is not None and self._chosen.pad_variable_length_inputs)

    def request(
        self,
        servable: Servable,
        inputs: Sequence[Array],
        on_outcome: OnOutcome,
        now: float,
        seconds: float,
        record: RequestRecord | None = None,
    ) -> QueuedRequest:
        """Create a request for `inputs`, which waits from `now` on for at most `seconds`.

        Raises:
            StatusError: INVALID_ARGUMENT, it has more rows than `max_batch_size`.
        """
        request = QueuedRequest(self, servable, inputs, on_outcome, record)
        request.entered, request.deadline = now, now + seconds
        if self._chosen is not None and (request.rows or 0) > self._chosen.max_batch_size:
            sizes = f"{request.rows} is larger than maximum input batch size {self._chosen.max_batch_size}"
            raise invalid_argument(f"Task size {sizes}")
        request.group = self._group(inputs, request.rows)
        return request

    def _group(self, inputs: Sequence[Array], rows: int | None) -> Any:
        if type(inputs) is Columns and self._takes_columns and self.runner.merges and rows:
            return self, ()  # the key of inputs of rank 1
        if not self.runner.merges or not rows or [array.dtype for array in inputs] != self._dtypes:
            return object()
        key: tuple[Any, ...]
        # If all shapes are equal, one represents all.
        key = (
            inputs[0].shape[1:] if not self._pads_some and _are_alike(inputs) else trailing_shapes(inputs, self._padded)
        )
        return (self, key) if not self._shapes or self._fits(inputs, key) else object()

    def _fits(self, inputs: Sequence[Array], key: tuple[Any, ...]) -> bool:
        """Returns True if `inputs` have the ranks and sizes that the proof covers. Otherwise they run alone."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN_SHAPES:
                self._known.clear()
            known = self._known[key] = all(map(_is_of, inputs, self._shapes))
        return known

    def check_room(self, request: QueuedRequest) -> None:
        """Raise StatusError, UNAVAILABLE, if `max_enqueued_batches` is reached."""
        most = self._chosen.max_enqueued_batches if self._chosen else None
        if most is None or self.waiting_rows + (request.rows or 1) <= most * self.run_rows:
            return
        raise StatusError(
            Code.UNAVAILABLE,
            "The batch scheduling queue to which this task was submitted is full; currently "
            f"{-(-self.waiting_rows // self.run_rows)} batches enqueued and max_enqueued_batches is {most}",
        )

    # ---- how long batches take

    def expected_seconds(self, requests: Sequence[QueuedRequest]) -> float:
        """Return the expected duration of a batch. Infinite if it is unknown, or depends on more than sizes."""
        return self._seconds.get(_magnitude(requests), float("inf")) if self._is_steady else float("inf")

    def learn_seconds(self, requests: Sequence[QueuedRequest], seconds: float) -> None:
        """Update the expected duration. Outliers are clipped: they mostly measure other work of the machine."""
        if not self._is_steady:
            return
        key = _magnitude(requests)
        before = self._seconds.get(key, seconds)
        self._seconds[key] = 0.8 * before + 0.2 * min(seconds, 4 * before)


def _is_of(array: Array, shape: tuple[int, ...] | None) -> bool:
    """Returns True if `array` has these sizes after the first. -1 is any size, and None any rank."""
    sizes = array.shape[1:]
    if shape is None:
        return True
    return len(sizes) == len(shape) and all(want in (-1, size) for size, want in zip(sizes, shape, strict=True))


def _are_alike(inputs: Sequence[Array]) -> bool:
    """Returns True if all inputs have one shape, as is common for the ids of several features."""
    shapes = [array.shape for array in inputs]
    return shapes.count(shapes[0]) == len(shapes)


def _magnitude(requests: Sequence[QueuedRequest]) -> int:
    """Return the order of magnitude (base 2) of the number of input elements."""
    size = 0
    for request in requests:
        inputs = request.inputs
        size += inputs.matrix.size if type(inputs) is Columns else sum([array.size for array in inputs])
    return size.bit_length()
