"""Carries a shard's failure from the process that streamed it to the process that waits for it."""

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
"""Errors of remote disks and of networks, which may be temporary."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error as JSON values.

    Attributes:
        type: name of the TpuEmbedError; empty for any other exception, which is a defect.
        message: its text.
        may_pass: whether another try may succeed.
    """

    type: str
    message: str
    may_pass: bool

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure for the error of a task."""
        if isinstance(error, TpuEmbedError):
            return cls(type(error).__name__, str(error), _may_pass(error))
        return cls("", f"{type(error).__name__}: {error}", False)

    def error(self, task: object) -> TpuEmbedError:
        """Return the original error, of `task`."""
        kind = getattr(errors, self.type, None) if self.type in errors.__all__ else None
        if kind is None:
            return WorkerError(
                f"{task}: {self.message}. This is a defect of the reader or of tpuembed. Please report it."
            )
        error: TpuEmbedError = kind.__new__(
            kind, self.message
        )  # without __init__: some classes build their message from parts
        error.args = (self.message,)  # OSError's __new__ does not set args
        return error


def _may_pass(error: BaseException | None) -> bool:
    """Returns True if a system error that may be temporary is behind `error`."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError) or getattr(error, "errno", None) in _MAY_PASS:
            return True
        error = error.__context__
    return False
