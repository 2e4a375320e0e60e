"""How a shard's failure travels from the process that streamed it to the one that waits for it."""

import dataclasses
import errno

from tpuembed import errors
from tpuembed.errors import TpuEmbedError, WorkerError

__all__ = ["Failure"]

_MAY_PASS = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
    }
)
"""Errors of disks far away, and of the ways there."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """What was raised, as JSON values.

    Attributes:
        type: name of the TpuEmbedError; empty for anything else, which is a defect.
        message: its text.
        may_pass: whether another try may succeed.
    """

    type: str
    message: str
    may_pass: bool

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Of what a task raised."""
        if isinstance(error, TpuEmbedError):
            return cls(type(error).__name__, str(error), _may_pass(error))
        return cls("", f"{type(error).__name__}: {error}", False)

    def error(self, task: object) -> TpuEmbedError:
        """The same error again, of `task`."""
        kind = getattr(errors, self.type, None) if self.type in errors.__all__ else None
        if kind is None:
            return WorkerError(
                f"{task}: {self.message}; this is a defect of the reader or of tpuembed, please report it"
            )
        error: TpuEmbedError = kind.__new__(kind, self.message)  # without __init__: some build their message from parts
        error.args = (self.message,)  # which OSError's __new__ leaves to __init__
        return error


def _may_pass(error: BaseException | None) -> bool:
    """Whether something of the system is behind `error` that may go right the next time."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError) or getattr(error, "errno", None) in _MAY_PASS:
            return True
        error = error.__context__
    return False
