"""The server's log on stderr: each line has the time in UTC and a level, as text or as an object of JSON.

A message that every worker has (see `ONCE`) is written by the first one.
"""

import datetime as dt
import io
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

import orjson

from tpuembed.errors import printable
from tpuembed_serving.settings import LogSettings

__all__ = ["json_line", "log_to_stderr", "open_stderr", "utc_text"]

_OWN: Final = "tpuembed_serving"


def utc_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, as ISO 8601 in UTC with milliseconds."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(found: Mapping[str, Any]) -> str:
    """Return JSON in ASCII: clients choose names, and some readers end a line at other characters than a line feed."""
    line = orjson.dumps(found)
    return line.decode() if line.isascii() else json.dumps(found, separators=(",", ":"))


def open_stderr() -> TextIO:
    """Return a stream of its own to stderr. It still reaches stderr while TensorFlow's import writes elsewhere."""
    try:
        return open(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except (OSError, io.UnsupportedOperation, AttributeError):  # a notebook, or a test that captures stderr
        return sys.stderr


def log_to_stderr(settings: LogSettings, worker: int | None = None) -> None:
    """Write the messages of all loggers to stderr. `worker` is the number of this process, if there are several.

    A program that has configured logging before keeps its own handlers.
    """
    logging.getLogger(_OWN).setLevel(settings.level)
    logging.captureWarnings(True)
    if settings.level > logging.DEBUG:
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(open_stderr())
    handler.setFormatter(_Json(worker) if settings.format == "json" else _Text(worker))
    handler.addFilter(lambda record: not (worker and getattr(record, "once", False)))
    root.addHandler(handler)


class _Text(logging.Formatter):
    """TIME LEVEL MESSAGE. Each line of a message of several lines begins so."""

    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        source = "" if record.name.startswith(_OWN) else f"{record.name}: "
        if self._worker is not None and not getattr(record, "once", False):
            source = f"worker {self._worker}: {source}"
        start = f"{utc_text(record.created)} {record.levelname:<7} {source}"
        return "\n".join(start + printable(line) for line in _whole_message(record).splitlines() or [""])


class _Json(logging.Formatter):
    """One object in one line, with the fields of the message."""

    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        found = {"time": utc_text(record.created), "level": record.levelname, "logger": record.name}
        worker = {} if self._worker is None else {"worker": self._worker}
        return json_line(found | worker | getattr(record, "fields", {}) | {"message": _whole_message(record)})


def _whole_message(record: logging.LogRecord) -> str:
    """Return the message with the traceback of an error."""
    return logging.Formatter("%(message)s").format(record)
