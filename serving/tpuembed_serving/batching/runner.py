"""Runs of one signature: of several requests together where that is safe, and of each alone where it is not.

Together they are only what each would be alone: of signatures of which that is proven (`row_proof`), or where the operator says so.
A request that may fail by its ids is kept apart, a merged run that fails is taken in halves until the request is found that
fails, and a signature whose outputs' rows are not its inputs' is never merged again.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from tpuembed_serving.batching.concat import Merged, merge, split, take
from tpuembed_serving.batching.id_guard import IdGuard, KnownIds, LearntIds
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.deadlines import wait_until
from tpuembed_serving.core.servable import Array, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, of_later_rows

__all__ = ["BatchRunner", "Outcome", "Postponed", "Waiting"]

logger = logging.getLogger(__name__)

_NO_ONES_FAULT: Final = frozenset({Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNAVAILABLE})
"""What a run of each request alone would end in as well, only later."""


class Postponed:
    """The outcome of a request that may fail: it is to be run again, `apart`, so that the others' answers do not wait for it."""


Outcome = list[Array] | Exception | Postponed | None
"""What a request is answered; None where nobody waits for it any more."""


class Waiting(Protocol):
    """A request."""

    @property
    def inputs(self) -> Sequence[Array]:
        """In the signature's order."""

    @property
    def rows(self) -> int | None:
        """Of its inputs; None where they do not agree about it."""

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""

    @property
    def deadline(self) -> float:
        """When that is so at the latest, by `time.monotonic`, which is an event loop's clock."""


_POSTPONED: Final = Postponed()


class _Batch(NamedTuple):
    """Requests that are being run, and what has come out so far."""

    call: Callable[[Sequence[Array]], list[Array]]
    requests: Sequence[Waiting]
    outcomes: list[Outcome]

    def inputs(self, members: Sequence[int]) -> list[Sequence[Array]]:
        """Of these requests."""
        return [self.requests[index].inputs for index in members]


class BatchRunner:
    """See the module; several threads may use it at once. It holds no servable: versions come and go.

    Attributes:
        merges: whether requests may still share a run.
    """

    def __init__(self, signature: Signature, merging: Merging | None, parameters: BatchingParameters) -> None:
        """`merging` is None where requests are never merged."""
        self.merges = merging is not None
        self._signature = signature
        self._merging = merging or Merging()
        self._parameters = parameters
        ranges = self._merging.id_ranges
        self._ids: IdGuard = KnownIds(ranges) if ranges else LearntIds(len(signature.inputs))
        self._ids_are_known = bool(ranges)

    def run(self, servable: Servable, requests: Sequence[Waiting], *, apart: bool = False) -> list[Outcome]:
        """The outcome of each of `requests`, whose inputs can be merged; whatever happens to one happens to no other.

        Args:
            apart: whether all of them were postponed.
        """
        if not self._merging.is_steady:  # no other run ends before it is done
            wait_until(max((request.deadline for request in requests if not request.is_over), default=None))
        batch = _Batch(functools.partial(servable.run, self._signature), requests, [None] * len(requests))
        if apart:
            self._run_suspects(batch, [index for index, request in enumerate(requests) if not request.is_over])
        else:
            self._run_together(batch, range(len(requests)))
        return batch.outcomes

    def _run_together(self, batch: _Batch, members: Iterable[int]) -> None:
        members = [index for index in members if not batch.requests[index].is_over]
        if len(members) < 2 or not self.merges:
            for index in members:
                batch.outcomes[index] = self._run_alone(batch, index)
            return
        merged = self._merge(batch.inputs(members))
        suspects = [members[index] for index in sorted(self._ids.suspects(merged))]
        if suspects and (self._ids_are_known or len(suspects) < len(members)):
            for index in suspects:
                batch.outcomes[index] = _POSTPONED
            self._run_together(batch, [index for index in members if index not in set(suspects)])
            return
        if self._run_merged(batch, members, merged) and suspects:
            self._ids.learn(merged.inputs)

    def _run_suspects(self, batch: _Batch, members: list[int]) -> None:
        """Requests that may fail: at once where it is not known, for most do not."""
        if self._ids_are_known:
            for index in members:
                batch.outcomes[index] = self._run_alone(batch, index)
        else:
            self._run_all(batch, members)

    def _run_all(self, batch: _Batch, members: Iterable[int]) -> None:
        """Together, whatever their ids are; in the end each alone."""
        members = [index for index in members if not batch.requests[index].is_over]
        if len(members) > 1 and self.merges:
            merged = self._merge(batch.inputs(members))
            if self._run_merged(batch, members, merged):
                self._ids.learn(merged.inputs)
            return
        for index in members:
            batch.outcomes[index] = self._run_alone(batch, index)
            if not isinstance(batch.outcomes[index], Exception):
                self._ids.learn(batch.requests[index].inputs)

    def _run_merged(self, batch: _Batch, members: list[int], merged: Merged) -> bool:
        """Whether all of `members` are answered by one run."""
        try:
            parts = split(batch.call(merged.inputs), merged)
        except Exception as error:  # whatever a model raises: it is one request's fault, or each one's
            self._run_apart(batch, members, error)
            return False
        if parts is None:
            self._give_up("a size of its outputs is not that of its inputs")
            self._run_all(batch, members)
            return False
        for index, outputs in zip(members, parts, strict=True):
            batch.outcomes[index] = outputs
        return True

    def _run_apart(self, batch: _Batch, members: list[int], error: Exception) -> None:
        """In halves, after all of them together failed."""
        if isinstance(error, StatusError) and error.code in _NO_ONES_FAULT:
            for index in members:
                batch.outcomes[index] = error
            return
        half = len(members) // 2
        self._run_all(batch, members[:half])
        self._run_all(batch, members[half:])

    def _give_up(self, why: str) -> None:
        if self.merges:
            logger.warning("signature %s: requests are not put together: %s", self._signature.name, why)
        self.merges = False

    # ---- one request

    def _run_alone(self, batch: _Batch, index: int) -> Outcome:
        request, parameters = batch.requests[index], self._parameters
        try:
            if parameters.enable_large_batch_splitting and (request.rows or 0) > parameters.run_rows:
                return self._run_parts(batch, request.inputs)
            return self._run_filled_up(batch, request.inputs, request.rows)
        except Exception as error:  # whatever a model raises is this request's
            return error

    def _run_parts(self, batch: _Batch, inputs: Sequence[Array]) -> list[Array]:
        """Outputs of a request that takes more than one run."""
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
        """Outputs, where runs may have certain sizes alone by way of one of these; `rows` is None where inputs differ in it."""
        if self.merges and rows and self._parameters.allowed_batch_sizes:
            merged = self._merge([inputs])
            parts = split(batch.call(merged.inputs), merged)
            if parts is not None:
                return parts[0]
            self._give_up("a size of its outputs is not that of its inputs")
        return batch.call(inputs)

    def _merge(self, requests: Sequence[Sequence[Array]]) -> Merged:
        widen = self._parameters.pad_variable_length_inputs
        return merge(requests, self._merging.padding, widen, self._parameters.allowed_batch_sizes)
