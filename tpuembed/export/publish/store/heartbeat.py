"""Renews the lease on a version while it is written, and records finished shards, in a thread of its own."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from tpuembed.errors import ExportError
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.record import StoreRecord
from tpuembed.export.publish.store.version_lease import StoreModelDir, VersionReservation
from tpuembed.export.publish.unfinished import PREFIX
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files import MissingBucketError

__all__ = ["LeaseRenewer"]

_SECONDS_BETWEEN_WRITES: Final = 3.0
_SECONDS_BETWEEN_BEATS: Final = 15.0
"""A fraction of LEASE_SECONDS."""


class LeaseRenewer:
    """Owns the record of a reserved version; a context, during which the record is renewed.

    Attributes:
        version: the reserved version.
    """

    def __init__(self, root: StoreModelDir, reserved: VersionReservation) -> None:
        self.version = reserved.version
        self._root, self._record, self._tag = root, reserved.record, reserved.tag
        self._finished: dict[int, ShardResult] = dict(reserved.record.finished)
        self._error: OSError | None = None
        self._has_news = self._is_over = False
        self._write_seconds = 0.0
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tpuembed-lease", daemon=True)

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
        """Return the record as it will be written next."""
        with self._changed:
            return dataclasses.replace(self._record, finished=dict(self._finished))

    @property
    def is_taken(self) -> bool:
        """Returns True if this process has noticed that another export took the version."""
        return isinstance(self._error, FileExistsError)

    @property
    def is_gone(self) -> bool:
        """Returns True if the store no longer has a record of the version. Asks the store unless an earlier write
        failed.
        """
        if self._error is None:
            with contextlib.suppress(OSError):
                return self._root.bucket.head(self._root.record_key(self.version)) is None
        return isinstance(self._error, FileNotFoundError)

    def add(self, file: str, result: ShardResult) -> None:  # noqa: ARG002 - the signature of Recording
        """Record `result`, whose part is in the store.

        Raises:
            ExportError: earlier results could not be written, or the version was taken by another export, or its record
                is gone.
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
            OSError: the record cannot be written.
            ExportError: the version was taken by another export, or its record is gone.
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
                f"MODEL_DIR {self._root.path}: version {self.version}: another export has taken it over, because "
                "this one did not renew its lease for a minute. Export again."
            )
        if isinstance(self._error, FileNotFoundError):
            is_bucket = isinstance(self._error, MissingBucketError)
            what = (
                self._error.strerror
                if is_bucket
                else f"its record, {PREFIX}{self.version}/record, was removed meanwhile"
            )
            raise ExportError(
                f"MODEL_DIR {self._root.path}: version {self.version}: {what}. Nothing is kept. Export again."
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._wait():
            try:
                self._write()
            except (OSError, ExportError):  # the next call of add or update raises it
                return

    def _wait(self) -> bool:
        """Wait until it is time to write. Returns False at the end."""
        with self._changed:
            # Writing a record of thousands of shards takes time: spend at most a tenth of this process's time on it.
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
