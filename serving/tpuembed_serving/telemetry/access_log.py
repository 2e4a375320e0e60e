"""Writes one line of JSON for every request to stderr or a file. A thread writes, so that the event loop never blocks."""

import datetime as dt
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from tpuembed.errors import ServingError
from tpuembed_serving.telemetry.record_queue import RecordQueue
from tpuembed_serving.telemetry.request_record import REST, STAGES, RequestRecord, stage_seconds

__all__ = ["STDERR", "AccessLog", "check_writable", "entry"]

logger = logging.getLogger(__name__)

STDERR: Final = "-"
"""The target that means stderr."""

_LINE_ENDS: Final = re.compile(rb"\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")
"""UTF-8 of the C1 controls, one of which ends a line, and of the line and paragraph separators."""


def entry(record: RequestRecord, stages: Sequence[float], wall_offset: float) -> dict[str, Any]:
    """Return the entry of a request.

    Args:
        stages: the seconds of each stage.
        wall_offset: the wall clock minus `time.perf_counter`, in seconds.
    """
    started = dt.datetime.fromtimestamp(record.started + wall_offset, dt.UTC)
    return {
        "time": started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": record.request_id,
        "entrypoint": record.entrypoint,
        "method": record.method,
        "path": record.path.decode("utf-8", "replace"),
        "model": record.model,
        "version": record.version,
        "status": record.status if record.entrypoint == REST else record.code.name,
        "rows": record.rows,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "ms": _ms(record.ended - record.started),
        "stages_ms": {name: _ms(seconds) for name, seconds in zip(STAGES, stages, strict=True)},
    }


def _line(found: dict[str, Any]) -> bytes:
    """Return one line of JSON. Escapes every character that a reader may take for a line end: clients choose names."""
    line = orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    return line if line.isascii() else _LINE_ENDS.sub(lambda end: b"\\u%04x" % ord(end[0].decode()), line)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def check_writable(target: str) -> None:
    """Raise ServingError if the file cannot be written."""
    if target != STDERR:
        _open(Path(target)).close()


def _open(path: Path | None) -> BinaryIO:
    if path is None:
        return sys.stderr.buffer
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ServingError(f"access log {path}: cannot be written: {error.strerror}. Choose another file") from None


class AccessLog:
    """An observer (see `request_record`) that appends to a file, or writes to stderr.

    If log rotation renames or removes the file, it is created again. Workers share one file: each write is whole lines.
    """

    wants_request_id = True

    def __init__(self, target: str) -> None:
        """Open the file. Raises ServingError if it cannot be written."""
        self._path = None if target == STDERR else Path(target)
        self._file = _open(self._path)
        self._failed = False
        self._records = RecordQueue("access-log", self._write)

    def finish(self, record: RequestRecord) -> None:
        """Queue the entry of a request."""
        record.ensure_request_id()
        self._records.put(record)

    def close(self) -> None:
        """Write the queued entries and close the file."""
        self._records.close()
        if self._path is not None:
            self._file.close()

    def _write(self, records: Sequence[RequestRecord], dropped: int) -> None:
        offset = time.time() - time.perf_counter()
        lines = [_line(entry(record, stage_seconds(record), offset)) for record in records]
        if dropped:
            lines.append(_line({"dropped": dropped}))
        try:
            self._follow_rotation()
            self._file.write(b"".join(lines))
            self._file.flush()
            self._failed = False
        except (OSError, ServingError) as error:
            if not self._failed:
                logger.error("the access log cannot be written: %s", error)
            self._failed = True

    def _follow_rotation(self) -> None:
        if self._path is None:
            return
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            fresh = _open(self._path)
            self._file.close()
            self._file = fresh
