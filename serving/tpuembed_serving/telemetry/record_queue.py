"""A queue of request records from the event loop to a thread that writes them."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from tpuembed_serving.core.request_record import RequestRecord

__all__ = ["RecordQueue"]

_MOST_WAITING: Final = 20_000
"""More records are dropped, so that a stalled disk or collector does not stop the server."""
_MOST_AT_ONCE: Final = 500


class RecordQueue:
    """Passes the queued records to `handle` in order, with the number of records that were dropped since its last call."""

    def __init__(self, name: str, handle: Callable[[Sequence[RequestRecord], int], None]) -> None:
        self._handle = handle
        self._queue: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, record: RequestRecord) -> None:
        """Queue a record, or drop it if the queue is full. Never blocks. One thread calls it."""
        if self._queue.qsize() >= _MOST_WAITING:
            self._dropped += 1
        else:
            self._queue.put(record)

    def close(self) -> None:
        """Handle all queued records, then stop the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        reported = 0
        more = True
        while more:
            batch = [self._queue.get()]
            while len(batch) < _MOST_AT_ONCE and not self._queue.empty():
                batch.append(self._queue.get())
            more = batch[-1] is not None
            dropped = self._dropped
            self._handle([record for record in batch if record is not None], dropped - reported)
            reported = dropped
