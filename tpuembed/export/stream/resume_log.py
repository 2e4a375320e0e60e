"""The finished shards of an export, recorded on the disk, so that the next run can resume an interrupted one.

The record is a file beside the data files, and only grows. Each line has one fact: the CRC32C of some JSON, a space,
the JSON. The first line identifies the export (`Header`). Every other line is the ShardResult of a shard whose bytes
were flushed to the disk before. A line that was cut short is ignored, and so is everything after it.
"""

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import tpuembed
from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.stream.shard import ShardResult, Source, flush_data
from tpuembed.files import flush
from tpuembed.formats.tensor_bundle import crc

__all__ = ["Header", "Record", "Recorder", "read_record", "start_record"]

FORMAT: Final = 1
"""The format of the data that a record describes. It is in the key, so that no export resumes one of another format."""
_NAME: Final = "record"
_SECONDS_BETWEEN_FLUSHES: Final = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """Identifies an export.

    Attributes:
        key: is equal for exports by this version of tpuembed whose shards are the same bytes in the same places. Workers and
            memory do not count: an export that ran out of memory can be resumed with less of both. Nor does
            `require_finite`: the record says which shards were checked.
        source: path of the checkpoint.
        fingerprint: of the checkpoint.
        table_bytes: of all shards.
        lasts: another run can open the source and resume the export.
    """

    key: str
    source: str
    fingerprint: str
    table_bytes: int
    lasts: bool = True

    @classmethod
    def of(cls, plan: ExportPlan, source: Source) -> "Header":
        """Return the header of an export of `source` by `plan`."""
        shards = [{**vars(task), "chunk_rows": 0, "reader_bytes": 0, "require_finite": False} for task in plan.shards]
        stacks = [dataclasses.asdict(stack) for stack in plan.stacks]
        facts = [FORMAT, tpuembed.__version__, dataclasses.asdict(source), plan.layout, stacks, shards]
        return cls(
            key=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
            source=source.path,
            fingerprint=source.fingerprint,
            table_bytes=plan.table_bytes,
            lasts=source.lasts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The content of a record.

    Attributes:
        header: its first line.
        finished: shards by index.
        size: bytes of its intact lines.
        written: time of the last addition, in seconds of `time.time`.
    """

    header: Header
    finished: Mapping[int, ShardResult]
    size: int
    written: float


def read_record(folder: Path) -> Record | None:
    """Return the record in `folder`, or None if there is none that this version can read."""
    path = folder / _NAME
    try:
        data, written = path.read_bytes(), path.stat().st_mtime
    except OSError:
        return None
    lines, size = list[dict[str, Any]](), 0
    for line in data.splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != _checksum(text):
            break
        lines.append(json.loads(text))
        size += len(line)
    if not lines:
        return None
    try:
        header, results = Header(**lines[0]), [ShardResult(**fields) for fields in lines[1:]]
    except TypeError:  # the fields differ: another format
        return None
    return Record(header=header, finished={result.index: result for result in results}, size=size, written=written)


def _line(facts: Mapping[str, Any]) -> bytes:
    text = json.dumps(facts).encode()
    return _checksum(text) + b" " + text + b"\n"


def _checksum(text: bytes) -> bytes:
    return f"{crc.value(text):08x}".encode()


def start_record(folder: Path, header: Header) -> Record:
    """Create the record of `folder`, and flush it and the folder's names to the disk."""
    line = _line(dataclasses.asdict(header))
    (folder / _NAME).write_bytes(line)
    for place in (folder / _NAME, folder, folder.parent, folder.parent.parent):
        flush(place)
    return Record(header=header, finished={}, size=len(line), written=time.time())


class Recorder:
    """Adds to the record of a folder, in a thread of its own, so that workers do not wait for the disk.

    A context. At its normal end, everything that was added is on the disk. After an exception, pending results are
    dropped.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        """Append after the intact lines of `record`, which was read in `folder`."""
        self._folder = folder
        os.truncate(folder / _NAME, record.size)
        self._pending: list[tuple[str, ShardResult]] = []
        self._error: OSError | None = None
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tpuembed-recorder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._changed:
            self._is_over = True
            if kind is not None:
                self._pending.clear()
            self._changed.notify()
        self._thread.join()
        if kind is None:
            self._raise_error()

    def add(self, file: str, result: ShardResult) -> None:
        """Record `result`, after the data file `file` is flushed.

        Raises:
            ExportError: an earlier result could not be recorded.
        """
        with self._changed:
            self._pending.append((file, result))
            self._changed.notify()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise ExportError(
                f"staging folder {self._folder}: the written data cannot be flushed to the disk: "
                f"{self._error.strerror}. Free space or repair the disk."
            )

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, _SECONDS_BETWEEN_FLUSHES)
                    self._changed.wait_for(lambda: self._is_over or self._pending)
                    batch, self._pending = self._pending, []
                if not batch:
                    return
                for file in sorted({file for file, _ in batch}):
                    flush_data(self._folder / file)
                with open(self._folder / _NAME, "ab") as record:
                    record.write(b"".join(_line(dataclasses.asdict(result)) for _, result in batch))
                    record.flush()
                    os.fsync(record.fileno())
        except OSError as error:
            self._error = error
