"""Streams the tables of a plan: open the data files, let an engine fill them, check that they are complete."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import attrgetter

from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.types import PartialChecksum
from tpuembed.errors import CheckpointCorruptError, ExportError
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.report import StreamReport
from tpuembed.export.storage.error import ErrorSums, TableError
from tpuembed.export.stream.engines import Engine
from tpuembed.export.stream.shard import ShardResult, Source, ignore, open_source
from tpuembed.formats.tensor_bundle import crc
from tpuembed.manifest import STORAGES

__all__ = ["check_errors", "check_source", "combined", "stream_tables", "table_errors"]


def stream_tables(
    source: Source,
    writer: VersionWriter,
    engine: Engine,
    *,
    on_progress: Callable[[int, int], None] = ignore,
    on_result: Callable[[ShardResult], None] = ignore,
) -> StreamReport:
    """Write the tables of the plan of `writer` from `source`. Shards that are already there are only read.

    `on_progress` is called with the bytes done and the total bytes, `on_result` with every finished shard.

    Raises:
        CheckpointError: the source cannot be read, has changed, or does not have its recorded checksums.
        ExportError: a file cannot be written, or a worker died.
    """
    plan = writer.plan
    started, total = time.monotonic(), plan.table_bytes
    tasks = writer.open()
    with writer.recording() as record:

        def finish(result: ShardResult) -> None:
            if not result.is_reused:
                record(result)
            on_result(result)

        streamed = engine.run(
            tasks, source, writer, on_result=finish, on_progress=lambda done: on_progress(done, total)
        )
    results = writer.results(streamed)
    by_index = {result.index: result for result in results}
    for task in plan.shards:  # whatever the engine is
        written = by_index[task.index].bytes if task.index in by_index else 0
        if written != task.size:
            raise ExportError(f"{task}: only {written} of {task.size} bytes were written. Export again.")
    with open_source(source) as checkpoint:  # raises if the source has changed meanwhile
        check_source(checkpoint, plan, by_index)
    return StreamReport(
        folder=writer.tables,
        crc32c={
            stack: combined((by_index[task.index].crc32c, task.size) for task in tasks)
            for stack, tasks in groupby(plan.shards, key=attrgetter("stack"))
        },
        bytes_written=total,
        bytes_reused=sum(result.bytes for result in results if result.is_reused),
        errors=table_errors(plan.shards, by_index),
        seconds=time.monotonic() - started,
        worker_peak_rss_bytes=max((result.peak_rss_bytes for result in streamed), default=0),
    )


def check_source(checkpoint: Checkpoint, plan: ExportPlan, results: Mapping[int, ShardResult]) -> None:
    """Raise CheckpointCorruptError if the rows read of a table do not have the checksum that the checkpoint records."""
    checksums = checkpoint.checksums
    unproven, sums = list[str](), defaultdict[str, PartialChecksum](PartialChecksum)
    for table, group in groupby(plan.shards, key=attrgetter("table")):
        tasks = list(group)
        stated = None if checksums is None else checksums.recorded(table)
        if stated is None:
            unproven.append(table)
            for task in tasks:
                for key, fields in results[task.index].source_sums.items():
                    sums[key] += PartialChecksum(*fields)
            continue
        read = combined((results[task.index].source_crc32c, task.source_size) for task in tasks)
        if stated != read:
            checkpoint.verify([table])  # raises an error that names the file and the tensor
            raise _misread(
                checkpoint,
                table,
                f"had the CRC32C {read:#010x} when they were exported, but the index has {stated:#010x}",
            )
    # The files of these tables have checksums over other bytes than rows. Files that the reads do not cover are read again.
    proven = {} if checksums is None else checksums.proven(unproven, sums)
    checkpoint.verify([table for table in unproven if not proven.get(table)])
    for table, is_right in proven.items():
        if not is_right:
            raise _misread(checkpoint, table, "did not have the checksums of the index when they were exported")


def _misread(checkpoint: Checkpoint, table: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {checkpoint.path}: table {table!r}: its bytes {what}, and a second read finds no damage. "
        "Export again. If it happens again, check the disk and the memory of this machine."
    )


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC32C of a concatenation, given (checksum, bytes) of each part. Shards are in the order of their
    bytes.
    """
    return reduce(lambda checksum, part: crc.combine(checksum, *part), parts, 0)


def table_errors(shards: Sequence[ShardTask], results: Mapping[int, ShardResult]) -> dict[str, TableError]:
    """Return the error of every table, in the order of `shards`. `results` maps shard indices to results."""
    sums: dict[str, ErrorSums] = defaultdict(ErrorSums)
    for task in shards:
        sums[task.table] += ErrorSums(**results[task.index].errors)
    return {
        task.table: TableError(storage=task.storage)
        if task.row_format.is_exact and not sums[task.table].values
        else TableError.of(task.storage, sums[task.table])
        for task in shards
    }


def check_errors(errors: Mapping[str, TableError], max_error: float | None) -> None:
    """Raise ExportError if a looked up value of a table differs from its float32 value by more than `max_error`."""
    for table, error in errors.items():
        if max_error is not None and error.max_abs > max_error:
            raise ExportError(
                f"table {table!r}: stored as {error.storage}, a value differs by {error.max_abs:.3g} from float32, but "
                f"max_error is {max_error:g}. Store this table as {STORAGES[error.storage].better}, or raise max_error."
            )
