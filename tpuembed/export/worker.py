"""The process that streams shards: `python -m tpuembed.export.worker`, told what to do over pipes.

It reads JSON lines on stdin: first the job (`{"source": ..., "folder": ..., "parent": pid, "delay_seconds": ...}`), then
tasks; it ends when stdin does. It writes JSON lines on stdout: `{"progress": bytes of the current shard}` now and then, and
for each task `{"result": ...}` or `{"error": {"type": ..., "message": ..., "may_pass": ...}}`, of which the last ends it. It
never imports TensorFlow, and it never outlives its parent.
"""

import dataclasses
import errno
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from tpuembed.errors import TpuEmbedError
from tpuembed.export.plan import ShardTask
from tpuembed.export.stream import Source, run_shard

__all__ = ["main"]

_REPORT_SECONDS = 0.1
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


def main() -> int:
    """Stream tasks until stdin ends; 0 if all of them succeeded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    replies = _take_stdout()
    job = json.loads(sys.stdin.readline() or "null")
    if job is None:
        return 0
    time.sleep(job["delay_seconds"])
    worker = _Worker(Source(**job["source"]), Path(job["folder"]), job["parent"], replies)
    return 0 if all(worker.run(ShardTask(**json.loads(line))) for line in sys.stdin) else 1


def _take_stdout() -> IO[str]:
    """Stdout for replies alone: whatever else prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return replies


class _Worker:
    def __init__(self, source: Source, folder: Path, parent: int, replies: IO[str]) -> None:
        self._source, self._folder, self._parent, self._replies = source, folder, parent, replies
        self._reported = 0.0

    def run(self, task: ShardTask) -> bool:
        """Stream `task` and say how it went."""
        try:
            result = run_shard(task, self._source, self._folder, self._on_chunk)
        except TpuEmbedError as error:
            return self._fail(type(error).__name__, str(error), may_pass=_may_pass(error))
        except Exception as error:
            traceback.print_exc()
            return self._fail("", f"{type(error).__name__}: {error}", may_pass=False)
        self._reply({"result": dataclasses.asdict(result)})
        return True

    def _fail(self, kind: str, message: str, *, may_pass: bool) -> bool:
        self._reply({"error": {"type": kind, "message": message, "may_pass": may_pass}})
        return False

    def _on_chunk(self, written: int) -> None:
        if os.getppid() != self._parent:
            os._exit(1)  # orphaned: nobody reads what we write
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self._reply({"progress": written})

    def _reply(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._replies, flush=True)
        except BrokenPipeError:
            os._exit(1)


def _may_pass(error: BaseException | None) -> bool:
    """Whether something of the system is behind `error` that may go right the next time."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError) or getattr(error, "errno", None) in _MAY_PASS:
            return True
        error = error.__context__
    return False


if __name__ == "__main__":
    sys.exit(main())
