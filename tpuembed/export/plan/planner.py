"""Plan which bytes an export writes, to which files and in which pieces, without touching a file."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from tpuembed.config import QuantizationConfig
from tpuembed.config.checks import check_choice, check_count
from tpuembed.errors import ConfigError
from tpuembed.export.plan.plan import ExportPlan, Placement, ShardTask, StackPlan
from tpuembed.export.storage.formats import SOURCE_DTYPES, Storage, most_rows, storage_by_table
from tpuembed.manifest import LAYOUTS, STORAGES

if TYPE_CHECKING:  # TYPE_CHECKING keeps the readers out of the workers
    from tpuembed.checkpoint import TableInfo

__all__ = ["DEFAULT_MAX_MEMORY_BYTES", "plan_export"]

DEFAULT_MAX_MEMORY_BYTES = 512 << 20

# A chunk of this size stays in a core's cache from the read to the checksum and the write.
_CHUNK_BYTES = 4 << 20
# A shard is the unit of balancing, retrying and resuming: less than a second of work. _MAX_SHARDS bounds the size of
# the plan. The size does not depend on the number of workers, so fewer workers can resume an export.
_SHARD_BYTES = 64 << 20
_MAX_SHARDS = 16_384

ReadBuffers = Callable[[str, int], int]
"""(table, rows read at a time) -> the most bytes that the table's reader holds beside those rows."""


def plan_export(
    tables: Sequence["TableInfo"],
    *,
    storage: Storage = "float32",
    quantization: Mapping[str, QuantizationConfig] | None = None,
    whole: Collection[str] = (),
    alone: Collection[str] = (),
    layout: str = "variables",
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int = 1,
    may_use_fewer: bool = False,
    require_finite: bool = False,
    read_buffers: ReadBuffers = lambda table, rows: 0,  # noqa: ARG005
) -> ExportPlan:
    """Plan the export of `tables`. The plan does not depend on their order.

    Args:
        tables: the checkpoint's description of the tables to export.
        storage: key of STORAGES for all tables, or one by table; see `storage_by_table`.
        quantization: by table, for those whose activations were quantized in training.
        whole: tables that the graph reads whole. Each is a stack of its own, because a slice of a stack would be a
            copy.
        alone: further tables that are a stack of their own.
        layout: one of LAYOUTS.
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that may stream at once.
        may_use_fewer: use only as many workers as the memory allows.
        require_finite: fail at a NaN or an infinity.
        read_buffers: returns the bytes that the checkpoint's reader holds.

    Raises:
        ConfigError: no table; a table given twice, or of an unsupported shape or dtype; an unknown storage or layout;
            fewer than one worker; or a budget too small for one row, and the reader's buffers, in every worker.
        UnknownTableError: `storage` names another table.
    """
    check_choice("layout", layout, LAYOUTS)
    check_count("workers", workers)
    check_count("max_memory_bytes", max_memory_bytes)
    _check_tables(tables)
    storages = storage_by_table(storage, [table.name for table in tables])
    _check_whole(whole, storages, quantization or {}, tables)
    stacks = _stack_tables(tables, storages, quantization or {}, [*whole, *alone])
    shard_bytes = max(_SHARD_BYTES, -(-sum(stack.size for stack in stacks) // _MAX_SHARDS))
    pieces = [piece for stack in stacks for piece in _split(stack, shard_bytes)]
    workers = min(workers, len(pieces))
    if may_use_fewer:
        least = max(  # what a worker holds if it reads one row at a time
            stack.row_format(table).chunk_bytes(1) + read_buffers(table.table, 1)
            for stack in stacks
            for table in stack.tables
        )
        workers = max(1, min(workers, max_memory_bytes // least))
    budget = max_memory_bytes // workers
    chunks = {table.table: _chunk(stack, table, budget, read_buffers) for stack in stacks for table in stack.tables}
    shards = []
    for index, (stack, table, start, stop) in enumerate(pieces):
        chunk_rows, reader_bytes = chunks[table.table]
        shard = ShardTask(
            index=index,
            stack=stack.name,
            table=table.table,
            start=start,
            stop=stop,
            dim=stack.dim,
            source_dtype=table.source_dtype,
            storage=stack.storage,
            file=stack.file,
            file_offset=(table.row_offset + start) * stack.row_bytes,
            chunk_rows=min(stop - start, chunk_rows),
            quantization=table.quantization,
            reader_bytes=reader_bytes,
            require_finite=require_finite,
        )
        shards.append(shard)
    plan = ExportPlan(
        layout=layout,
        workers=workers,
        max_memory_bytes=max_memory_bytes,
        stacks=tuple(stacks),
        shards=tuple(shards),
        require_finite=require_finite,
    )
    _check_budget(plan)
    return plan


def _check_tables(tables: Sequence["TableInfo"]) -> None:
    if not tables:
        raise ConfigError("no table to export. Name at least one table of the checkpoint.")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ConfigError(f"table {table.name!r} is given twice. Give every table once.")
        seen.add(table.name)
        if table.rows < 1 or table.dim < 1:
            raise ConfigError(
                f"table {table.name!r}: its shape [{table.rows}, {table.dim}] has no elements. Leave it out."
            )
        if table.dtype.name not in SOURCE_DTYPES:
            raise ConfigError(
                f"table {table.name!r}: cannot export dtype {table.dtype.name}. Supported dtypes: "
                f"{', '.join(SOURCE_DTYPES)}. Cast the table before you write the checkpoint."
            )


def _check_whole(
    whole: Collection[str],
    storages: Mapping[str, str],
    quantization: Mapping[str, QuantizationConfig],
    tables: Sequence["TableInfo"],
) -> None:
    """Raise ConfigError if a table that the model reads whole would not be stored as all of its rows in float32."""
    for table in tables:
        name = table.name
        if name not in whole:
            continue
        reads = f"table {name!r}: the model reads the whole table, and"
        if storages[name] != "float32":
            raise ConfigError(
                f"{reads} storage {storages[name]} would be decoded at every request. Store it as float32 "
                f"(--storage '{name}=float32')."
            )
        if name in quantization:
            raise ConfigError(
                f"{reads} its quantization_config applies only to rows that are looked up. Change the model to "
                "look rows up."
            )


def _stack_tables(
    tables: Sequence["TableInfo"],
    storages: Mapping[str, str],
    quantization: Mapping[str, QuantizationConfig],
    alone: Collection[str],
) -> list[StackPlan]:
    def kind(table: "TableInfo") -> tuple[str, int, str]:
        return storages[table.name], table.dim, table.name if table.name in alone else ""

    in_order = sorted(tables, key=lambda table: (*kind(table), table.name))
    alone, stacks = sorted(alone), []
    for (storage, dim, own), group in groupby(in_order, key=kind):
        name = f"stack_{storage}_{dim}" + (f"_whole_{alone.index(own)}" if own else "")
        placements, rows = [], 0
        for table in group:
            simulated = quantization.get(table.name)
            placements.append(
                Placement(
                    table=table.name,
                    rows=table.rows,
                    row_offset=rows,
                    source_dtype=table.dtype.name,
                    quantization=None if simulated is None else dataclasses.asdict(simulated),
                )
            )
            rows += table.rows
        size = rows * STORAGES[storage].row_bytes(dim)
        stacks.append(StackPlan(name=name, dim=dim, storage=storage, rows=rows, size=size, tables=tuple(placements)))
    return stacks


def _split(stack: StackPlan, shard_bytes: int) -> Iterator[tuple[StackPlan, Placement, int, int]]:
    """Yield row ranges (stack, table, start, stop) of about `shard_bytes` each, of nearly equal size within a table."""
    for table in stack.tables:
        pieces = min(table.rows, max(1, round(table.rows * stack.row_bytes / shard_bytes)))
        bounds = [table.rows * i // pieces for i in range(pieces + 1)]
        for start, stop in pairwise(bounds):
            yield stack, table, start, stop


def _chunk(stack: StackPlan, table: Placement, budget: int, read_buffers: ReadBuffers) -> tuple[int, int]:
    """Return the rows of a table to read at a time, as many as fit in `budget` bytes and _CHUNK_BYTES, and the bytes that its
    reader holds beside them.
    """
    form = stack.row_format(table)
    rows = min(table.rows, form.rows_within(min(_CHUNK_BYTES, budget)))
    reader_bytes = read_buffers(table.table, rows)
    if reader_bytes and form.chunk_bytes(rows) + reader_bytes > budget:
        rows = most_rows(budget, lambda rows: form.chunk_bytes(rows) + read_buffers(table.table, rows), rows)
        reader_bytes = read_buffers(table.table, rows)
    return rows, reader_bytes


def _check_budget(plan: ExportPlan) -> None:
    if plan.buffer_bytes <= plan.max_memory_bytes:
        return
    widest = max(plan.shards, key=lambda task: task.buffer_bytes)
    own = plan.workers * (widest.buffer_bytes - widest.reader_bytes)
    reader = f" and the checkpoint's reader needs {plan.buffer_bytes - own} bytes" if widest.reader_bytes else ""
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers:,} workers"
    fewer = "" if plan.workers == 1 else " or use fewer workers"
    raise ConfigError(
        f"table {widest.table!r}: one row in each of {workers} needs {own} bytes of buffers{reader}, but "
        f"max_memory_bytes is {plan.max_memory_bytes}. Raise it{fewer}."
    )
