"""What a worker runs for a batch, and how it reports an error to the process that waits for it."""

import dataclasses
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpuembed import errors
from tpuembed.errors import TpuEmbedError, WorkerError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.shard import ShardResult, Source, Target, flush_data, ignore, run_shard

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint

__all__ = ["Failure", "flush_batch", "run_batch"]

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


def run_batch(
    shards: Sequence[ShardTask],
    target: Target,
    source: Source,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> list[ShardResult]:
    """Write `shards`. Every engine runs this function, in a process that imports no TensorFlow.

    `on_chunk` is called regularly with the bytes written so far. For `checkpoint` and the errors see `run_shard`.
    """
    if target.kind == "part":
        from tpuembed.export.publish.store.parts import run_part  # here, because other workers need no HTTP client

        return run_part(shards, target, source, on_chunk, checkpoint)
    return [run_shard(shard, source, Path(target.place), on_chunk, checkpoint) for shard in shards]


def flush_batch(shards: Sequence[ShardTask], target: Target) -> None:
    """fsync the files of this batch on this machine. Another machine can only flush its own cache."""
    for file in {shard.file for shard in shards} if target.kind == "folder" else ():
        flush_data(Path(target.place, file))


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error of a shard as JSON values, for the process that waits for it.

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
