"""Hands request records from the event loop to a logging handler in a thread."""

import logging
import queue
from logging.handlers import QueueListener
from typing import Any, Final

from tpuembed_serving.core.request_record import RequestRecord

__all__ = ["RecordQueue"]

_MOST_WAITING: Final = 20_000
"""More records are dropped, so that a stalled disk or collector does not stop the server."""


class RecordQueue:
    """Passes records to `handler` in order, as the attribute `request` of a LogRecord.

    Attributes:
        dropped: the number of records that were dropped because the queue was full.
    """

    def __init__(self, handler: logging.Handler) -> None:
        self.dropped = 0
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = QueueListener(self._queue, handler)
        self._listener.start()

    def put(self, record: RequestRecord) -> None:
        """Queue a record, or drop it if the queue is full. Never blocks. One thread calls it."""
        if self._queue.qsize() >= _MOST_WAITING:
            self.dropped += 1
        else:
            self._queue.put(logging.makeLogRecord({"request": record}))

    def close(self) -> None:
        """Handle all queued records, then stop the thread."""
        self._listener.stop()
