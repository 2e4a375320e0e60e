"""The worker process that streams shards: `python -m tpuembed.export.stream.worker`, controlled over pipes.

It reads JSON lines on stdin: first the job (`{"source": ..., "parent": pid, "delay_seconds": ...}`), then batches
(`{"shards": [...], "target": {...}}`). It ends when stdin ends. It writes JSON lines on stdout: regularly `{"progress":
bytes of the current batch}`, and for each batch `{"results": [...]}` or `{"error": {"type": ..., "message": ...,
"may_pass": ...}}`. After an error it ends. It never imports TensorFlow, and never outlives its parent.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import IO, Any

from tpuembed.errors import TpuEmbedError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.batch import Failure, run_batch
from tpuembed.export.stream.shard import Source, Target, open_once

__all__ = ["main"]

_REPORT_SECONDS = 0.1


def main() -> int:
    """Stream batches until stdin ends. Return 0 if all of them succeeded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the parent decides
    replies = _take_stdout()
    job = json.loads(sys.stdin.readline() or "null")
    if job is None:
        return 0
    time.sleep(job["delay_seconds"])
    worker = _Worker(Source(**job["source"]), job["parent"], replies)
    worker.prepare()
    return 0 if all(worker.run(json.loads(line)) for line in sys.stdin) else 1


def _take_stdout() -> IO[str]:
    """Return stdout for replies only. All other output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return replies


class _Worker:
    def __init__(self, source: Source, parent: int, replies: IO[str]) -> None:
        self._source, self._parent, self._replies = source, parent, replies
        self._reported = 0.0

    def prepare(self) -> None:
        """Open the source while the worker is idle. An error is ignored here, because the first batch reports it."""
        with contextlib.suppress(Exception):
            open_once(self._source)

    def run(self, batch: Mapping[str, Any]) -> bool:
        """Stream `batch` and send a reply. Returns True on success."""
        try:
            shards = [ShardTask(**fields) for fields in batch["shards"]]
            results = run_batch(shards, Target(**batch["target"]), self._source, self._on_chunk)
        except Exception as error:
            if not isinstance(error, TpuEmbedError):
                traceback.print_exc()
            self._reply({"error": dataclasses.asdict(Failure.of(error))})
            return False
        self._reply({"results": [dataclasses.asdict(result) for result in results]})
        return True

    def _on_chunk(self, written: int) -> None:
        if os.getppid() != self._parent:
            os._exit(1)  # the parent has ended: no process reads the replies
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self._reply({"progress": written})

    def _reply(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._replies, flush=True)
        except BrokenPipeError:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
