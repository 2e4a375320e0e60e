"""The deadline of a batch: a context variable that the batch's runner sets and the model's session reads."""

import contextvars
import time
from typing import Final

__all__ = ["remaining_seconds", "wait_until"]

_END: Final[contextvars.ContextVar[float | None]] = contextvars.ContextVar("deadline", default=None)


def wait_until(end: float | None) -> None:
    """Set the deadline of this task or thread to `end`, by `time.monotonic`. None is no deadline."""
    _END.set(end)


def remaining_seconds() -> float | None:
    """Return the seconds until the deadline, or None if there is none. Negative after the deadline."""
    end = _END.get()
    return None if end is None else end - time.monotonic()
