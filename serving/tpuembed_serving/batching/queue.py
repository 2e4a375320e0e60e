"""Requests of one signature of one version on their way to a run."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np

from tpuembed_serving.batching.concat import count_rows, trailing_shapes
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.batching.runner import BatchRunner, Outcome
from tpuembed_serving.core.servable import Array, Columns, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.settings import BatchingSettings
from tpuembed_serving.telemetry.request_record import current_record

__all__ = ["BatchQueue", "OnOutcome", "QueuedRequest"]

OnOutcome = Callable[[list[Array] | Exception], None]
"""Told once, on the event loop's thread, what a request is answered."""

logger = logging.getLogger(__name__)

_SHARE_OF_FAILURES: Final = 0.05
"""Of the time, what runs that fail by their ids may take while others are answered: bad ids slow down who sends them."""
_LONGEST_PAUSE_SECONDS: Final = 1.0
"""Between two runs that fail."""
_KNOWN_SHAPES: Final = 1024
"""Of requests; more are looked at anew."""


class QueuedRequest:
    """One that waits, or runs.

    Attributes:
        servable: what it runs on.
        rows: of its inputs; None where they do not agree about it.
        group: equal for requests that may share a run.
        deadline: when it is answered that it took too long, by the event loop's clock.
        entered: when it began to wait.
        is_waiting: whether it does.
        is_apart: whether it may fail a run, and was postponed for that.
        is_over: whether nobody waits for its outcome any more.
        record: of the client's request that it is a part of, where one is kept.
    """

    __slots__ = (
        "_on_outcome",
        "deadline",
        "entered",
        "group",
        "inputs",
        "is_apart",
        "is_over",
        "is_waiting",
        "queue",
        "record",
        "rows",
        "servable",
    )

    def __init__(self, queue: "BatchQueue", servable: Servable, inputs: Sequence[Array], on_outcome: OnOutcome) -> None:
        self.queue, self.servable, self.inputs, self._on_outcome = queue, servable, inputs, on_outcome
        self.rows = count_rows(inputs)
        self.group: Any = None
        self.deadline = self.entered = 0.0
        self.is_waiting = self.is_apart = self.is_over = False
        self.record = current_record()

    def end(self, outcome: list[Array] | Exception) -> None:
        """Tell who waits for it, unless nobody does any more."""
        if not self.is_over:
            self.is_over = True
            try:
                self._on_outcome(outcome)
            except Exception:  # it is to fail nobody else of the same run
                logger.exception("an answer was lost")

    def postpone(self) -> None:
        """From here on it shares runs with such as itself alone."""
        self.is_apart = True
        self.group = self.group, "apart"

    def enter(self) -> None:
        """Begin to wait."""
        self.is_waiting = True
        self.queue.waiting_rows += self.rows or 1

    def leave(self) -> None:
        """Wait no longer."""
        self.is_waiting = False
        self.queue.waiting_rows -= self.rows or 1


class BatchQueue:
    """See the module.

    Attributes:
        runner: runs its requests.
        run_rows: the most rows of a run of several requests.
        wait_seconds: how long a request waits for others though a thread is free.
        next_check: when, by the loop's clock, its requests are looked at again for that.
        answered: when, by that clock, one of its requests was answered last.
        next_failure: before when, by that clock, what may fail by its ids lets others go first.
        waiting_rows: of all its requests that wait.
    """

    def __init__(
        self,
        signature: Signature,
        merging: Merging | None,
        defaults: BatchingParameters,
        chosen: BatchingParameters | None,
    ) -> None:
        """`chosen` are the operator's parameters, or the model's, and `defaults` hold where there are none."""
        self.runner = BatchRunner(signature, merging, chosen or defaults)
        self.run_rows = (chosen or defaults).run_rows
        self.wait_seconds = (chosen or defaults).batch_timeout_micros / 1e6
        self.waiting_rows = 0
        self.next_check = self.answered = self.next_failure = 0.0
        self._chosen = chosen if merging else None
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
        """The queue of a signature: merged where that is proven to change no answer, or the operator says so of all."""
        merging = servable.merging(signature)
        if merging is not None and not settings.covers(merging.is_proven):
            merging = None
        elif merging is not None and settings.enabled:  # of inputs of any form
            merging = dataclasses.replace(merging, shapes=())
        chosen = (merging.parameters if merging else None) or settings.parameters
        return cls(signature, merging, BatchingParameters(max_batch_size=settings.max_rows), chosen)

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
    ) -> QueuedRequest:
        """A request for `inputs`, which waits from `now` on for at most so many seconds.

        Raises:
            StatusError: INVALID_ARGUMENT, it has more rows than the operator allows.
        """
        request = QueuedRequest(self, servable, inputs, on_outcome)
        request.entered, request.deadline = now, now + seconds
        if self._chosen is not None and (request.rows or 0) > self._chosen.max_batch_size:
            sizes = f"{request.rows} is larger than maximum input batch size {self._chosen.max_batch_size}"
            raise invalid_argument(f"Task size {sizes}")
        request.group = self._group(inputs, request.rows)
        return request

    def _group(self, inputs: Sequence[Array], rows: int | None) -> Any:
        if type(inputs) is Columns and self._takes_columns and self.runner.merges and rows:
            return self, ()  # as of any of rank 1
        if not self.runner.merges or not rows or [array.dtype for array in inputs] != self._dtypes:
            return object()
        key: tuple[Any, ...]
        # Where all are alike, one shape stands for that of each.
        key = (
            inputs[0].shape[1:] if not self._pads_some and _are_alike(inputs) else trailing_shapes(inputs, self._padded)
        )
        return (self, key) if not self._shapes or self._fits(inputs, key) else object()

    def _fits(self, inputs: Sequence[Array], key: tuple[Any, ...]) -> bool:
        """Whether `inputs` have the ranks and sizes of which the proof is; they are alone in a run where they do not."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN_SHAPES:
                self._known.clear()
            known = self._known[key] = all(map(_is_of, inputs, self._shapes))
        return known

    def check_room(self, request: QueuedRequest) -> None:
        """Raise StatusError, UNAVAILABLE, where the operator's bound on what waits is reached."""
        most = self._chosen.max_enqueued_batches if self._chosen else None
        if most is None or self.waiting_rows + (request.rows or 1) <= most * self.run_rows:
            return
        raise StatusError(
            Code.UNAVAILABLE,
            "The batch scheduling queue to which this task was submitted is full; currently "
            f"{-(-self.waiting_rows // self.run_rows)} batches enqueued and max_enqueued_batches is {most}",
        )

    # ---- how long runs take

    def expected_seconds(self, requests: Sequence[QueuedRequest]) -> float:
        """Of a run of `requests`; infinite where that is not known, or depends on more than sizes."""
        if requests[0].is_apart:  # so that the event loop does not wait for what fails
            return float("inf")
        return self._seconds.get(_magnitude(requests), float("inf")) if self._is_steady else float("inf")

    def learn_seconds(self, requests: Sequence[QueuedRequest], seconds: float) -> None:
        """A run of `requests` took so long. What took much longer than others was mostly not the run itself."""
        key = _magnitude(requests)
        before = self._seconds.get(key, seconds)
        self._seconds[key] = 0.8 * before + 0.2 * min(seconds, 4 * before)

    def learn_outcomes(self, first: QueuedRequest, outcomes: Sequence[Outcome], seconds: float, now: float) -> None:
        """A run of `first` and others, which took so long, came out so, by the event loop's clock."""
        if any(isinstance(outcome, list) for outcome in outcomes):
            self.answered = now
        elif first.is_apart:
            self.next_failure = now + min(seconds / _SHARE_OF_FAILURES, _LONGEST_PAUSE_SECONDS)


def _is_of(array: Array, shape: tuple[int, ...] | None) -> bool:
    """Whether it has these sizes behind the first, -1 being any; None is any number of them."""
    sizes = array.shape[1:]
    if shape is None:
        return True
    return len(sizes) == len(shape) and all(want in (-1, size) for size, want in zip(sizes, shape, strict=True))


def _are_alike(inputs: Sequence[Array]) -> bool:
    """Whether all are of one shape, as ids of several features mostly are."""
    shapes = [array.shape for array in inputs]
    return shapes.count(shapes[0]) == len(shapes)


def _magnitude(requests: Sequence[QueuedRequest]) -> int:
    """Of the inputs' sizes."""
    return sum([_size(request.inputs) for request in requests]).bit_length()


def _size(inputs: Sequence[Array]) -> int:
    return inputs.matrix.size if type(inputs) is Columns else sum([array.size for array in inputs])
