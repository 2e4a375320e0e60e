"""One timer for the deadlines of all requests."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tpuembed_serving.batching.scheduler import RequestTimeouts


@dataclasses.dataclass(frozen=True)
class Request:
    name: str
    deadline: float


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_deadline_that_has_passed_does_not_hinder_the_next_one(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """uvloop returns a handle without a time for a call that is due."""

    async def scenario() -> None:
        loop, failed = asyncio.get_running_loop(), list[Any]()
        requests = set[Any]()

        def fail(request: Any, _: Exception) -> None:
            requests.discard(request)
            failed.append(request.name)

        timeouts = RequestTimeouts(loop, requests, fail)
        for name, seconds in (("past", -1.0), ("soon", 0.05), ("sooner", 0.01)):
            request = Request(name=name, deadline=loop.time() + seconds)
            requests.add(request)
            timeouts.expect(request.deadline)
        while requests:
            await asyncio.sleep(0.01)
        assert failed == ["past", "sooner", "soon"]

    run(asyncio.wait_for(scenario(), 20))
