"""Execute a plan: make the data files, have an engine fill them, prove that they are complete."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.types import ReadSum, SummedReads
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
    """The table data of a plan, where it stays.

    Attributes:
        folder: that holds one file per stack, named StackPlan.file; of holes where the bytes lie in a store.
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
    checksum; anything else in the folder is removed. For the rest see `stream_into`.
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
    """Write the tables of `plan` from `source` into `tables`, but what lies there already.

    `on_progress` is called with the bytes done and the bytes in all, `on_result` with every shard that is finished.

    Raises:
        CheckpointError: the source cannot be read, changed on the way, or is not what its checksums say.
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
    with open_source(source) as checkpoint:  # raises if it changed meanwhile
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
    """The results by index; ExportError unless every shard has one of its size: no engine is trusted with that."""
    by_index = {result.index: result for result in results}
    for task in plan.shards:
        written = by_index[task.index].bytes if task.index in by_index else 0
        if written != task.size:
            raise ExportError(f"{task}: {written} of {task.size} bytes were written; export again")
    return by_index


def _check_source(checkpoint: Checkpoint, plan: ExportPlan, results: Mapping[int, ShardResult]) -> None:
    """Raise CheckpointCorruptError where the rows read of a table are not those that the checkpoint states a checksum of.

    Of a table of which a part is exported nothing is proven, for that would take reading all of it.
    """
    unproven, met = list[str](), dict[str, ReadSum]()
    whole = {place.table for stack in plan.stacks for place in stack.tables if place.is_whole}
    for table, group in groupby(plan.shards, key=attrgetter("table")):
        tasks = list(group)
        if table not in whole:
            continue
        stated = checkpoint.checksum(table)
        if stated is None:
            unproven.append(table)
            _add_up(met, (results[task.index] for task in tasks))
            continue
        read = _combined((results[task.index].source_crc32c, task.source_size) for task in tasks)
        if stated != read:
            checkpoint.verify([table])  # names the file and the tensor
            raise _misread(
                checkpoint, table, f"had the CRC32C {read:#010x} when they were exported, the index says {stated:#010x}"
            )
    _check_sums(checkpoint, unproven, met)


def _add_up(met: dict[str, ReadSum], results: Iterable[ShardResult]) -> None:
    for result in results:
        for key, fields in result.source_sums.items():
            met[key] = met.get(key, ReadSum()) + ReadSum(*fields)


def _check_sums(checkpoint: Checkpoint, tables: Sequence[str], met: Mapping[str, ReadSum]) -> None:
    """Of `tables` whose files have checksums over other bytes than rows: files of which the reads do not prove that they are
    whole are read once more."""
    proven = checkpoint.proven(tables, met) if isinstance(checkpoint, SummedReads) else {}
    checkpoint.verify([table for table in tables if not proven.get(table)])
    for table, is_right in proven.items():
        if not is_right:
            raise _misread(checkpoint, table, "did not have the checksums of the index when they were exported")


def _misread(checkpoint: Checkpoint, table: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {checkpoint.path}: table {table!r}: its bytes {what}, and a second reading finds no damage; export again, "
        "and if it happens again, check the disk and the memory of this machine"
    )


def _stack_checksums(plan: ExportPlan, results: Mapping[int, ShardResult]) -> dict[str, int]:
    return {
        stack: _combined((results[task.index].crc32c, task.size) for task in tasks)
        for stack, tasks in groupby(plan.shards, key=attrgetter("stack"))
    }


def _combined(parts: Iterable[tuple[int, int]]) -> int:
    """CRC32C of a concatenation, given (checksum, bytes) of each part; shards are numbered in the order of their bytes."""
    return reduce(lambda checksum, part: crc.combine(checksum, *part), parts, 0)
