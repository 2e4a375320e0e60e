"""Work of requests that would keep other requests waiting."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["MAX_INLINE_BYTES", "run_sized"]

MAX_INLINE_BYTES: Final = 256 * 2**10
"""What is decoded of more bytes is decoded off the event loop."""
_Result = TypeVar("_Result")


async def run_sized(size: int, function: Callable[..., _Result], *args: Any, most: int = MAX_INLINE_BYTES) -> _Result:
    """What `function` returns for `args`: called here, or in a thread where it works on more than `most` bytes."""
    return function(*args) if size <= most else await asyncio.to_thread(function, *args)
