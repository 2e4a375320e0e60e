"""Until when a client waits for its answer, where it says so; it follows a request from its port to its run."""

import contextvars
import time
from typing import Final

__all__ = ["remaining_seconds", "wait_until"]

_END: Final[contextvars.ContextVar[float | None]] = contextvars.ContextVar("deadline", default=None)


def wait_until(end: float | None) -> None:
    """What this task, or this thread, does from here on is of use until `end`, by `time.monotonic`; None is for ever."""
    _END.set(end)


def remaining_seconds() -> float | None:
    """How long that is from now; negative where it is past."""
    end = _END.get()
    return None if end is None else end - time.monotonic()
