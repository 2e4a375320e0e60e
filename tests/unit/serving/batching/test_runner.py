"""Requests that share a run get what each would get alone, errors included."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable
from tpuembed_serving.batching.concat import count_rows
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.batching.runner import BatchRunner, Outcome
from tpuembed_serving.core.servable import Array, Merging, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument

PROVEN = Merging(is_proven=True)


@dataclasses.dataclass
class Asked:
    """A request for rows of x."""

    inputs: Sequence[Array]
    is_over: bool = False
    deadline: float = float("inf")

    @property
    def rows(self) -> int | None:
        return count_rows(self.inputs)


class Recorder(DoublingServable):
    """Computes y of x, remembers the x of every run, and fails for those above 99, naming the least and the greatest."""

    def __init__(self, compute: Callable[[Array], Array] = lambda x: x * 2) -> None:
        super().__init__()
        self.runs: list[list[Any]] = []
        self.compute = compute
        self.error: Exception | None = None

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        (x,) = inputs
        self.runs.append(x.tolist())
        if self.error:
            raise self.error
        if x.size and x.max() > 99:
            raise invalid_argument(f"ids go from {x.min()} to {x.max()}")
        return [self.compute(x)]


def outcomes(servable: Recorder, runner: BatchRunner, *values: Any) -> list[Any]:
    """Lists, or the texts of errors."""
    requests = [value if isinstance(value, Asked) else Asked([np.array(value)]) for value in values]
    return [_plain(outcome) for outcome in runner.run(servable, requests)]


def _plain(outcome: Outcome) -> Any:
    return str(outcome) if isinstance(outcome, Exception) else outcome and outcome[0].tolist()


def make_runner(merging: Merging | None = PROVEN, ids: Any = None, **parameters: Any) -> BatchRunner:
    signature = dataclasses.replace(DoublingServable().signatures["serving_default"], ids=ids)
    return BatchRunner(signature, merging, BatchingParameters(**parameters))


class UpTo99:
    """The ids that Recorder takes, as KnownIds of a manifest."""

    def may_be_outside(self, inputs: Sequence[Array]) -> bool:
        return bool(inputs[0].max() > 99)

    def error(self, inputs: Sequence[Array]) -> StatusError | None:
        return invalid_argument(f"{inputs[0].max()} is outside") if self.may_be_outside(inputs) else None


def test_requests_share_a_run_in_order() -> None:
    servable = Recorder()
    assert outcomes(servable, make_runner(), [1, 2], [3], [4, 5, 6]) == [[2, 4], [6], [8, 10, 12]]
    assert servable.runs == [[1, 2, 3, 4, 5, 6]]


def test_one_request_is_run_as_it_is() -> None:
    servable = Recorder()
    assert outcomes(servable, make_runner(), 5) == [10]
    assert outcomes(servable, make_runner(), Asked([np.zeros(0, np.int64)])) == [[]]
    assert servable.runs == [5, []]


def test_a_signature_that_is_not_merged_is_run_request_by_request() -> None:
    servable = Recorder()
    assert outcomes(servable, make_runner(None), [1], [2]) == [[2], [4]]
    assert servable.runs == [[1], [2]]


@pytest.mark.parametrize("merging", [PROVEN, None])
def test_an_id_that_is_known_to_be_bad_is_answered_without_a_run(merging: Merging | None) -> None:
    servable, runner = Recorder(), make_runner(merging, UpTo99())
    assert outcomes(servable, runner, [1], [7, 100, 8], [2], [300]) == [[2], "100 is outside", [4], "300 is outside"]
    assert outcomes(servable, runner, [100]) == ["100 is outside"]
    assert outcomes(servable, runner, [100], [101]) == ["100 is outside", "101 is outside"]
    assert servable.runs == ([[1, 2]] if merging else [[1], [2]])


def test_a_bad_id_that_nobody_knows_fails_nobody_else() -> None:
    servable = Recorder()
    requests = [[number] for number in range(16)]
    requests[5] = [100]
    found = outcomes(servable, make_runner(), *requests)
    assert found == [f"ids go from 100 to 100" if x == 100 else [2 * x] for (x,) in requests]  # noqa: F541
    assert len(servable.runs) <= 9, "in halves, not one after the other"


def test_what_is_no_fault_of_a_request_is_not_tried_again() -> None:
    servable = Recorder()
    servable.error = StatusError(Code.DEADLINE_EXCEEDED, "late")
    assert outcomes(servable, make_runner(), [1], [2], [3]) == ["late"] * 3
    assert servable.runs == [[1, 2, 3]]


def test_what_does_not_fit_into_memory_together_may_alone() -> None:
    servable = Recorder()
    run = servable.run

    def run_small(signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        if len(inputs[0]) > 1:
            raise StatusError(Code.RESOURCE_EXHAUSTED, "OOM")
        return run(signature, inputs)

    servable.run = run_small  # type: ignore[method-assign]
    assert outcomes(servable, make_runner(), [1], [2], [3]) == [[2], [4], [6]]


def test_an_exception_of_any_kind_is_each_requests_own() -> None:
    servable = Recorder()
    servable.error = ZeroDivisionError("inside")
    assert outcomes(servable, make_runner(), [1], [2]) == ["inside"] * 2


def test_nobody_waits_for_it_any_more() -> None:
    servable = Recorder()
    late = Asked([np.array([9])], is_over=True)
    assert outcomes(servable, make_runner(), [1], late, [2]) == [[2], None, [4]]
    assert servable.runs == [[1, 2]]


@pytest.mark.parametrize("compute", [lambda x: x.sum(), lambda x: x[:1], lambda x: np.repeat(x, 2)])
def test_outputs_of_other_rows_are_learnt_once(
    compute: Callable[[Array], Array], caplog: pytest.LogCaptureFixture
) -> None:
    servable, runner = Recorder(compute), make_runner()
    alone = [compute(np.array(x)).tolist() for x in ([1, 2], [3, 4])]
    for _ in range(2):
        assert outcomes(servable, runner, [1, 2], [3, 4]) == alone
    assert servable.runs == [[1, 2, 3, 4], [1, 2], [3, 4], [1, 2], [3, 4]]
    assert not runner.merges
    assert len(caplog.records) == 1


def test_allowed_sizes_fill_every_run_up() -> None:
    servable = Recorder()
    runner = make_runner(max_batch_size=4, allowed_batch_sizes=(2, 4))
    assert outcomes(servable, runner, [1, 2], [3]) == [[2, 4], [6]]
    assert outcomes(servable, runner, [5]) == [[10]]
    assert servable.runs == [[1, 2, 3, 3], [5, 5]]


def test_a_large_request_takes_several_runs() -> None:
    servable = Recorder()
    runner = make_runner(max_batch_size=8, enable_large_batch_splitting=True, max_execution_batch_size=3)
    assert outcomes(servable, runner, list(range(8))) == [[2 * x for x in range(8)]]
    assert servable.runs == [[0, 1, 2], [3, 4, 5], [6, 7]]
