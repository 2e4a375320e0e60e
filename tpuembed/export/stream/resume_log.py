"""The finished shards of an export, on the disk: what a killed export leaves for the next one.

The record lies beside the data files and only grows, a line per fact: the CRC32C of some JSON, a space, the JSON. The first
line says what is exported (`Header`), every other one is the ShardResult of a shard whose bytes were flushed to the disk
before the line was written. A line that a kill cut short counts for nothing, nor does what follows it.
"""

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import tpuembed
from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.stream.shard import ShardResult, Source
from tpuembed.tensor_bundle import crc

__all__ = ["Header", "Record", "Recorder", "export_key", "flush", "flush_data", "read_record", "start_record"]

FORMAT: Final = 1
"""Of the record and of what it promises; a record of another number is not resumed."""
_NAME: Final = "record"
_SECONDS_BETWEEN_FLUSHES: Final = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What is exported.

    Attributes:
        key: see `export_key`.
        source: path of the checkpoint.
        fingerprint: of the checkpoint.
        table_bytes: of all shards.
        format: FORMAT of who wrote it.
    """

    key: str
    source: str
    fingerprint: str
    table_bytes: int
    format: int = FORMAT

    @classmethod
    def of(cls, plan: ExportPlan, source: Source) -> "Header":
        """The header of an export of `source` by `plan`."""
        return cls(
            key=export_key(plan, source),
            source=source.path,
            fingerprint=source.fingerprint,
            table_bytes=plan.table_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What a record says.

    Attributes:
        header: its first line.
        finished: shards by index.
        size: bytes of its sound lines.
        written: when it last grew, in seconds of `time.time`.
    """

    header: Header
    finished: Mapping[int, ShardResult]
    size: int
    written: float


def export_key(plan: ExportPlan, source: Source) -> str:
    """Equal for exports whose shards are the same bytes in the same places, by the same version of tpuembed.

    Workers and memory are not in it: an export that was killed for want of memory is resumed with less of both.
    """
    shards = [{**vars(task), "chunk_rows": 0, "reader_bytes": 0} for task in plan.shards]
    stacks = [dataclasses.asdict(stack) for stack in plan.stacks]
    facts = [FORMAT, tpuembed.__version__, dataclasses.asdict(source), plan.layout, stacks, shards]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_record(folder: Path) -> Record | None:
    """The record in `folder`; None where there is none that this version understands."""
    path = folder / _NAME
    try:
        data, written = path.read_bytes(), path.stat().st_mtime
    except OSError:
        return None
    lines = list(_sound_lines(data))
    try:
        header = Header(**lines[0][0]) if lines else None
        results = [ShardResult(**fields) for fields, _ in lines[1:]]
    except TypeError:  # other fields: of another format
        return None
    if header is None or header.format != FORMAT:
        return None
    finished = {result.index: result for result in results}
    return Record(header=header, finished=finished, size=lines[-1][1], written=written)


def _sound_lines(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """(what a line says, where it ends) up to the first one that is damaged."""
    end = 0
    for line in data.splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        end += len(line)
        if not line.endswith(b"\n") or checksum != _checksum(text):
            return
        yield json.loads(text), end


def _line(facts: Mapping[str, Any]) -> bytes:
    text = json.dumps(facts).encode()
    return _checksum(text) + b" " + text + b"\n"


def _checksum(text: bytes) -> bytes:
    return f"{crc.value(text):08x}".encode()


def start_record(folder: Path, header: Header) -> Record:
    """Begin the record of `folder`, and flush it and the folder's names to the disk."""
    line = _line(dataclasses.asdict(header))
    (folder / _NAME).write_bytes(line)
    for place in (folder / _NAME, folder, folder.parent, folder.parent.parent):
        flush(place)
    return Record(header=header, finished={}, size=len(line), written=time.time())


class Recorder:
    """Adds to the record of a folder, in a thread of its own: workers do not wait for the disk.

    A context: at its end all that was added is on the disk, or after an exception what was so already.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        """Go on after the sound lines of `record`, which was read in `folder`."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            if kind is not None:
                self._pending.clear()
            self._changed.notify()
        self._thread.join()
        if kind is None:
            self._raise_error()

    def add(self, file: str, result: ShardResult) -> None:
        """Record `result`, once the data file called `file` is flushed.

        Raises:
            ExportError: an earlier one could not be.
        """
        with self._changed:
            self._pending.append((file, result))
            self._changed.notify()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise ExportError(
                f"staging folder {self._folder}: what was written cannot be flushed to the disk: {self._error.strerror}; "
                "free space or fix the disk"
            )

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._write(batch)
        except OSError as error:
            self._error = error

    def _next_batch(self) -> list[tuple[str, ShardResult]]:
        """What has come since the last one; nothing, at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, _SECONDS_BETWEEN_FLUSHES)
            self._changed.wait_for(lambda: self._is_over or self._pending)
            batch, self._pending = self._pending, []
            return batch

    def _write(self, batch: Iterable[tuple[str, ShardResult]]) -> None:
        batch = list(batch)
        for file in sorted({file for file, _ in batch}):
            flush_data(self._folder / file)
        with open(self._folder / _NAME, "ab") as record:
            record.write(b"".join(_line(dataclasses.asdict(result)) for _, result in batch))
            record.flush()
            os.fsync(record.fileno())


def flush(path: Path) -> None:
    """Have the disk hold what a file or folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_data(path: Path) -> None:
    """Have the disk hold what a data file holds, and memory no longer.

    The kernel writes new rows into the pages that this frees, not into those of what other programs read, nor into memory
    that a virtual machine has to ask its host for: there, a table takes half the time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
