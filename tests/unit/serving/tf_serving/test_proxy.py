"""Calls of another server that are given up."""

import asyncio
import gc
import warnings
from typing import Any

import numpy as np

from tests.support.serving.doubles import signature
from tpuembed_serving.tf_serving.proxy import RemoteExecutor, RemoteServable

SIGNATURE = signature({"x": "int64"}, {"y": "int64"})


class Calls:
    """Counts calls, and answers none."""

    def __init__(self) -> None:
        self.begun = 0

    async def run(self, *_: Any) -> Any:
        self.begun += 1
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


def test_a_call_that_is_given_up_before_it_begins_leaves_nothing() -> None:
    """Python warned that a coroutine was never awaited."""
    executor, calls = RemoteExecutor("127.0.0.1:1", 10, 1), Calls()
    executor._predictions = calls
    servable = RemoteServable("m", 1, {"f": SIGNATURE}, {})

    async def scenario() -> None:
        for begins in (False, True):
            run = executor.submit(servable, SIGNATURE, [np.array([1])], lambda _: None)
            if begins:
                await asyncio.sleep(0)
            executor.give_up(run)
            await asyncio.wait([run])
        await asyncio.sleep(0)
        assert (calls.begun, executor._pending) == (1, 0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()
    assert not [str(one.message) for one in found if "never awaited" in str(one.message)]
