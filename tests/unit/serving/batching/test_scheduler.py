"""Runs are bounded in number and time, and what waits for the same shares one."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.pipeline import Executor, Outcome
from tpuembed_serving.core.servable import Array, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.settings import BatchingSettings

X = [np.array([1, 2])]


async def run(
    executor: Executor, servable: Servable, signature: Signature, inputs: Sequence[Array], **options: Any
) -> list[Array]:
    """Return or raise the outcome of a run. It is given up if this task is cancelled."""
    found: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def settle(outcome: Outcome) -> None:
        if not found.done():
            found.set_result(outcome)

    submitted = executor.submit(servable, signature, inputs, settle, **options)
    try:
        outcome = await found
    except asyncio.CancelledError:
        executor.give_up(submitted)
        raise
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_a_full_queue_is_unavailable_and_empties_again() -> None:
    release = threading.Event()
    servable = DoublingServable(lambda: assert_(release.wait(10)))
    signature = servable.signatures["serving_default"]
    executor = ModelExecutor(threads=1, max_queued=2, timeout_seconds=10)

    async def scenario() -> None:
        runs = [asyncio.create_task(run(executor, servable, signature, X)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(StatusError) as caught:
            await run(executor, servable, signature, X)
        assert caught.value.code is Code.UNAVAILABLE
        start = "The batch scheduling queue to which this task was submitted is full"
        assert caught.value.message.startswith(start)
        release.set()
        assert len(await asyncio.gather(*runs)) == 3
        await asyncio.sleep(0.05)
        await run(executor, servable, signature, X)

    asyncio.run(scenario())
    executor.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_waiting_run_that_is_over_keeps_no_inputs(late: bool) -> None:
    """Otherwise clients that leave while all threads are busy fill the memory beyond its limit."""
    entered, release = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert release.wait(20)

    servable = DoublingServable(wait)
    signature = servable.signatures["serving_default"]
    executor = ModelExecutor(threads=1, max_queued=2, timeout_seconds=20)

    async def scenario() -> None:
        first = asyncio.create_task(run(executor, servable, signature, X))
        await asyncio.to_thread(entered.wait, 20)
        array, outcomes = np.zeros(10), list[Any]()
        inputs, seconds = weakref.ref(array), 0.05 if late else 10.0
        waiting = executor.submit(servable, signature, [array], outcomes.append, timeout_seconds=seconds)
        del array
        await asyncio.sleep(0.2)
        if not late:
            executor.give_up(waiting)
        assert len(outcomes) == late
        assert inputs() is None
        release.set()
        await first
        await run(executor, servable, signature, X)
        assert executor.waiting == 0

    try:
        asyncio.run(scenario())
    finally:
        release.set()
    executor.close()


def test_a_late_run_is_a_deadline_and_still_holds_its_place() -> None:
    release = threading.Event()
    servable = DoublingServable(lambda: assert_(release.wait(10)))
    signature = servable.signatures["serving_default"]
    executor = ModelExecutor(threads=1, max_queued=1, timeout_seconds=0.05)

    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(StatusError, match=r"^Timed out waiting for notification$") as caught:
                await run(executor, servable, signature, X)
            assert caught.value.code is Code.DEADLINE_EXCEEDED
        first = asyncio.create_task(run(executor, servable, signature, X))
        await asyncio.sleep(0)
        with pytest.raises(StatusError) as caught:
            await run(executor, servable, signature, X)
        assert caught.value.code is Code.UNAVAILABLE, "the thread is still busy with the first run of all"
        with pytest.raises(StatusError):
            await first
        release.set()

    asyncio.run(scenario())
    executor.close()


class Gated(DoublingServable):
    """Doubles; its runs wait for `gate`, and are remembered."""

    def __init__(self, merging: Merging | None = None) -> None:
        super().__init__(self._wait)
        self.gate, self.started = threading.Event(), threading.Semaphore(0)
        self.runs: list[list[Any]] = []
        self._merging = merging or Merging(is_proven=True)

    def _wait(self) -> None:
        self.started.release()
        assert self.gate.wait(10)

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        self.runs.append(inputs[0].tolist())
        return super().run(signature, inputs)

    def merging(self, signature: Signature) -> Merging | None:
        return self._merging if signature.name == "serving_default" else None


class Scene:
    """An executor, and requests to one servable."""

    def __init__(self, servable: Gated, **options: Any) -> None:
        self.servable, self.signature = servable, servable.signatures["serving_default"]
        self.executor = ModelExecutor(**{"threads": 1, "max_queued": 100, "timeout_seconds": 10, **options})

    def ask(self, *values: Any, **options: Any) -> "asyncio.Task[list[Array]]":
        inputs = [np.array(values[0] if values and isinstance(values[0], list) else values, np.int64)]
        return asyncio.ensure_future(run(self.executor, self.servable, self.signature, inputs, **options))

    async def until_running(self) -> None:
        """One more run has begun."""
        assert await asyncio.to_thread(self.servable.started.acquire, timeout=10)

    def play(self, scenario: Callable[[], Awaitable[None]], run: Callable[[Any], None] = asyncio.run) -> None:
        run(scenario())
        self.executor.close()


def scene(parameters: BatchingParameters | None = None, merging: Merging | None = None, **options: Any) -> Scene:
    settings = BatchingSettings(enabled=True, parameters=parameters)
    return Scene(Gated(merging), batching=settings, **options)


async def values(*tasks: "asyncio.Task[list[Array]]") -> list[Any]:
    return [found[0].tolist() for found in await asyncio.gather(*tasks)]


def test_what_waits_shares_the_next_run() -> None:
    here = scene()

    async def scenario() -> None:
        first = here.ask(1)
        await here.until_running()
        others = [here.ask(number, number + 1) for number in range(2, 5)]
        await asyncio.sleep(0)
        here.servable.gate.set()
        assert await values(first, *others) == [[2], [4, 6], [6, 8], [8, 10]]
        assert here.servable.runs == [[1], [2, 3, 3, 4, 4, 5]]

    here.play(scenario)


def test_requests_that_come_together_share_the_first_run() -> None:
    here = scene()
    here.servable.gate.set()

    async def scenario() -> None:
        assert await values(here.ask(1), here.ask(2), here.ask(3)) == [[2], [4], [6]]
        assert here.servable.runs == [[1, 2, 3]]

    here.play(scenario)


def test_requests_run_alone_while_the_proof_is_not_done() -> None:
    """`merging` would block the event loop until it is."""
    here = scene()
    here.servable.gate.set()
    proven = threading.Event()
    merging = here.servable.merging

    def after_the_proof(signature: Signature) -> Merging | None:
        assert proven.is_set(), "the event loop waits for a proof"
        return merging(signature)

    here.servable.merging = after_the_proof  # type: ignore[method-assign]
    here.servable.knows_merging = lambda _: proven.is_set()  # type: ignore[method-assign,assignment]

    async def scenario() -> None:
        assert await values(here.ask(1), here.ask(2)) == [[2], [4]]
        assert here.servable.runs == [[1], [2]]
        proven.set()
        assert await values(here.ask(3), here.ask(4)) == [[6], [8]]
        assert here.servable.runs == [[1], [2], [3, 4]]

    here.play(scenario)


def test_a_run_has_at_most_so_many_rows_and_larger_requests_are_alone() -> None:
    here = Scene(Gated(), batching=BatchingSettings(max_rows=4))

    async def scenario() -> None:
        first = here.ask(0)
        await here.until_running()
        others = [here.ask(*range(count)) for count in (2, 2, 3, 6, 1)]
        await asyncio.sleep(0)
        here.servable.gate.set()
        await values(first, *others)
        assert here.servable.runs == [[0], [0, 1, 0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0]]

    here.play(scenario)


def test_only_what_has_the_same_shapes_shares_a_run() -> None:
    here = scene()

    async def scenario() -> None:
        first = here.ask(0)
        await here.until_running()
        others = [here.ask([[1, 2]]), here.ask([[3]]), here.ask([[4, 5]]), here.ask(6)]
        scalar = asyncio.ensure_future(run(here.executor, here.servable, here.signature, [np.array(8)]))
        others += [scalar, here.ask(), here.ask(7)]
        await asyncio.sleep(0)
        here.servable.gate.set()
        assert await values(*others) == [[[2, 4]], [[6]], [[8, 10]], [12], 16, [], [14]]
        await first
        assert here.servable.runs == [[0], [[1, 2], [4, 5]], [[3]], [6, 7], 8, []]

    here.play(scenario)


def test_lists_of_other_lengths_share_a_run_where_they_may_be_padded() -> None:
    here = scene(merging=Merging(is_proven=True, padding=(-1,)))

    async def scenario() -> None:
        first = here.ask([[0]])
        await here.until_running()
        others = [here.ask([[1, 2]]), here.ask([[3]])]
        await asyncio.sleep(0)
        here.servable.gate.set()
        await values(first, *others)
        assert here.servable.runs == [[[0]], [[1, 2], [3, -1]]]

    here.play(scenario)


@pytest.mark.parametrize(
    ("enabled", "is_proven", "runs"), [(None, True, 2), (None, False, 4), (True, False, 2), (False, True, 4)]
)
def test_which_models_are_merged(enabled: bool | None, is_proven: bool, runs: int) -> None:
    here = Scene(Gated(Merging(is_proven=is_proven)), batching=BatchingSettings(enabled=enabled))

    async def scenario() -> None:
        first = here.ask(0)
        await here.until_running()
        others = [here.ask(number) for number in range(3)]
        await asyncio.sleep(0)
        here.servable.gate.set()
        assert await values(first, *others) == [[0], [0], [2], [4]]
        assert len(here.servable.runs) == runs

    here.play(scenario)


def test_inputs_of_which_nothing_is_proven_run_alone() -> None:
    """The proof is of vectors; TensorFlow takes matrices all the same."""
    here = Scene(Gated(Merging(is_proven=True, shapes=((),))))

    async def scenario() -> None:
        first = here.ask(0)
        await here.until_running()
        others = [here.ask([[1]]), here.ask(2), here.ask([[3]]), here.ask(4)]
        await asyncio.sleep(0)
        here.servable.gate.set()
        assert await values(first, *others) == [[0], [[2]], [4], [[6]], [8]]
        assert sorted(map(str, here.servable.runs)) == ["[0]", "[2, 4]", "[[1]]", "[[3]]"]

    here.play(scenario)


def test_who_cannot_be_told_fails_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    here = scene()
    here.servable.gate.set()

    async def scenario() -> None:
        def broken(_: object) -> None:
            raise RuntimeError("gone")

        told = asyncio.get_running_loop().create_future()
        for number, on_outcome in ((1, broken), (2, told.set_result)):
            here.executor.submit(here.servable, here.signature, [np.array([number])], on_outcome)
        (found,) = await told
        assert found.tolist() == [4]
        assert here.servable.runs == [[1, 2]]

    here.play(scenario)
    assert "gone" in caplog.text


def test_whose_time_is_over_while_it_waits_is_never_run() -> None:
    here = scene()

    async def scenario() -> None:
        first = here.ask(1)
        await here.until_running()
        late, patient = here.ask(2, timeout_seconds=0.01), here.ask(3)
        with pytest.raises(StatusError) as caught:
            await late
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        here.servable.gate.set()
        assert await values(first, patient) == [[2], [6]]
        assert here.servable.runs == [[1], [3]]

    here.play(scenario)


def test_who_goes_away_while_it_waits_is_never_run_and_makes_room() -> None:
    here = scene(max_queued=1)

    async def scenario() -> None:
        first = here.ask(1)
        await here.until_running()
        gone = here.ask(2)
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        last = here.ask(3)
        await asyncio.sleep(0)
        here.servable.gate.set()
        assert await values(first, last) == [[2], [6]]
        assert here.servable.runs == [[1], [3]]

    here.play(scenario)


def test_a_request_over_the_operators_size_is_refused_in_theirs_words() -> None:
    here = scene(BatchingParameters(max_batch_size=4))
    here.servable.gate.set()

    async def scenario() -> None:
        with pytest.raises(StatusError, match=r"^Task size 5 is larger than maximum input batch size 4$") as caught:
            await here.ask(1, 2, 3, 4, 5)
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert await values(here.ask(1, 2, 3, 4)) == [[2, 4, 6, 8]]

    here.play(scenario)


def test_a_full_queue_of_batches_is_unavailable_in_theirs_words() -> None:
    here = scene(BatchingParameters(max_batch_size=2, max_enqueued_batches=2))

    async def scenario() -> None:
        first = here.ask(1)
        await here.until_running()
        others = [here.ask(2, 3), here.ask(4, 5)]
        await asyncio.sleep(0)
        text = r"is full; currently 2 batches enqueued and max_enqueued_batches is 2$"
        with pytest.raises(StatusError, match=text) as caught:
            await here.ask(6)
        assert caught.value.code is Code.UNAVAILABLE
        here.servable.gate.set()
        assert await values(first, *others) == [[2], [4, 6], [8, 10]]
        assert await values(here.ask(6)) == [[12]]

    here.play(scenario)


def test_a_timeout_of_the_operators_is_waited_for_and_a_full_run_is_not() -> None:
    here = scene(BatchingParameters(max_batch_size=2, batch_timeout_micros=3_600_000_000), timeout_seconds=9000)
    here.servable.gate.set()

    async def scenario() -> None:
        one = here.ask(1)
        await asyncio.sleep(0.02)
        assert here.servable.runs == []
        assert await values(one, here.ask(2)) == [[2], [4]]
        assert here.servable.runs == [[1, 2]]

    here.play(scenario)
    here = scene(BatchingParameters(batch_timeout_micros=20_000))
    here.servable.gate.set()

    async def alone() -> None:
        assert await values(here.ask(1)) == [[2]]

    here.play(alone)


def test_a_version_that_is_gone_leaves_nothing_behind() -> None:
    executor = ModelExecutor(threads=1, max_queued=1, timeout_seconds=10, batching=BatchingSettings(enabled=True))

    def use() -> "weakref.ref[Gated]":
        servable = Gated()
        servable.gate.set()
        asyncio.run(run(executor, servable, servable.signatures["serving_default"], X))
        assert executor._queues
        return weakref.ref(servable)

    gone = use()
    executor._pool.shutdown(wait=True)
    gc.collect()
    assert gone() is None
    assert not executor._queues


def assert_(value: bool) -> None:
    assert value
