"""One line of JSON for every request, on stderr or in a file. A thread writes them: the event loop waits for no disk."""

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
"""In the place of a file's path."""

_LINE_ENDS: Final = re.compile(rb"\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")
"""UTF-8 of the C1 controls, one of which ends a line, and of the separators of lines and paragraphs."""


def entry(record: RequestRecord, stages: Sequence[float], wall_offset: float) -> dict[str, Any]:
    """What is written of a request.

    Args:
        stages: how many seconds each took.
        wall_offset: what the wall clock is ahead of `time.perf_counter`, in seconds.
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
    """JSON in a line, whatever its reader takes for the end of one: clients choose names."""
    line = orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    return line if line.isascii() else _LINE_ENDS.sub(lambda end: b"\\u%04x" % ord(end[0].decode()), line)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def check_writable(target: str) -> None:
    """Raise ServingError where the file cannot be written."""
    if target != STDERR:
        _open(Path(target)).close()


def _open(path: Path | None) -> BinaryIO:
    if path is None:
        return sys.stderr.buffer
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ServingError(f"access log {path}: cannot be written: {error.strerror}") from None


class AccessLog:
    """An observer (see `observation`) that appends to a file, or writes to stderr.

    A file that was renamed or removed, as by a rotation of logs, is made anew. Workers share one: each write is whole lines.
    """

    wants_request_id = True

    def __init__(self, target: str) -> None:
        """Raises ServingError where the file cannot be written."""
        self._path = None if target == STDERR else Path(target)
        self._file = _open(self._path)
        self._failed = False
        self._records = RecordQueue("access-log", self._write)

    def finish(self, record: RequestRecord) -> None:
        """See Observer."""
        record.ensure_request_id()
        self._records.put(record)

    def close(self) -> None:
        """See Observer."""
        self._records.close()
        if self._path is not None:
            self._file.close()

    def _write(self, records: Sequence[RequestRecord], dropped: int) -> None:
        offset = time.time() - time.perf_counter()
        lines = [
            _line(entry(record, stages, offset))
            for record, stages in zip(records, stage_seconds(records).tolist(), strict=True)
        ]
        if dropped:
            lines.append(_line({"dropped": dropped}))
        try:
            self._follow_rotation()
            self._file.write(b"".join(lines))
            self._file.flush()
            self._failed = False
        except (OSError, ServingError) as error:
            if not self._failed:
                logger.error("requests are not logged: %s", error)
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
