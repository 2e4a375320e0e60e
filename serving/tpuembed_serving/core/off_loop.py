"""Runs long work of a request in a thread, so that it does not block other requests."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["MAX_INLINE_BYTES", "run_sized"]

MAX_INLINE_BYTES: Final = 256 * 2**10
"""More bytes are decoded in a thread."""
_Result = TypeVar("_Result")


async def run_sized(size: int, function: Callable[..., _Result], *args: Any, most: int = MAX_INLINE_BYTES) -> _Result:
    """Return `function(*args)`. Calls it in a thread if `size` is more than `most` bytes."""
    return function(*args) if size <= most else await asyncio.to_thread(function, *args)
