"""Keeps the record of a version in the making: renews it, and adds what is finished, in a thread of its own."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from tpuembed.errors import ExportError
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.record import StoreRecord
from tpuembed.export.publish.store.version_lease import Claim, Root
from tpuembed.export.publish.unfinished import PREFIX
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files import MissingBucketError

__all__ = ["Keeper"]

_SECONDS_BETWEEN_WRITES: Final = 3.0
_SECONDS_BETWEEN_BEATS: Final = 15.0
"""A fraction of LEASE_SECONDS."""


class Keeper:
    """The owner of a claim's record; a context, during which the record is renewed.

    Attributes:
        version: that is claimed.
    """

    def __init__(self, root: Root, claim: Claim) -> None:
        self.version = claim.version
        self._root, self._record, self._tag = root, claim.record, claim.tag
        self._finished: dict[int, ShardResult] = dict(claim.record.finished)
        self._error: OSError | None = None
        self._has_news = self._is_over = False
        self._write_seconds = 0.0
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tpuembed-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    @property
    def record(self) -> StoreRecord:
        """As it will be written next."""
        with self._changed:
            return dataclasses.replace(self._record, finished=dict(self._finished))

    @property
    def is_taken(self) -> bool:
        """Whether the version is another export's, as far as is known."""
        return isinstance(self._error, FileExistsError)

    @property
    def is_gone(self) -> bool:
        """Whether the store has no record of the version any more; it is asked, unless it has failed before."""
        if self._error is None:
            with contextlib.suppress(OSError):
                return self._root.bucket.head(self._root.record_key(self.version)) is None
        return isinstance(self._error, FileNotFoundError)

    def add(self, file: str, result: ShardResult) -> None:  # noqa: ARG002 - as Recording
        """Note `result`, which lies in a part that the store has.

        Raises:
            ExportError: earlier ones could not be written, or the version is another export's by now, or gone.
        """
        with self._changed:
            self._finished[result.index] = result
            self._has_news = True
            self._changed.notify()
        with failing(self._root.path):
            self._raise_error()

    def update(self, finished: Mapping[int, ShardResult] | None = None, **changes: Any) -> None:
        """Change fields of the record, and write it now.

        Raises:
            OSError: it cannot be written.
            ExportError: the version is another export's by now, or gone.
        """
        with self._changed:
            self._record = dataclasses.replace(self._record, **changes)
            if finished is not None:
                self._finished = dict(finished)
        self._raise_error()
        self._write()

    def _raise_error(self) -> None:
        if isinstance(self._error, FileExistsError):
            raise ExportError(
                f"MODEL_DIR {self._root.path}: version {self.version}: another export has taken it over, because this one was "
                "not heard of for a minute; export again"
            )
        if isinstance(self._error, FileNotFoundError):
            is_bucket = isinstance(self._error, MissingBucketError)
            what = (
                self._error.strerror
                if is_bucket
                else f"its record, {PREFIX}{self.version}/record, was removed meanwhile"
            )
            raise ExportError(
                f"MODEL_DIR {self._root.path}: version {self.version}: {what}; nothing is kept; export again"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._wait():
            try:
                self._write()
            except (OSError, ExportError):  # which whoever comes next is told
                return

    def _wait(self) -> bool:
        """Until it is time to write; False at the end."""
        with self._changed:
            # A record of thousands of shards takes its time, which shall not be most of this process's.
            pause = min(max(_SECONDS_BETWEEN_WRITES, 10 * self._write_seconds), _SECONDS_BETWEEN_BEATS)
            self._changed.wait_for(lambda: self._is_over, pause)
            self._changed.wait_for(lambda: self._is_over or self._has_news, _SECONDS_BETWEEN_BEATS - pause)
            self._has_news = False
            return not self._is_over

    def _write(self) -> None:
        started = time.monotonic()
        with self._writing:
            with self._changed:
                self._record = dataclasses.replace(self._record, beats=self._record.beats + 1)
            try:
                self._tag = self._root.bucket.replace(
                    self._root.record_key(self.version), self.record.to_bytes(), self._tag
                )
            except OSError as error:
                self._error = error
                self._raise_error()
        self._write_seconds = time.monotonic() - started
