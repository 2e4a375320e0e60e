"""The place that table data is streamed to, and the record of what it already has. `store` has the one for stores."""

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.stream.batch import FolderPlace, Place
from tpuembed.export.stream.resume_log import Header, Record, Recorder, read_record, start_record
from tpuembed.export.stream.shard import ShardResult

__all__ = ["FolderTables", "Recording", "Tables"]


class Recording(Protocol):
    """Records finished shards, so that the next export can reuse them."""

    def add(self, file: str, result: ShardResult) -> None:
        """Record `result`, a shard of the data file `file`. Raises ExportError if that is no longer possible."""


class Tables(Protocol):
    """The data files of an export."""

    @property
    def folder(self) -> Path:
        """Return a folder with a file of full size for every stack, named StackPlan.file. A file has the stack's bytes
        or is sparse.
        """

    @property
    def place(self) -> Place:
        """Return the place to write to, for the engine."""

    def prepare(self, plan: ExportPlan, header: Header) -> Sequence[ShardTask]:
        """Create the data files, or take over those of an interrupted run. Return the shards to give to the engine."""

    def recording(self) -> contextlib.AbstractContextManager[Recording]:
        """Return a context that records results. At its end, the record is durable."""

    def results(self, results: Sequence[ShardResult]) -> Sequence[ShardResult]:
        """Return what the engine returned, completed by what the record has."""


class FolderTables:
    """Data files in a folder, with their record beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record: Record | None = None

    @property
    def folder(self) -> Path:
        """See Tables."""
        return self._folder

    @property
    def place(self) -> Place:
        """See Tables."""
        return FolderPlace(self._folder)

    def prepare(self, plan: ExportPlan, header: Header) -> list[ShardTask]:
        """Return all shards, each with its recorded checksum if the record has one."""
        self._record = _prepare(self._folder, plan, header)
        return [_known(task, self._record) for task in plan.shards]

    def recording(self) -> Recorder:
        """See Tables."""
        assert self._record
        return Recorder(self._folder, self._record)

    def results(self, results: Sequence[ShardResult]) -> list[ShardResult]:
        """See Tables."""
        assert self._record
        return [_recorded(result, self._record) for result in results]


def _prepare(folder: Path, plan: ExportPlan, header: Header) -> Record:
    """Return the record of `folder`: that of an earlier run of the export of `header`, or an empty one. Allocates the
    files.
    """
    found = read_record(folder)
    files = {stack.file: stack.size for stack in plan.stacks}
    if found is None or found.header != header or not _has(folder, files):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        found = None
    for file, size in files.items():
        _allocate(folder / file, size)
    if found is None:
        return start_record(folder, header)
    return found


def _has(folder: Path, files: Mapping[str, int]) -> bool:
    """Returns True if the folder has these files with these sizes."""
    return all((folder / file).is_file() and (folder / file).stat().st_size == size for file, size in files.items())


def _known(task: ShardTask, record: Record) -> ShardTask:
    """Return `task` with its recorded checksum, if there is one."""
    result = record.finished.get(task.index)
    return task if result is None else dataclasses.replace(task, written_crc32c=result.crc32c)


def _recorded(result: ShardResult, record: Record) -> ShardResult:
    """Return `result` with the recorded fields that only the process that wrote the shard could know."""
    if not result.is_reused:
        return result
    return dataclasses.replace(record.finished[result.index], peak_rss_bytes=result.peak_rss_bytes, is_reused=True)


def _allocate(path: Path, size: int) -> None:
    """Create a file of `size` bytes and reserve its blocks if the file system can, so that a full disk is noticed now."""
    with open(path, "ab") as file:
        try:
            _reserve(file.fileno(), size)
        except OSError as error:
            raise ExportError(
                f"data file {path}: {size} bytes cannot be reserved: {error.strerror}. Free space, or export "
                "fewer tables."
            ) from None


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(descriptor, size)
