"""Runs the requests of one signature: in one batch if that is safe, otherwise each alone.

Requests are batched if their rows are proven independent (`row_proof`), or if the operator enables it. A request with an id
that is known to fail is answered without a run. A batch that fails is halved until the failing request is found. A signature
whose outputs have another number of rows than its inputs is not batched again.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from tpuembed_serving.batching.concat import Merged, merge, split, take
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.batch_deadline import wait_until
from tpuembed_serving.core.servable import Array, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, of_later_rows

__all__ = ["BatchRunner", "Outcome", "Waiting"]

logger = logging.getLogger(__name__)

_NO_ONES_FAULT: Final = frozenset({Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNAVAILABLE})
"""Errors that do not depend on the request: running each request alone would fail too, only later."""


Outcome = list[Array] | Exception | None
"""The outcome of a request. None if it is over."""


class Waiting(Protocol):
    """A request to run."""

    @property
    def inputs(self) -> Sequence[Array]:
        """Return its inputs in the signature's order."""

    @property
    def rows(self) -> int | None:
        """Return the rows of its inputs, or None if they differ."""

    @property
    def is_over(self) -> bool:
        """Returns True if its caller does not wait any more."""

    @property
    def deadline(self) -> float:
        """Return its deadline, by `time.monotonic`, which is the event loop's clock."""


class _Batch(NamedTuple):
    """Requests that are being run, and their outcomes so far."""

    call: Callable[[Sequence[Array]], list[Array]]
    requests: Sequence[Waiting]
    outcomes: list[Outcome]

    def inputs(self, members: Sequence[int]) -> list[Sequence[Array]]:
        """Return the inputs of these requests."""
        return [self.requests[index].inputs for index in members]


class BatchRunner:
    """Runs requests of one signature. Several threads may use it. It keeps no servable, so that versions can be freed.

    Attributes:
        merges: whether requests may still be batched.
    """

    def __init__(self, signature: Signature, merging: Merging | None, parameters: BatchingParameters) -> None:
        """Create the runner. Without `merging`, requests are never batched."""
        self.merges = merging is not None
        self._signature = signature
        self._merging = merging or Merging()
        self._parameters = parameters
        self._known = signature.ids

    def run(self, servable: Servable, requests: Sequence[Waiting]) -> list[Outcome]:
        """Run `requests`, whose inputs can be merged, and return the outcome of each. No request fails another."""
        if not self._merging.is_steady:  # only runs without a steady duration can be cut off
            wait_until(max((request.deadline for request in requests if not request.is_over), default=None))
        batch = _Batch(functools.partial(servable.run, self._signature), requests, [None] * len(requests))
        self._run_together(batch, range(len(requests)))
        return batch.outcomes

    def _run_together(self, batch: _Batch, members: Sequence[int]) -> None:
        members = [index for index in members if not batch.requests[index].is_over]
        if len(members) < 2 or not self.merges:
            for index in members:
                batch.outcomes[index] = self._run_alone(batch, index)
            return
        merged = self._merge(batch.inputs(members))
        if self._known is not None and self._known.may_be_outside(merged.inputs):
            for index in members:
                batch.outcomes[index] = self._known.error(batch.requests[index].inputs)
            fine = [index for index in members if batch.outcomes[index] is None]
            if len(fine) < len(members):
                self._run_together(batch, fine)
                return
        try:
            parts = split(batch.call(merged.inputs), merged)
        except Exception as error:  # a model can raise anything, for one request or for all
            self._run_halves(batch, members, error)
            return
        if parts is None:
            self._stop_merging()
            self._run_together(batch, members)
            return
        for index, outputs in zip(members, parts, strict=True):
            batch.outcomes[index] = outputs

    def _run_halves(self, batch: _Batch, members: Sequence[int], error: Exception) -> None:
        """Run the two halves of a batch that failed."""
        if isinstance(error, StatusError) and error.code in _NO_ONES_FAULT:
            for index in members:
                batch.outcomes[index] = error
            return
        half = len(members) // 2
        self._run_together(batch, members[:half])
        self._run_together(batch, members[half:])

    def _stop_merging(self) -> None:
        if self.merges:
            text = "signature %s: requests are not batched: its outputs have another number of rows than its inputs"
            logger.warning(text, self._signature.name)
        self.merges = False

    # ---- one request

    def _run_alone(self, batch: _Batch, index: int) -> Outcome:
        request, parameters = batch.requests[index], self._parameters
        try:
            if self._known is not None and (error := self._known.error(request.inputs)):
                return error
            if parameters.enable_large_batch_splitting and (request.rows or 0) > parameters.run_rows:
                return self._run_parts(batch, request.inputs)
            return self._run_filled_up(batch, request.inputs, request.rows)
        except Exception as error:  # a model can raise anything
            return error

    def _run_parts(self, batch: _Batch, inputs: Sequence[Array]) -> list[Array]:
        """Run a request in several parts, and return its outputs."""
        size = self._parameters.run_rows
        parts = [take(inputs, start, start + size) for start in range(0, len(inputs[0]), size)]
        found = []
        for index, part in enumerate(parts):
            try:
                found.append(self._run_filled_up(batch, part, len(part[0])))
            except StatusError as error:
                raise of_later_rows(error, index * size) from None
        return [np.concatenate(outputs) for outputs in zip(*found, strict=True)]

    def _run_filled_up(self, batch: _Batch, inputs: Sequence[Array], rows: int | None) -> list[Array]:
        """Run inputs, filled up to an allowed batch size if there are any. `rows` is None if inputs differ in it."""
        if self.merges and rows and self._parameters.allowed_batch_sizes:
            merged = self._merge([inputs])
            parts = split(batch.call(merged.inputs), merged)
            if parts is not None:
                return parts[0]
            self._stop_merging()
        return batch.call(inputs)

    def _merge(self, requests: Sequence[Sequence[Array]]) -> Merged:
        widen = self._parameters.pad_variable_length_inputs
        return merge(requests, self._merging.padding, widen, self._parameters.allowed_batch_sizes)
