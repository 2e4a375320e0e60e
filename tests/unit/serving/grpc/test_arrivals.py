"""Calls that arrive one by one start together."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from tpuembed_serving.grpc import arrivals as module
from tpuembed_serving.grpc.arrivals import Arrivals

Scene = Callable[[Arrivals], Awaitable[None]]


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is always busy, and no wait ends early, unless a test says so."""
    monkeypatch.setattr(module, "_BUSY_SHARE", -1.0)
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 60.0)


def play(scene: Scene) -> None:
    async def main() -> None:
        await asyncio.wait_for(scene(Arrivals()), 10)

    uvloop.run(main())


async def arrive(arrivals: Arrivals) -> "asyncio.Task[None]":
    """A call whose headers came before; its task is done once it may start."""
    task = asyncio.create_task(arrivals.enter())
    await asyncio.sleep(0.002)
    return task


def test_a_single_client_never_waits() -> None:
    async def scene(arrivals: Arrivals) -> None:
        for _ in range(5):
            arrivals.announce()
            await arrivals.enter()
            arrivals.leave()

    play(scene)


def test_calls_wait_for_those_whose_headers_have_arrived() -> None:
    async def scene(arrivals: Arrivals) -> None:
        arrivals.announce()
        arrivals.announce()
        first = await arrive(arrivals)
        arrivals.announce()
        second = await arrive(arrivals)
        assert not first.done()
        assert not second.done()
        await arrivals.enter()
        await asyncio.gather(first, second)

    play(scene)


def test_calls_wait_for_as_many_as_were_in_progress_at_once() -> None:
    async def scene(arrivals: Arrivals) -> None:
        for _ in range(3):
            for _ in range(2):
                arrivals.announce()
            first = await arrive(arrivals)
            assert not first.done()
            await arrivals.enter()
            await first
            arrivals.leave()
            arrivals.leave()
        arrivals.announce()  # alone, but two were in progress before
        assert not (await arrive(arrivals)).done()

    play(scene)


def test_calls_that_run_are_not_waited_for() -> None:
    async def scene(arrivals: Arrivals) -> None:
        for _ in range(3):
            arrivals.announce()
        held = [await arrive(arrivals), await arrive(arrivals)]
        await arrivals.enter()
        await asyncio.gather(*held)
        arrivals.leave()  # one of three is answered, and its client sends again
        arrivals.announce()
        await arrivals.enter()

    play(scene)


def test_no_call_waits_while_the_event_loop_has_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUSY_SHARE", 0.5)

    async def scene(arrivals: Arrivals) -> None:
        for _ in range(3):
            await asyncio.sleep(0.02)
            arrivals.announce()
            arrivals.announce()  # its message never arrives
            await arrivals.enter()

    play(scene)


def test_calls_wait_while_the_event_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUSY_SHARE", 0.1)
    work = 0.02

    async def scene(arrivals: Arrivals) -> None:
        arrivals.announce()
        arrivals.announce()
        await arrivals.enter()  # the loop's load is measured from here
        arrivals.leave()
        end = time.thread_time() + work
        while time.thread_time() < end:
            pass
        arrivals.announce()
        arrivals.announce()
        first = asyncio.create_task(arrivals.enter())
        await asyncio.sleep(0)
        assert not first.done()
        await asyncio.wait_for(first, 5)  # the loop has time to spare again

    play(scene)


def test_a_wait_that_ends_before_all_have_come_expects_no_more_than_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 0.001)

    async def scene(arrivals: Arrivals) -> None:
        arrivals.announce()
        arrivals.announce()
        await arrivals.enter()
        arrivals.leave()
        monkeypatch.setattr(module, "_LONGEST_SECONDS", 60.0)
        arrivals.announce()
        await arrivals.enter()

    play(scene)


def test_no_call_waits_longer_than_the_limit_while_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 0.1)

    async def scene(arrivals: Arrivals) -> None:
        for _ in range(1000):
            arrivals.announce()
        first, others = await arrive(arrivals), list[asyncio.Task[None]]()
        while not first.done():
            others.append(await arrive(arrivals))
            assert len(others) < 500
        await asyncio.gather(*others)

    play(scene)


def test_a_call_that_is_refused_ends_the_wait() -> None:
    async def scene(arrivals: Arrivals) -> None:
        arrivals.announce()
        arrivals.announce()
        first = await arrive(arrivals)
        assert not first.done()
        arrivals.withdraw()
        await first

    play(scene)


def test_a_client_that_leaves_while_it_waits_is_not_in_progress() -> None:
    async def scene(arrivals: Arrivals) -> None:
        async def call() -> None:
            try:
                await arrivals.enter()
            finally:
                arrivals.leave()

        for _ in range(2):
            arrivals.announce()
        first = asyncio.create_task(call())
        await asyncio.sleep(0.002)
        first.cancel()
        await asyncio.wait([first])
        second = await arrive(arrivals)
        assert not second.done()
        arrivals.announce()
        await arrivals.enter()
        await second

    play(scene)
