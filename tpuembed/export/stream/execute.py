"""Executes a plan: create the data files, let an engine fill them, check that they are complete."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.types import PartialChecksum, SummedReads
from tpuembed.errors import CheckpointCorruptError, ExportError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.publish.tables import FolderTables, Tables
from tpuembed.export.storage.error import TableError
from tpuembed.export.storage.error_bound import table_errors
from tpuembed.export.stream.engines import Engine, Job
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult, Source, ignore, open_source
from tpuembed.tensor_bundle import crc

__all__ = ["StreamReport", "stream_into", "stream_tables"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """The table data of a plan.

    Attributes:
        folder: has one file per stack, named StackPlan.file; a sparse file if the bytes are in a store.
        crc32c: of each stack's bytes, by its name; unmasked.
        bytes_written: bytes of table data.
        bytes_reused: the part of them that an earlier run had written.
        errors: differences from float32, by table.
        seconds: from the first file's creation to the end of the check of the source.
        worker_peak_rss_bytes: the largest peak of the processes that streamed.
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
    """Write the tables of `plan` from `source` into `folder`, created if it is missing, and fsync them.

    Shards that an earlier call for the same export has recorded there are reused if their bytes still have the
    checksum. Anything else in the folder is removed. For the rest see `stream_into`.
    """
    return stream_into(plan, source, FolderTables(folder), engine, on_progress=on_progress, on_result=on_result)


def stream_into(
    plan: ExportPlan,
    source: Source,
    tables: Tables,
    engine: Engine,
    *,
    on_progress: Callable[[int, int], None] = ignore,
    on_result: Callable[[ShardResult], None] = ignore,
) -> StreamReport:
    """Write the tables of `plan` from `source` into `tables`, except for the shards that are already there.

    `on_progress` is called with the bytes done and the total bytes, `on_result` with every finished shard.

    Raises:
        CheckpointError: the source cannot be read, has changed, or does not have its recorded checksums.
        ExportError: a file cannot be written, or a worker died.
    """
    started, total = time.monotonic(), plan.table_bytes
    tasks = tables.prepare(plan, Header.of(plan, source))
    before = total - sum(task.size for task in tasks)
    with tables.recording() as recording:

        def finish(result: ShardResult) -> None:
            if not result.is_reused:
                recording.add(plan.shards[result.index].file, result)
            on_result(result)

        job = Job(source=source, place=tables.place)
        streamed = engine.run(tasks, job, on_result=finish, on_progress=lambda done: on_progress(before + done, total))
    results = tables.results(streamed)
    by_index = _complete(plan, results)
    with open_source(source) as checkpoint:  # raises if the source has changed meanwhile
        _check_source(checkpoint, plan, by_index)
    return StreamReport(
        folder=tables.folder,
        crc32c=_stack_checksums(plan, by_index),
        bytes_written=total,
        bytes_reused=sum(result.bytes for result in results if result.is_reused),
        errors=table_errors(plan.shards, by_index),
        seconds=time.monotonic() - started,
        worker_peak_rss_bytes=max((result.peak_rss_bytes for result in streamed), default=0),
    )


def _complete(plan: ExportPlan, results: Sequence[ShardResult]) -> dict[int, ShardResult]:
    """Return the results by index. Raise ExportError unless every shard has a result of the right size, whatever the
    engine.
    """
    by_index = {result.index: result for result in results}
    for task in plan.shards:
        written = by_index[task.index].bytes if task.index in by_index else 0
        if written != task.size:
            raise ExportError(f"{task}: only {written} of {task.size} bytes were written. Export again.")
    return by_index


def _check_source(checkpoint: Checkpoint, plan: ExportPlan, results: Mapping[int, ShardResult]) -> None:
    """Raise CheckpointCorruptError if the rows read of a table do not have the checksum that the checkpoint records.

    A table of which only a part is exported is not checked, because that would mean reading all of it.
    """
    unproven, sums = list[str](), dict[str, PartialChecksum]()
    whole = {place.table for stack in plan.stacks for place in stack.tables if place.is_whole}
    for table, group in groupby(plan.shards, key=attrgetter("table")):
        tasks = list(group)
        if table not in whole:
            continue
        stated = checkpoint.checksum(table)
        if stated is None:
            unproven.append(table)
            _add_up(sums, (results[task.index] for task in tasks))
            continue
        read = _combined((results[task.index].source_crc32c, task.source_size) for task in tasks)
        if stated != read:
            checkpoint.verify([table])  # raises an error that names the file and the tensor
            raise _misread(
                checkpoint,
                table,
                f"had the CRC32C {read:#010x} when they were exported, but the index has {stated:#010x}",
            )
    _check_sums(checkpoint, unproven, sums)


def _add_up(sums: dict[str, PartialChecksum], results: Iterable[ShardResult]) -> None:
    for result in results:
        for key, fields in result.source_sums.items():
            sums[key] = sums.get(key, PartialChecksum()) + PartialChecksum(*fields)


def _check_sums(checkpoint: Checkpoint, tables: Sequence[str], sums: Mapping[str, PartialChecksum]) -> None:
    """Check `tables` whose files have checksums over other bytes than rows. Files that the reads do not cover are read
    again.
    """
    proven = checkpoint.proven(tables, sums) if isinstance(checkpoint, SummedReads) else {}
    checkpoint.verify([table for table in tables if not proven.get(table)])
    for table, is_right in proven.items():
        if not is_right:
            raise _misread(checkpoint, table, "did not have the checksums of the index when they were exported")


def _misread(checkpoint: Checkpoint, table: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {checkpoint.path}: table {table!r}: its bytes {what}, and a second read finds no damage. "
        "Export again. If it happens again, check the disk and the memory of this machine."
    )


def _stack_checksums(plan: ExportPlan, results: Mapping[int, ShardResult]) -> dict[str, int]:
    return {
        stack: _combined((results[task.index].crc32c, task.size) for task in tasks)
        for stack, tasks in groupby(plan.shards, key=attrgetter("stack"))
    }


def _combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC32C of a concatenation, given (checksum, bytes) of each part. Shards are in the order of their
    bytes.
    """
    return reduce(lambda checksum, part: crc.combine(checksum, *part), parts, 0)
