"""Writes one line of JSON for every request to stderr or a file. A thread writes, so that the event loop never blocks."""

import contextlib
import logging
import queue
import sys
import time
from logging.handlers import QueueListener, WatchedFileHandler
from typing import Any, Final

from tpuembed.errors import ServingError
from tpuembed_serving.core.request_record import GRPC, STAGES, RequestRecord, stage_seconds
from tpuembed_serving.telemetry.server_log import json_line, open_stderr, utc_text

__all__ = ["STDERR", "AccessLog", "check_writable", "entry"]

logger = logging.getLogger(__name__)

STDERR: Final = "-"
"""The target that means stderr."""
_MOST_WAITING: Final = 20_000
"""More records are dropped, so that a stalled disk does not stop the server."""


def entry(record: RequestRecord, wall_offset: float) -> dict[str, Any]:
    """Return the entry of a request. `wall_offset` is the wall clock minus `time.perf_counter`, in seconds."""
    return {
        "time": utc_text(record.started + wall_offset),
        "request_id": record.request_id,
        "entrypoint": record.entrypoint,
        "method": record.method,
        "path": record.path.decode("utf-8", "replace"),
        "model": record.model,
        "version": record.version,
        "status": record.code.name if record.entrypoint == GRPC else record.status,
        "rows": record.rows,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "ms": _ms(record.ended - record.started),
        "stages_ms": {name: _ms(seconds) for name, seconds in zip(STAGES, stage_seconds(record), strict=True)},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def check_writable(target: str) -> None:
    """Raise ServingError if the file cannot be written."""
    _writer(target).close()


def _writer(target: str) -> "_Writer":
    try:
        return _Writer(open_stderr()) if target == STDERR else _FileWriter(target, encoding="ascii")
    except OSError as error:
        raise ServingError(f"access log {target}: cannot be written: {error.strerror}. Choose another file") from None


class AccessLog:
    """An observer (see `request_record`) that appends to a file, or writes to stderr.

    If log rotation renames or removes the file, it is created again. Workers share one file: each write is a whole line.
    """

    wants_request_id = True

    def __init__(self, target: str) -> None:
        """Open the file. Raises ServingError if it cannot be written."""
        self._writer = _writer(target)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = QueueListener(self._queue, self._writer)
        self._listener.start()

    def finish(self, record: RequestRecord) -> None:
        """Queue the entry of a request, or drop it if too many wait. Never blocks. One thread calls it."""
        record.ensure_request_id()
        if self._queue.qsize() >= _MOST_WAITING:
            self._writer.dropped += 1
        else:
            self._queue.put(logging.makeLogRecord({"request": record}))

    def close(self) -> None:
        """Write the queued entries and close the file."""
        self._listener.stop()
        with contextlib.suppress(OSError):
            self._writer.close()


class _Writer(logging.StreamHandler[Any]):
    """Writes entries to stderr. Logs the first of several failures in a row.

    Attributes:
        dropped: how many records were dropped since the start; they get an entry.
    """

    dropped = 0
    _reported = 0
    _failed = False
    _fails = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and a line with the number of dropped records before it."""
        lines = [json_line(entry(record.__dict__["request"], time.time() - time.perf_counter()))]
        dropped = self.dropped
        if dropped > self._reported:
            lines.append(json_line({"time": utc_text(time.time()), "dropped": dropped - self._reported}))
            self._reported = dropped
        return "\n".join(lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self._failed, self._fails = self._fails, False
        try:
            super().emit(record)
        except OSError:  # the file cannot be created again after log rotation
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's signature
        """Log the error that is being handled."""
        self._fails = True
        if not self._failed:
            logger.error("the access log cannot be written: %s", sys.exc_info()[1])


class _FileWriter(_Writer, WatchedFileHandler):
    """Appends entries to a file."""
