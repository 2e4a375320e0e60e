"""Execute a plan: make the data files, have an engine fill them, prove that they are complete."""

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import CheckpointCorruptError, ExportError
from tpuembed.export.batch import FolderPlace
from tpuembed.export.engines import Engine, Job
from tpuembed.export.error_bound import table_errors
from tpuembed.export.plan import ExportPlan, ShardTask
from tpuembed.export.record import Header, Record, Recorder, read_record, start_record
from tpuembed.export.storage_error import TableError
from tpuembed.export.stream import ShardResult, Source, ignore, open_source
from tpuembed.tensor_bundle import crc

__all__ = ["StreamReport", "stream_tables"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """The table data of a plan, on the disk.

    Attributes:
        folder: that holds one file per stack, named StackPlan.file.
        crc32c: of each stack's bytes, by its name; unmasked.
        bytes_written: of table data.
        bytes_reused: of them, what an earlier export had written.
        errors: against float32, by table.
        seconds: from the first file's creation to the proof that its source was sound.
        worker_peak_rss_bytes: the largest of the processes that streamed.
    """

    folder: Path
    crc32c: Mapping[str, int]
    bytes_written: int
    bytes_reused: int
    errors: Mapping[str, TableError]
    seconds: float
    worker_peak_rss_bytes: int


def stream_tables(
    plan: ExportPlan,
    source: Source,
    folder: Path,
    engine: Engine,
    *,
    on_progress: Callable[[int, int], None] = ignore,
    on_result: Callable[[ShardResult], None] = ignore,
) -> StreamReport:
    """Write the tables of `plan` from `source` into `folder`, made where missing, and fsync them.

    Shards that an earlier call for the same export has recorded there are not written again if their bytes still have the
    checksum; anything else in the folder is removed.
    `on_progress` is called with the bytes done and the bytes in all, `on_result` with every shard that is finished.

    Raises:
        CheckpointError: the source cannot be read, changed on the way, or is not what its checksums say.
        ExportError: a file cannot be written, or a worker died.
    """
    started, total = time.monotonic(), plan.table_bytes
    record = _prepare(folder, plan, Header.of(plan, source))
    with Recorder(folder, record) as recorder:

        def finish(result: ShardResult) -> None:
            if not result.is_reused:
                recorder.add(plan.shards[result.index].file, result)
            on_result(result)

        results = engine.run(
            [_known(task, record) for task in plan.shards],
            Job(source=source, place=FolderPlace(folder)),
            on_result=finish,
            on_progress=lambda done: on_progress(done, total),
        )
        by_index = _complete(plan, [_recorded(result, record) for result in results])
    with open_source(source) as checkpoint:  # raises if it changed meanwhile
        _check_source(checkpoint, plan, by_index)
    return StreamReport(
        folder=folder,
        crc32c=_stack_checksums(plan, by_index),
        bytes_written=total,
        bytes_reused=sum(result.bytes for result in results if result.is_reused),
        errors=table_errors(plan.shards, by_index),
        seconds=time.monotonic() - started,
        worker_peak_rss_bytes=max(result.peak_rss_bytes for result in results),
    )


def _prepare(folder: Path, plan: ExportPlan, header: Header) -> Record:
    """The record of `folder`, whose data files have their sizes: what it held of the export of `header`, or nothing."""
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
    """Whether the folder has the files in their sizes."""
    return all((folder / file).is_file() and (folder / file).stat().st_size == size for file, size in files.items())


def _known(task: ShardTask, record: Record) -> ShardTask:
    """`task`, with the checksum of what is there where the record has one."""
    result = record.finished.get(task.index)
    return task if result is None else dataclasses.replace(task, written_crc32c=result.crc32c)


def _recorded(result: ShardResult, record: Record) -> ShardResult:
    """`result`, with what only the process that wrote the shard could know."""
    if not result.is_reused:
        return result
    return dataclasses.replace(record.finished[result.index], peak_rss_bytes=result.peak_rss_bytes, is_reused=True)


def _allocate(path: Path, size: int) -> None:
    """A file of `size` bytes whose blocks are reserved where the file system can do that: a full disk shows now."""
    with open(path, "ab") as file:
        try:
            _reserve(file.fileno(), size)
        except OSError as error:
            raise ExportError(
                f"data file {path}: {size} bytes cannot be reserved: {error.strerror}; "
                "free space or export fewer tables"
            ) from None


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(descriptor, size)


def _complete(plan: ExportPlan, results: Sequence[ShardResult]) -> dict[int, ShardResult]:
    """The results by index; ExportError unless every shard has one of its size: no engine is trusted with that."""
    by_index = {result.index: result for result in results}
    for task in plan.shards:
        written = by_index[task.index].bytes if task.index in by_index else 0
        if written != task.size:
            raise ExportError(f"{task}: {written} of {task.size} bytes were written; export again")
    return by_index


def _check_source(checkpoint: Checkpoint, plan: ExportPlan, results: Mapping[int, ShardResult]) -> None:
    """Raise CheckpointCorruptError where the rows read of a table are not those that the checkpoint states a checksum of.

    The checksums of tables that do not lie in order are over other bytes than rows: their files are read once more. Of a
    table of which a part is exported nothing is proven, for that would take reading all of it.
    """
    unproven = []
    whole = {place.table for stack in plan.stacks for place in stack.tables if place.is_whole}
    for table, tasks in groupby(plan.shards, key=attrgetter("table")):
        read = _combined((results[task.index].source_crc32c, task.source_size) for task in tasks)
        if table not in whole:
            continue
        stated = checkpoint.checksum(table)
        if stated is None:
            unproven.append(table)
        elif stated != read:
            checkpoint.verify([table])  # names the file and the tensor
            raise CheckpointCorruptError(
                f"checkpoint {checkpoint.path}: table {table!r}: its bytes had the CRC32C {read:#010x} when they were "
                f"exported, the index says {stated:#010x}, and a second reading finds no damage; export again, and if "
                "it happens again, check the disk and the memory of this machine"
            )
    checkpoint.verify(unproven)


def _stack_checksums(plan: ExportPlan, results: Mapping[int, ShardResult]) -> dict[str, int]:
    return {
        stack: _combined((results[task.index].crc32c, task.size) for task in tasks)
        for stack, tasks in groupby(plan.shards, key=attrgetter("stack"))
    }


def _combined(parts: Iterable[tuple[int, int]]) -> int:
    """CRC32C of a concatenation, given (checksum, bytes) of each part; shards are numbered in the order of their bytes."""
    return reduce(lambda checksum, part: crc.combine(checksum, *part), parts, 0)
