"""Waits for runs of executors."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tpuembed_serving.core.pipeline import Executor, Outcome
from tpuembed_serving.core.servable import Array, Servable, Signature

__all__ = ["run"]


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
